"""add_low_rank: y + (x down^T) up^T, what a stack of LoRAs adds to the output of a Linear."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LowRank(NamedTuple):
    """A low-rank matrix up @ down, [N, K] of rank at most R; rows of zeros may pad R.

    down: [R, K]; up: [N, R], factors included. One float dtype and device, contiguous.
    """

    down: torch.Tensor
    up: torch.Tensor


def add_low_rank(y: torch.Tensor, x: torch.Tensor, low_rank: LowRank) -> torch.Tensor:
    """y + (x down^T) up^T, both products accumulated in fp32; the sum is rounded once, the inner product once before.

    Args:
        y: [..., N] float, fresh: it may be written to.
        x: [..., K] float of the dtype and device of y. Factors of another dtype or device are cast on every call.
    Returns:
        [..., N] in the dtype of y.
    """
    down, up = low_rank
    if down.dtype is not x.dtype or down.device != x.device:
        down, up = down.to(x.device, x.dtype), up.to(x.device, x.dtype)
    inner = torch.nn.functional.linear(x, down)
    # a compiler wants no writing; a gradient must not be lost
    if torch.compiler.is_compiling() or inner.requires_grad or y.dtype is not x.dtype or not y.is_contiguous():
        return y + torch.nn.functional.linear(inner, up)
    y.view(-1, y.shape[-1]).addmm_(inner.reshape(-1, inner.shape[-1]), up.t())
    return y
