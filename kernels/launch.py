"""Launching on the GPU that holds the tensors, not on the one that happens to be current."""

from __future__ import annotations

import contextlib

import torch

_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device):
    """A context in which Triton launches on `device`. Free when it is current already or is no CUDA device."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)
