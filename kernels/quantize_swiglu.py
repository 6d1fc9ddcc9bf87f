"""quantize_swiglu: silu(gate) * up of two tensors, optional rotation and row quantisation in one pass.

As quantize_rows with "swiglu", for a gate and an up projection that are two tensors, and rounded to their dtype after
the SiLU and after the product, where PyTorch's own operations round.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .packed_rows import empty_rows
from .quantize_rows import quantize_rows_torch
from .rotate import check_group


def quantize_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    rotation_group: int = 0,
    implementation: str | None = None,
) -> torch.Tensor | tuple:
    """Quantise each row of silu(gate) * up.

    Args:
        gate, up: [..., K] float16, bfloat16 or float32, both alike, contiguous.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        the quantised rows as `PreparedLinear.with_rows` takes them.
    Raises:
        UnsupportedInput: a shape, dtype or group that is not listed here.
    """
    alike = gate.shape == up.shape and gate.dtype == up.dtype and gate.is_contiguous() and up.is_contiguous()
    if not alike or gate.dim() == 0 or gate.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UnsupportedInput(
            f"quantize_swiglu: gate is {gate.dtype} {tuple(gate.shape)}, up {up.dtype} {tuple(up.shape)}. Needed: float16, "
            "bfloat16 or float32 of one shape, both contiguous. Convert them first."
        )
    k = gate.shape[-1]
    if rotation_group:
        check_group(k, rotation_group)
    m = gate.numel() // k if k else 0
    chosen = choose(
        detect(gate.device), in_features=k, out_features=k, rotation_group=rotation_group, implementation=implementation
    ).implementation
    rows, q, scale = empty_rows(m, k, gate.device, chosen)
    if m == 0:
        return rows
    gate, up = gate.view(m, k), up.view(m, k)
    if chosen == "torch":
        quantize_rows_torch(torch.nn.functional.silu(gate) * up, q, scale, rotation_group, None)
        return rows
    from .quantize_swiglu_triton import quantize_swiglu_triton

    with on_device(gate.device):
        quantize_swiglu_triton(gate, up, q, scale, rotation_group)
    return rows
