"""An activation and row quantisation in one pass; what the activation makes never leaves the registers.

Exponential and hyperbolic tangent are CUDA's own, which PyTorch calls too, the division is rounded, and the one addition
that PyTorch's compiler fuses is fused: so SiLU and GELU are PyTorch's to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from .compiled import interpreted
from .launch import Launcher, is_aligned
from .quantize_rows_triton import quantize_blocks, row_blocks


@triton.jit
def silu_product(gate, up, like_ptr, CUDA_MATH: tl.constexpr):
    """silu(gate) * up of fp32 values, each rounded to the type of like_ptr first, and after SiLU and product; as fp32."""
    gate = gate.to(like_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(like_ptr.dtype.element_ty).to(tl.float32)
    exp = libdevice.exp(-gate) if CUDA_MATH else tl.exp(-gate)
    silu = tl.math.div_rn(gate, 1.0 + exp).to(like_ptr.dtype.element_ty).to(tl.float32)
    # an instruction of its own, or a compiler may fuse it into an addition that follows and leave the rounding out
    return tl.fma(silu, up, 0.0).to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def gelu_tanh(v, like_ptr, CUDA_MATH: tl.constexpr):
    """0.5 v (1 + tanh(sqrt(2 / pi) (v + 0.044715 v^3))) of fp32 values, rounded to the type of like_ptr; as fp32."""
    inner = 0.7978845608028654 * tl.fma(v * v * v, 0.044715, v)
    tanh = libdevice.tanh(inner) if CUDA_MATH else 1.0 - 2.0 / (1.0 + tl.exp(2.0 * inner))
    return (0.5 * v * (1.0 + tanh)).to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _values(
    before_ptr,
    gate_ptr,
    up_ptr,
    offs,
    BEFORE: tl.constexpr,
    GELU: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
    CUDA_MATH: tl.constexpr,
):
    """Columns offs of [before | activation] as fp32; BEFORE of its K columns come from before_ptr."""
    own = offs - BEFORE
    if BEFORE > 0:
        inside = (own >= 0) & (offs < K)
        gate = tl.load(gate_ptr + own, mask=inside, other=0.0).to(tl.float32)
        if not GELU:
            up = tl.load(up_ptr + own, mask=inside, other=0.0).to(tl.float32)
    elif MASKED:
        gate = tl.load(gate_ptr + own, mask=offs < K, other=0.0).to(tl.float32)
        if not GELU:
            up = tl.load(up_ptr + own, mask=offs < K, other=0.0).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + own).to(tl.float32)
        if not GELU:
            up = tl.load(up_ptr + own).to(tl.float32)
    v = gelu_tanh(gate, gate_ptr, CUDA_MATH) if GELU else silu_product(gate, up, gate_ptr, CUDA_MATH)
    if BEFORE > 0:
        v = tl.where(own < 0, tl.load(before_ptr + offs, mask=own < 0, other=0.0).to(tl.float32), v)
    return v


@triton.jit
def _quantize_activation_kernel(
    before_ptr,
    gate_ptr,
    up_ptr,
    q_ptr,
    scale_ptr,
    kept_ptr,
    stride,
    BEFORE: tl.constexpr,
    GELU: tl.constexpr,
    CUDA_MATH: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per row. before [M, BEFORE], q and kept [M, K] are contiguous, gate and up [M, K - BEFORE] have rows `stride`
    apart. Blocks as in _quantize_rows_kernel.
    """
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    before_ptr += row * BEFORE
    gate_ptr += row * stride
    up_ptr += row * stride
    a = _values(before_ptr, gate_ptr, up_ptr, tl.arange(0, BLOCK_A), BEFORE, GELU, K, BLOCK_B == 0, CUDA_MATH)
    b = a
    if BLOCK_B > 0:
        b = _values(before_ptr, gate_ptr, up_ptr, BLOCK_A + tl.arange(0, BLOCK_B), BEFORE, GELU, K, True, CUDA_MATH)
    if KEPT:
        kept_ptr += row * K
        offs = tl.arange(0, BLOCK_A)
        tl.store(kept_ptr + offs, a.to(kept_ptr.dtype.element_ty), mask=offs < K)
        if BLOCK_B > 0:
            offs = BLOCK_A + tl.arange(0, BLOCK_B)
            tl.store(kept_ptr + offs, b.to(kept_ptr.dtype.element_ty), mask=offs < K)
    quantize_blocks(q_ptr + row * K, scale_ptr + row, a, b, K, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_quantize_activation_kernel)


def warps(k: int) -> int:
    """Warps per row: at most 48 values a thread, since a row is read as two."""
    return 4 if k <= 4096 else 8 if k <= 12288 else 16


def quantize_activation_triton(before, gate, up, q, scale, kept, rotation_group: int) -> None:
    """before [M, K0] or None, gate and up [M, K] or None -> q [M, K0 + K] int8, scale [M] fp32, kept or None; M > 0.

    One dtype, columns side by side, gate and up with equal strides. Without up it is GELU of gate.
    """
    m, k = q.shape
    columns = 0 if before is None else before.shape[1]
    # CUDA's library is not there when kernels are interpreted
    constants = (
        columns,
        up is None,
        not interpreted(),
        kept is not None,
        k,
        rotation_group,
        *row_blocks(k, rotation_group),
    )
    tensors = (
        gate if before is None else before,
        gate,
        gate if up is None else up,
        q,
        scale,
        gate if kept is None else kept,
    )
    stride = gate.stride(0)
    _launch(
        m,
        (gate.device.index, gate.dtype, stride, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, stride, *constants),
        # as quantize_rows, so that the codes are its codes
        {"num_warps": warps(k), "enable_fp_fusion": rotation_group > 0},
    )
