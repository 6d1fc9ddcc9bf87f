"""quantize_rms_norm: RMSNorm, optional rotation and row quantisation in one pass over the activation.

v = x / sqrt(mean(x^2) + eps) * norm_weight in fp32, then as quantize_rows. A modulation v * (1 + m) with one row m for
all tokens is folded in by passing norm_weight * (1 + m).
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .quantize_rows import input_features, quantize_rows_torch
from .rotate import check_group


def rms_norm_torch(x: torch.Tensor, norm_weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [M, K] float, norm_weight [K] -> fp32 [M, K]."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * norm_weight.float()


def quantize_rms_norm(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    *,
    rotation_group: int = 0,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of the RMS-normed activation.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides.
        norm_weight: [K] any float dtype, times (1 + modulation) if there is one.
        eps: added to the mean of squares.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        q: [..., K] int8, scale: [..., 1] float32, as quantize_rows.
    Raises:
        UnsupportedInput: x is not a float tensor, norm_weight has not K values, or the group does not divide K.
    """
    k = input_features(x, None, "quantize_rms_norm")
    if norm_weight.numel() != k or not norm_weight.is_floating_point():
        raise UnsupportedInput(
            f"quantize_rms_norm: norm_weight is {norm_weight.dtype} with {norm_weight.numel()} values for {k} columns. "
            f"Needed: {k} floats. Pass the weight of the norm in front of this layer."
        )
    if rotation_group:
        check_group(k, rotation_group)
    chosen = choose(
        detect(x.device), in_features=k, out_features=k, rotation_group=rotation_group, implementation=implementation
    )
    rows = x.reshape(-1, k)
    norm_weight = norm_weight.to(x.device).reshape(k).contiguous()
    q = torch.empty((rows.shape[0], k), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows.shape[0],), dtype=torch.float32, device=x.device)
    if chosen.implementation == "torch":
        quantize_rows_torch(rms_norm_torch(rows, norm_weight, eps), q, scale, rotation_group, None)
    elif rows.shape[0]:
        from .quantize_rms_norm_triton import quantize_rms_norm_triton

        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        with on_device(x.device):
            quantize_rms_norm_triton(rows, norm_weight, float(eps), q, scale, rotation_group)
    return q.reshape(*x.shape[:-1], k), scale.reshape(*x.shape[:-1], 1)
