"""residual_norm: what stands between two Linears of a transformer block, in one pass over the activation.

    x' = x + gate * rms_norm(y)                               the branch that ends: a norm or none, and a gate
    q  = quantise(R(rms_norm(x') * (1 + scale) + shift))      the norm and the modulation of the branch that begins

Either half may be missing. Every step is rounded to the dtype of x where PyTorch's own operations, called one after the
other, round it; for bfloat16 and float16 the sum of squares is added up in the order of PyTorch's CUDA kernel too. A
rounding more or less would be harmless in itself, but each one flips codes of the next INT8 Linear: so the fused block
can be compared with the unfused one bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .packed_rows import empty_rows
from .quantize_rows import quantize_rows_torch
from .rotate import check_group


class Branch(NamedTuple):
    """The end of a residual branch: y [..., K], the weight [K] of its norm or None, eps, gate [B, K] (B divides the rows).

    The weight has the dtype of x or float32.
    """

    y: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    gate: torch.Tensor


class Norm(NamedTuple):
    """The start of the next: the weight [K] of its norm, eps, scale [B, K] of the modulation 1 + scale, shift [B, K] or None.

    The weight has the dtype of x or float32.
    """

    weight: torch.Tensor
    eps: float
    scale: torch.Tensor
    shift: torch.Tensor | None = None


def _by_image(x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
    """x [M, K] as [B, M / B, K] for a modulation [B, K]."""
    return x.view(modulation.shape[0], -1, x.shape[-1])


def add_branch_torch(x: torch.Tensor, branch: Branch) -> torch.Tensor:
    """x [M, K] + gate * rms_norm(y), step by step, in the dtype of x."""
    y = branch.y.reshape(x.shape)
    normed = y if branch.weight is None else _normed(y, branch.weight, branch.eps)
    return (_by_image(x, branch.gate) + branch.gate.unsqueeze(1) * _by_image(normed, branch.gate)).view(x.shape)


def modulated_norm_torch(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """rms_norm(x [M, K]) * (1 + scale) + shift, step by step, in the dtype of x."""
    v = _by_image(_normed(x, norm.weight, norm.eps), norm.scale) * (1.0 + norm.scale).unsqueeze(1)
    return (v if norm.shift is None else v + norm.shift.unsqueeze(1)).view(x.shape)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # a float32 weight norms in float32, rounded once
    return torch.nn.functional.rms_norm(x.to(weight.dtype), x.shape[-1:], weight, eps).to(x.dtype)


def residual_norm(
    x: torch.Tensor,
    branch: Branch | None = None,
    norm: Norm | None = None,
    *,
    rotation_group: int = 0,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | tuple | None]:
    """End one residual branch, begin the next, or both.

    Args:
        x: [..., K] float16, bfloat16 or float32, contiguous.
        branch: what is added to x; None to add nothing.
        norm: what is quantised; None to quantise nothing.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K: rotate each run of that many columns before quantising.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        x', of the shape and dtype of x (x itself without a branch), and the quantised rows as
        `PreparedLinear.with_rows` takes them, or None without a norm.
    Raises:
        UnsupportedInput: a shape, dtype or group that is not listed here.
    """
    k = x.shape[-1] if x.dim() else 0
    m = x.numel() // k if k else 0
    _check(x, branch, norm, m, k)
    if rotation_group:
        check_group(k, rotation_group)
    device = detect(x.device)
    chosen = choose(
        device, in_features=k, out_features=k, rotation_group=rotation_group, implementation=implementation
    ).implementation
    rows = q = scale = None
    if norm is not None:
        rows, q, scale = empty_rows(m, k, x.device, chosen)
    flat = x.view(m, k)
    if m == 0:
        return x, rows
    if chosen == "torch":
        out = flat if branch is None else add_branch_torch(flat, branch)
        if norm is not None:
            quantize_rows_torch(modulated_norm_torch(out, norm), q, scale, rotation_group, None)
        return out.view(x.shape), rows
    from .residual_norm_triton import residual_norm_triton

    out = None if branch is None else torch.empty_like(flat)
    with on_device(x.device):
        residual_norm_triton(flat, branch, out, norm, q, scale, rotation_group)
    return x if out is None else out.view(x.shape), rows


def _check(x: torch.Tensor, branch: Branch | None, norm: Norm | None, m: int, k: int) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not k or not x.is_contiguous():
        raise UnsupportedInput(
            f"residual_norm: x is {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}. Needed: float16, bfloat16 or "
            "float32, contiguous, with at least one column. Convert it first."
        )
    vectors = [] if branch is None else [("gate", branch.weight, branch.gate)]
    if norm is not None:
        vectors += [("scale", norm.weight, norm.scale)]
        vectors += [] if norm.shift is None else [("shift", norm.weight, norm.shift)]
    for name, weight, modulation in vectors:
        fits = (
            modulation.dim() == 2 and modulation.shape[1] == k and modulation.shape[0] and modulation.dtype == x.dtype
        )
        fits = fits and (weight is None or (weight.shape == (k,) and weight.dtype in (x.dtype, torch.float32)))
        if not fits or m % modulation.shape[0]:
            norm_weight = "none" if weight is None else f"{weight.dtype} {tuple(weight.shape)}"
            raise UnsupportedInput(
                f"residual_norm: the norm's weight is {norm_weight} and {name} {modulation.dtype} "
                f"{tuple(modulation.shape)} for {m} rows of {k} {x.dtype}. Needed: [{k}] of that dtype or float32, and "
                f"[B, {k}] of that dtype, B dividing the rows. Run the norm by itself instead."
            )
        if modulation.stride(1) != 1 or (weight is not None and weight.stride(0) != 1):
            raise UnsupportedInput(
                f"residual_norm: {name} has the strides {modulation.stride()}, or the norm's weight is spaced. Needed: "
                "columns side by side. Call contiguous() first."
            )
    if norm is not None and norm.shift is not None and norm.shift.shape != norm.scale.shape:
        raise UnsupportedInput(
            f"residual_norm: scale is {tuple(norm.scale.shape)} and shift {tuple(norm.shift.shape)}. Needed: the same. "
            "Expand one of them."
        )
    if branch is not None and (branch.y.shape != x.shape or branch.y.dtype != x.dtype or not branch.y.is_contiguous()):
        raise UnsupportedInput(
            f"residual_norm: y is {branch.y.dtype} {tuple(branch.y.shape)} beside x {x.dtype} {tuple(x.shape)}. "
            "Needed: the same shape and dtype, contiguous. Convert it first."
        )
