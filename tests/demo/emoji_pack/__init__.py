"""Demo-only nodes around the emoji model: its prompts, its decoder, and a report of what ran."""

from .nodes import comfy_entrypoint

__all__ = ["comfy_entrypoint"]
