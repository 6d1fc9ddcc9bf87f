"""SwiGLU of two tensors and row quantisation in one pass; the product never leaves the registers.

The exponential is CUDA's own, which PyTorch calls too, and the division is rounded, so that SiLU is PyTorch's to the bit.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import libdevice

from .compiled import interpreted
from .launch import Launcher, is_aligned
from .quantize_rows_triton import quantize_blocks, row_blocks


@triton.jit
def silu_product(gate, up, like_ptr, CUDA_EXP: tl.constexpr):
    """silu(gate) * up of fp32 values, each rounded to the type of like_ptr first, and after SiLU and product; as fp32."""
    gate = gate.to(like_ptr.dtype.element_ty).to(tl.float32)
    up = up.to(like_ptr.dtype.element_ty).to(tl.float32)
    exp = libdevice.exp(-gate) if CUDA_EXP else tl.exp(-gate)
    silu = tl.math.div_rn(gate, 1.0 + exp).to(like_ptr.dtype.element_ty).to(tl.float32)
    return (silu * up).to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def _product(gate_ptr, up_ptr, offs, K: tl.constexpr, MASKED: tl.constexpr, CUDA_EXP: tl.constexpr):
    """silu(gate) * up of columns offs, rounded after each of both, as fp32."""
    if MASKED:
        gate = tl.load(gate_ptr + offs, mask=offs < K, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + offs, mask=offs < K, other=0.0).to(tl.float32)
    else:
        gate = tl.load(gate_ptr + offs).to(tl.float32)
        up = tl.load(up_ptr + offs).to(tl.float32)
    return silu_product(gate, up, gate_ptr, CUDA_EXP)


@triton.jit
def _quantize_swiglu_kernel(
    gate_ptr,
    up_ptr,
    q_ptr,
    scale_ptr,
    CUDA_EXP: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per row; gate, up and q are [M, K] contiguous. Blocks as in _quantize_rows_kernel."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    gate_ptr += row * K
    up_ptr += row * K
    a = _product(gate_ptr, up_ptr, tl.arange(0, BLOCK_A), K, BLOCK_B == 0, CUDA_EXP)
    b = a
    if BLOCK_B > 0:
        b = _product(gate_ptr, up_ptr, BLOCK_A + tl.arange(0, BLOCK_B), K, True, CUDA_EXP)
    quantize_blocks(q_ptr + row * K, scale_ptr + row, a, b, K, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_quantize_swiglu_kernel)


def warps(k: int) -> int:
    """Warps per row: at most 64 values a thread, since a row is read as two."""
    return 4 if k <= 4096 else 8 if k <= 16384 else 16


def quantize_swiglu_triton(gate, up, q, scale, rotation_group: int) -> None:
    """gate, up [M, K] contiguous, one dtype -> q [M, K] int8, scale [M] fp32; M > 0."""
    m, k = gate.shape
    # CUDA's library is not there when kernels are interpreted
    constants = (not interpreted(), k, rotation_group, *row_blocks(k, rotation_group))
    tensors = (gate, up, q, scale)
    _launch(
        m,
        (gate.device.index, gate.dtype, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, *constants),
        # as quantize_rows, so that the codes are its codes
        {"num_warps": warps(k), "enable_fp_fusion": rotation_group > 0},
    )
