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


# the kernel's steps through the rank
RANK_STEP = 32
# fp32 factors would be multiplied in TF32
EPILOGUE_DTYPES = (torch.float16, torch.bfloat16)


def fits_epilogue(low_rank: LowRank, x: torch.Tensor) -> bool:
    """Whether the Triton matmul can add `low_rank` in its epilogue for an input x."""
    down, up = low_rank
    return (
        up.dtype is x.dtype
        and x.dtype in EPILOGUE_DTYPES
        and down.device == x.device
        and up.shape[1] % RANK_STEP == 0
        and up.is_contiguous()
    )


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
