"""residual_norm: what stands between two Linears of a transformer block, in one pass over the activation.

    x' = x + gate * rms_norm(y)                          the branch that ends: a norm or none, a gate or none
    q  = quantise(R(norm(x') * (1 + scale) + shift))     the norm, RMSNorm or LayerNorm, and the modulation of the next

Either half may be missing. Every step is rounded to the dtype of x where PyTorch's own operations, called one after the
other, round it, and not in between where a model calls torch.addcmul; for bfloat16 and float16 sums are taken in the
order of PyTorch's CUDA kernel too (of a LayerNorm where 512 divides K). A rounding more or less would be harmless in
itself, but each one flips codes of the next INT8 Linear: so the fused block can be compared with the unfused one bit for
bit.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from . import graph_ops
from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .packed_rows import empty_rows
from .quantize_rows import quantize_rows_torch
from .rotate import check_group


class Branch(NamedTuple):
    """The end of a residual branch: x + gate * rms_norm(y), with or without the norm and the gate.

    y: [..., K]. weight: [K] of the norm, of the dtype of x or float32, or None for no norm. gate: [B, K], B dividing the
    rows, or None. one_rounding: whether the product stays unrounded, as in torch.addcmul(x, gate, y).
    """

    y: torch.Tensor
    weight: torch.Tensor | None
    eps: float
    gate: torch.Tensor | None
    one_rounding: bool = False


class Norm(NamedTuple):
    """The start of the next: norm(x) * (1 + scale) + shift.

    weight: [K] of the norm, of the dtype of x or float32, or None. bias: like weight, or None. scale, shift: [B, K], B
    dividing the rows; None for no modulation, or for one that does not shift. centred: LayerNorm in place of RMSNorm.
    one_rounding: whether the product stays unrounded, as in torch.addcmul(shift, normed, 1 + scale).
    """

    weight: torch.Tensor | None
    eps: float
    scale: torch.Tensor | None
    shift: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    centred: bool = False
    one_rounding: bool = False


def _by_image(x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
    """x [M, K] as [B, M / B, K] for a modulation [B, K]."""
    return x.view(modulation.shape[0], -1, x.shape[-1])


def add_branch_torch(x: torch.Tensor, branch: Branch) -> torch.Tensor:
    """x [M, K] + gate * rms_norm(y), step by step, in the dtype of x."""
    y = branch.y.reshape(x.shape)
    if branch.weight is not None:
        y = _normed(y, Norm(branch.weight, branch.eps, None))
    if branch.gate is None:
        return x + y
    parts, gate = (_by_image(x, branch.gate), _by_image(y, branch.gate)), branch.gate.unsqueeze(1)
    out = torch.addcmul(*parts, gate) if branch.one_rounding else parts[0] + gate * parts[1]
    return out.view(x.shape)


def modulated_norm_torch(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """norm(x [M, K]) * (1 + scale) + shift, step by step, in the dtype of x."""
    v = _normed(x, norm)
    if norm.scale is None:
        return v
    v, factor = _by_image(v, norm.scale), (1.0 + norm.scale).unsqueeze(1)
    if norm.one_rounding:
        return torch.addcmul(norm.shift.unsqueeze(1), v, factor).view(x.shape)
    v = v * factor
    return (v if norm.shift is None else v + norm.shift.unsqueeze(1)).view(x.shape)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    # a float32 weight norms in float32, rounded once
    wide, weight = x if norm.weight is None else x.to(norm.weight.dtype), norm.weight
    if norm.centred:
        return torch.nn.functional.layer_norm(wide, x.shape[-1:], weight, norm.bias, norm.eps).to(x.dtype)
    return torch.nn.functional.rms_norm(wide, x.shape[-1:], weight, norm.eps).to(x.dtype)


def residual_norm(
    x: torch.Tensor,
    branch: Branch | None = None,
    norm: Norm | None = None,
    *,
    rotation_group: int = 0,
    kept: torch.Tensor | None = None,
    packed: bool = True,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | tuple | None]:
    """End one residual branch, begin the next, or both.

    Args:
        x: [..., K] float16, bfloat16 or float32, contiguous.
        branch: what is added to x; None to add nothing.
        norm: what is quantised; None to quantise nothing.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K: rotate each run of that many columns before quantising.
        kept: a contiguous tensor of the shape and dtype of x that gets what is quantised, before rotation; None for none.
        packed: False for rows as codes and scales that share no memory.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        x', of the shape and dtype of x (x itself without a branch), and the quantised rows as
        `PreparedLinear.with_rows` takes them, or None without a norm.
    Raises:
        UnsupportedInput: a shape, dtype or group that is not listed here.
    """
    if torch.compiler.is_compiling():
        return graph_ops.residual_norm(x, branch, norm, rotation_group)
    k = x.shape[-1] if x.dim() else 0
    m = x.numel() // k if k else 0
    _check(x, branch, norm, kept, m, k)
    if rotation_group:
        check_group(k, rotation_group)
    device = detect(x.device)
    chosen = choose(
        device, in_features=k, out_features=k, rotation_group=rotation_group, implementation=implementation
    ).implementation
    rows = q = scale = None
    if norm is not None:
        rows, q, scale = empty_rows(m, k, x.device, chosen, packed)
    flat = x.view(m, k)
    if m == 0:
        return x, rows
    if chosen == "torch":
        out = flat if branch is None else add_branch_torch(flat, branch)
        if norm is not None:
            v = modulated_norm_torch(out, norm)
            quantize_rows_torch(v, q, scale, rotation_group, None)
            if kept is not None:
                kept.view(m, k).copy_(v)
        return out.view(x.shape), rows
    from .residual_norm_triton import residual_norm_triton

    out = None if branch is None else torch.empty_like(flat)
    with on_device(x.device):
        residual_norm_triton(flat, branch, out, norm, q, scale, kept, rotation_group)
    return x if out is None else out.view(x.shape), rows


def _check(x: torch.Tensor, branch: Branch | None, norm: Norm | None, kept, m: int, k: int) -> None:
    if x.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not k or not x.is_contiguous():
        raise UnsupportedInput(
            f"residual_norm: x is {x.dtype} of shape {tuple(x.shape)}, strides {x.stride()}. Needed: float16, bfloat16 or "
            "float32, contiguous, with at least one column. Convert it first."
        )
    if branch is not None:
        _check_vectors(x, m, branch.weight, {"gate": branch.gate})
    if norm is not None:
        _check_vectors(x, m, norm.weight, {"scale": norm.scale, "shift": norm.shift})
        _check_parts(norm)
    for name, t in (("y", None if branch is None else branch.y), ("kept", kept)):
        if t is not None and (t.shape != x.shape or t.dtype != x.dtype or not t.is_contiguous()):
            raise UnsupportedInput(
                f"residual_norm: {name} is {t.dtype} {tuple(t.shape)} beside x {x.dtype} {tuple(x.shape)}. "
                "Needed: the same shape and dtype, contiguous. Convert it first."
            )


def _check_vectors(x: torch.Tensor, m: int, weight: torch.Tensor | None, modulation: dict) -> None:
    k = x.shape[-1]
    for name, vector in modulation.items():
        fits = weight is None or (weight.shape == (k,) and weight.dtype in (x.dtype, torch.float32))
        if vector is not None:
            fits = fits and vector.dim() == 2 and vector.shape[1] == k and vector.shape[0] and vector.dtype == x.dtype
        if not fits or (vector is not None and m % vector.shape[0]):
            norm_weight = "none" if weight is None else f"{weight.dtype} {tuple(weight.shape)}"
            given = "none" if vector is None else f"{vector.dtype} {tuple(vector.shape)}"
            raise UnsupportedInput(
                f"residual_norm: the norm's weight is {norm_weight} and {name} {given} for {m} rows of {k} {x.dtype}. "
                f"Needed: [{k}] of that dtype or float32, and [B, {k}] of that dtype, B dividing the rows. Run the norm "
                "by itself instead."
            )
        strides = [t.stride()[-1] for t in (vector, weight) if t is not None]
        if any(stride != 1 for stride in strides):
            raise UnsupportedInput(
                f"residual_norm: {name} or the norm's weight has the column strides {strides}. Needed: columns side by "
                "side. Call contiguous() first."
            )


def _check_parts(norm: Norm) -> None:
    scale, shift, bias = norm.scale, norm.shift, norm.bias
    if scale is not None and shift is not None and scale.shape != shift.shape:
        raise UnsupportedInput(
            f"residual_norm: scale is {tuple(scale.shape)} and shift {tuple(shift.shape)}. Needed: the same. "
            "Expand one of them."
        )
    lone = (shift is not None and scale is None) or (norm.one_rounding and (scale is None or shift is None))
    if lone or (bias is not None and (norm.weight is None or not norm.centred)):
        there = [name for name, part in norm._asdict().items() if part is not None and part is not False]
        raise UnsupportedInput(
            f"residual_norm: the norm has {', '.join(there)}. Needed: a scale where it shifts, both where they are rounded "
            "once, and a weight and centring where there is a bias. Run the norm by itself instead."
        )
    if bias is not None and (bias.shape != norm.weight.shape or bias.dtype != norm.weight.dtype or bias.stride(0) != 1):
        raise UnsupportedInput(
            f"residual_norm: the norm's weight is {norm.weight.dtype} {tuple(norm.weight.shape)} and its bias {bias.dtype} "
            f"{tuple(bias.shape)}, strides {bias.stride()}. Needed: both alike, contiguous. Convert the bias first."
        )
