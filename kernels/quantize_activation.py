"""quantize_swiglu, quantize_gelu: the activation between two Linears, optional rotation and row quantisation in one pass.

As quantize_rows with an `input_act`, but rounded to the dtype of the activation where PyTorch's own operations round:
after the SiLU and after the product, or after the GELU, unless told otherwise. The halves of one [gate | up] tensor are read
where they lie, and columns that come before the activation's in the next Linear are read from a tensor of their own: nothing
is joined first.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .packed_rows import empty_rows
from .quantize_rows import quantize_rows_torch
from .rotate import check_group

# Cards with memory so fast that a GELU in two passes takes less than CUDA's tanh in one: 0.84 ms against 1.33 ms for
# 32760 x 13824 on an H200. Others have about as many operations and a third of the bandwidth.
_HBM = frozenset({(8, 0), (9, 0), (10, 0), (10, 3)})


def quantize_swiglu(
    gate: torch.Tensor,
    up: torch.Tensor,
    *,
    before: torch.Tensor | None = None,
    rotation_group: int = 0,
    kept: torch.Tensor | None = None,
    packed: bool = True,
    implementation: str | None = None,
) -> torch.Tensor | tuple:
    """Quantise each row of silu(gate) * up, or of [before | silu(gate) * up].

    Args:
        gate, up: [..., K] float16, bfloat16 or float32, both alike, strides included: columns side by side and rows evenly
            spaced, as in halves of one tensor.
        before: [..., K0] of that dtype, contiguous, or None.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K0 + K.
        kept: a contiguous tensor [..., K0 + K] of that dtype that gets what is quantised, before rotation; None for none.
        packed: False for rows as codes and scales that share no memory.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        the quantised rows as `PreparedLinear.with_rows` takes them.
    Raises:
        UnsupportedInput: a shape, dtype, stride or group that is not listed here.
    """
    return _quantize(gate, up, before, rotation_group, kept, packed, implementation, "quantize_swiglu")


def quantize_gelu(
    x: torch.Tensor,
    *,
    before: torch.Tensor | None = None,
    rotation_group: int = 0,
    kept: torch.Tensor | None = None,
    packed: bool = True,
    rounded: bool = True,
    implementation: str | None = None,
) -> torch.Tensor | tuple:
    """Quantise each row of gelu(x), approximated by tanh, or of [before | gelu(x)].

    Args:
        x: [..., K] as `gate` of `quantize_swiglu`.
        before, rotation_group, kept, packed, implementation: as in `quantize_swiglu`.
        rounded: whether gelu(x) is rounded to the dtype of x first; if not, the rows are those of `int8_linear` with the
            `input_act` "gelu_tanh". What `kept` gets is rounded in either case. Not without rounding: before, a compiler.
    Returns:
        the quantised rows as `PreparedLinear.with_rows` takes them.
    Raises:
        UnsupportedInput: a shape, dtype, stride or group that is not listed here.
    """
    if not rounded and (before is not None or torch.compiler.is_compiling()):
        raise UnsupportedInput(
            "quantize_gelu: rounded is False with columns before the activation, or while torch.compile traces. Needed: x "
            "alone, in a call of its own. Leave rounded as it is."
        )
    act = None if rounded else "gelu_tanh"
    return _quantize(x, None, before, rotation_group, kept, packed, implementation, "quantize_gelu", act)


def _quantize(
    gate,
    up,
    before,
    rotation_group: int,
    kept,
    packed: bool,
    implementation: str | None,
    op: str,
    act: str | None = None,
) -> torch.Tensor | tuple:
    """act: the activation of `gate` when it is part of quantising the rows and not rounded before."""
    if torch.compiler.is_compiling():
        return torch.ops.native_int8.quantize_activation(gate, up, before, rotation_group)
    before_2d, gate_2d, up_2d = _checked(gate, up, before, op)
    m, k = gate_2d.shape
    k += 0 if before_2d is None else before_2d.shape[1]
    if kept is not None and (
        kept.shape != (*gate.shape[:-1], k) or kept.dtype != gate.dtype or not kept.is_contiguous()
    ):
        raise UnsupportedInput(
            f"{op}: kept is {kept.dtype} {tuple(kept.shape)}, strides {kept.stride()}. Needed: {gate.dtype} "
            f"{(*gate.shape[:-1], k)}, contiguous. Allocate it so."
        )
    if rotation_group:
        check_group(k, rotation_group)
    device = detect(gate.device)
    chosen = choose(
        device, in_features=k, out_features=k, rotation_group=rotation_group, implementation=implementation
    ).implementation
    rows, q, scale = empty_rows(m, k, gate.device, chosen, packed)
    if m == 0:
        return rows
    if act is not None:
        quantise = quantize_rows_torch
        if chosen != "torch":
            from .quantize_rows_triton import quantize_rows_triton as quantise
        with on_device(gate.device):
            quantise(gate_2d, q, scale, rotation_group, act)
        if kept is not None:
            kept.view(m, k).copy_(activated_torch(gate_2d, None))
        return rows
    if chosen == "torch":
        v = activated_torch(gate_2d, up_2d)
        v = v if before_2d is None else torch.cat((before_2d, v), 1)
        quantize_rows_torch(v, q, scale, rotation_group, None)
        if kept is not None:
            kept.view(m, k).copy_(v)
        return rows
    from .quantize_activation_triton import quantize_activation_triton
    from .quantize_rows_triton import quantize_rows_triton

    with on_device(gate.device):
        if up is None and before is None and device.compute_capability in _HBM:
            v = activated_torch(gate_2d, None)
            quantize_rows_triton(v, q, scale, rotation_group, None)
            if kept is not None:
                kept.view(m, k).copy_(v)
            return rows
        quantize_activation_triton(before_2d, gate_2d, up_2d, q, scale, kept, rotation_group)
    return rows


def activated_torch(gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
    """silu(gate) * up, or gelu(gate) without up, step by step in their dtype."""
    if up is None:
        return torch.nn.functional.gelu(gate, approximate="tanh")
    return torch.nn.functional.silu(gate) * up


def _checked(gate, up, before, op: str) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """before [M, K0], gate and up [M, K] as views."""
    given = [t for t in (before, gate, up) if t is not None]
    k = gate.shape[-1] if gate.dim() else 0
    alike = all(t.dim() and t.shape[:-1] == gate.shape[:-1] and t.dtype == gate.dtype for t in given) and k
    alike = alike and (up is None or (up.shape == gate.shape and up.stride() == gate.stride()))
    flat = None
    if alike and gate.dtype in (torch.float16, torch.bfloat16, torch.float32):
        flat = [None if t is None else _rows(t) for t in (gate, up)]
    if flat is None or flat[0] is None or (before is not None and not before.is_contiguous()):
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)} strides {t.stride()}" for t in given)
        raise UnsupportedInput(
            f"{op}: got {shapes}. Needed: float16, bfloat16 or float32 of one dtype and equal leading dimensions; gate and up "
            "of one shape, alike in memory, columns side by side and rows evenly spaced; what comes before contiguous. "
            "Convert them first."
        )
    return None if before is None else before.view(flat[0].shape[0], before.shape[-1]), *flat


def _rows(t: torch.Tensor) -> torch.Tensor | None:
    """t [..., K] as a view [M, K] with columns side by side; None when its rows are not evenly spaced."""
    if t.stride(-1) != 1:
        return None
    if not t.numel():
        return t.reshape(0, t.shape[-1])
    try:
        return t.view(-1, t.shape[-1])
    except RuntimeError:
        return None
