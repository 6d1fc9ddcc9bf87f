"""RMSNorm and row quantisation in one pass over the activation: the normed row never leaves the registers."""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launcher, is_aligned
from .quantize_rows_triton import quantize_blocks, row_blocks, row_warps


@triton.jit
def _quantize_rms_norm_kernel(
    x_ptr,
    norm_ptr,
    q_ptr,
    scale_ptr,
    k,
    eps,
    stride_xm,
    stride_qm,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per row of x [M, K]; norm_ptr is the norm's weight [K]. Blocks as in _quantize_rows_kernel."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    q_ptr += row * stride_qm
    offs_a = tl.arange(0, BLOCK_A)
    inside_a = offs_a < k
    a = tl.load(x_ptr + offs_a, mask=inside_a, other=0.0).to(tl.float32)
    squares = tl.sum(a * a, axis=0)
    if BLOCK_B > 0:
        offs_b = BLOCK_A + tl.arange(0, BLOCK_B)
        inside_b = offs_b < k
        b = tl.load(x_ptr + offs_b, mask=inside_b, other=0.0).to(tl.float32)
        squares += tl.sum(b * b, axis=0)
    inverse_rms = 1.0 / tl.sqrt(squares / k + eps)
    a = a * inverse_rms * tl.load(norm_ptr + offs_a, mask=inside_a, other=0.0).to(tl.float32)
    if BLOCK_B == 0:
        b = a
    if BLOCK_B > 0:
        b = b * inverse_rms * tl.load(norm_ptr + offs_b, mask=inside_b, other=0.0).to(tl.float32)
    quantize_blocks(q_ptr, scale_ptr + row, a, b, k, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_quantize_rms_norm_kernel)


def quantize_rms_norm_triton(x, norm_weight, eps: float, q, scale, rotation_group: int) -> None:
    """x [M, K] float with unit column stride, norm_weight [K] float -> q [M, K] int8, scale [M] fp32; M > 0."""
    m, k = q.shape
    block_a, block_b = row_blocks(k, rotation_group)
    rest = (k, eps, x.stride(0), q.stride(0), rotation_group, block_a, block_b)
    _launch(
        m,
        (x.device.index, x.dtype, norm_weight.dtype, rest),
        is_aligned(x.data_ptr(), norm_weight.data_ptr(), q.data_ptr(), scale.data_ptr()),
        (x, norm_weight, q, scale, *rest),
        {"num_warps": row_warps(k, rotation_group)},
    )
