"""rotate: the grouped regular Hadamard rotation of ConvRot, which spreads outliers over a group of columns.

y = x @ blockdiag(H, H, ...), H = H(group) orthonormal and symmetric, so rotating twice gives x back, and
(x H)(w H)^T = x w^T: the weight is rotated once, offline, the activation in the kernel that quantises it.
"""

from __future__ import annotations

import functools

import torch

from .capability import detect
from .dispatch import ROTATION_GROUPS, UnsupportedInput, choose
from .launch import on_device


@functools.lru_cache(maxsize=32)
def hadamard(group: int, device: torch.device) -> torch.Tensor:
    """H(group): [group, group] fp32 on `device`; -1 for every base-4 digit where row and column add up to 3."""
    index = torch.arange(group)
    differ = index[:, None] ^ index[None, :]
    both = differ & (differ >> 1) & 0x5555
    negative = torch.zeros_like(both)
    for bit in range(0, 12, 2):
        negative ^= (both >> bit) & 1
    return ((1 - 2 * negative).float() / group**0.5).to(device)


def check_group(k: int, group: int) -> None:
    """Raise UnsupportedInput unless group is a power of 4 from 4 to 1024 that divides k."""
    if group not in ROTATION_GROUPS or k % group:
        raise UnsupportedInput(
            f"rotate: group {group} on {k} columns. Needed: one of {ROTATION_GROUPS} that divides the columns. "
            "Use a smaller group or no rotation."
        )


def rotate_torch(x: torch.Tensor, group: int, scratch: tuple[torch.Tensor, torch.Tensor] | None = None) -> torch.Tensor:
    """x [M, K] float -> [M, K] fp32, rotated by a matrix product; on a CPU by two, of H(group) = H(outer) x H(inner).

    scratch: two contiguous fp32 tensors of M * K numbers, overwritten, one of which gets the result; the second may be x
        itself. None: new ones.
    """
    first, second = scratch if scratch is not None else (None, None)
    two = x.device.type == "cpu" and group >= 256
    inner = group if not two else 64 if group == 1024 else 16
    first = None if first is None else first.view(-1, inner)
    rows = torch.mm(x.float().reshape(-1, inner), hadamard(inner, x.device), out=first)
    if not two:
        return rows.view(x.shape)
    # an eighth to a twelfth of the multiplications
    outer = group // inner
    rows = rows.view(-1, outer, inner)
    second = None if second is None else second.view(rows.shape)
    return torch.bmm(hadamard(outer, x.device).expand(len(rows), -1, -1), rows, out=second).view(x.shape)


def rotate(x: torch.Tensor, group: int, *, implementation: str | None = None) -> torch.Tensor:
    """Multiply each contiguous run of `group` columns by H(group).

    Args:
        x: [..., K] float16, bfloat16 or float32.
        group: 4, 16, 64, 256 or 1024, dividing K.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        [..., K] in the dtype of x.
    Raises:
        UnsupportedInput: the group is not a power of 4 in range or does not divide K, or x is not floating.
    """
    if not x.is_floating_point():
        raise UnsupportedInput(f"rotate: x is {x.dtype}. Needed: a floating dtype. Dequantise it first.")
    k = x.shape[-1]
    check_group(k, group)
    chosen = choose(
        detect(x.device), in_features=k, out_features=k, rotation_group=group, implementation=implementation
    )
    rows = x.reshape(-1, k)
    if chosen.implementation == "torch" or rows.numel() == 0:
        return rotate_torch(rows, group).to(x.dtype).reshape(x.shape)
    from .rotate_triton import rotate_triton

    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    y = torch.empty(rows.shape, dtype=x.dtype, device=x.device)
    with on_device(x.device):
        rotate_triton(rows, y, group)
    return y.reshape(x.shape)
