"""What the fused forms of all kinds of blocks have in common: which inputs they take, and arguments of the kernels."""

from __future__ import annotations

import importlib

import torch

from ....kernels.residual_norm import Norm, modulated_norm_torch

NOT_TAKEN = "a Linear did not take the rows that were made for it"


def owner(module: torch.nn.Module, where: str):
    """The class of the block ("") or of a child by its path, or a Python module of the host by its name."""
    if where.startswith("comfy."):
        return importlib.import_module(where)
    return type(module.get_submodule(where))


def options(kind: tuple) -> dict:
    """What a kernel that makes rows of `kind` (short_way.rows_kind) is told."""
    return {"rotation_group": kind[3], "implementation": kind[1]}


def why_unfit(x: torch.Tensor) -> str | None:
    """None for an input that fused blocks take."""
    import comfy.model_management

    if type(x) is not torch.Tensor or x.dim() != 3 or not x.is_contiguous() or not x.numel():
        return "the input is no plain tensor of tokens"
    # the host clamps float16 in between
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"the input is {x.dtype}"
    if x.requires_grad or comfy.model_management.in_training:
        return "the MODEL is in training"
    return None


def by_row(modulation: torch.Tensor, count: int, x: torch.Tensor) -> torch.Tensor | str:
    """[B, count K] or [B, 1 or L, count K] as [rows, count, K]: one row for all, for each image or for each token.

    One sentence when it is none of these for x [B, L, K].
    """
    batch, tokens, width = x.shape
    leading = tuple(modulation.shape[:-1])
    fits = leading in ((1,), (batch,), (1, 1), (batch, 1), (batch, tokens)) and modulation.shape[-1] == count * width
    if not fits or modulation.dtype != x.dtype or modulation.device != x.device:
        return f"the modulation is {modulation.dtype} {tuple(modulation.shape)} beside {x.dtype} {tuple(x.shape)}"
    return modulation.reshape(-1, count, width)


def normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """What `norm` makes of x [..., K], unquantised."""
    return modulated_norm_torch(x.view(-1, x.shape[-1]), norm).view(x.shape)
