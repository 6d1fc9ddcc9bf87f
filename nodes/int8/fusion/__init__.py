"""Fused transformer blocks: one file per architecture, found through registry.py."""
