"""The INT8 matmul with a low-rank product in its epilogue: y = x_scale w_scale (q_x q_w^T) + bias + inner up^T.

Added afterwards, the low-rank product of a LoRA would read and write y once more, which on a fast GPU takes a seventh of
the matmul's time. Here it is a few steps of floating-point `tl.dot` onto the scaled accumulator, before the only rounding.
The rank is an argument and no constant, so that LoRAs come and go without a new kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl

from . import int8_matmul_triton as plain
from .int8_matmul_triton import _accumulate, _scaled, _tile_of
from .launch import Launcher, Starter, is_aligned
from .low_rank import RANK_STEP


@triton.jit
def _with_low_rank(y, inner_ptr, factor_ptr, left_m, left_n, rank, BLOCK_R: tl.constexpr):
    """y fp32 + inner [left_m, rank] @ factor [left_n, rank]^T, both contiguous. Pointers are at the tile."""
    offs_m = tl.arange(0, y.shape[0])
    offs_n = tl.arange(0, y.shape[1])
    offs_r = tl.arange(0, BLOCK_R)
    # rows past the edge read the last one again
    offs_inner = tl.minimum(offs_m, left_m - 1)[:, None] * rank + offs_r[None, :]
    offs_factor = tl.minimum(offs_n, left_n - 1)[:, None] * rank + offs_r[None, :]
    for _ in range(0, rank, BLOCK_R):
        y = tl.dot(tl.load(inner_ptr + offs_inner), tl.trans(tl.load(factor_ptr + offs_factor)), y)
        inner_ptr += BLOCK_R
        factor_ptr += BLOCK_R
    return y


@triton.jit
def _finish(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    inner_ptr,
    up_ptr,
    y_ptr,
    left_m,
    left_n,
    stride_ym,
    rank,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Scale, add the bias and inner [left_m, rank] @ up [left_n, rank]^T, round once, store. Pointers are at the tile."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < left_m
    mask_n = offs_n < left_n
    x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
    y = _scaled(acc, x_scale, w_scale_ptr, bias_ptr, offs_n, mask_n, ROW_SCALES, HAS_BIAS)
    y = _with_low_rank(y, inner_ptr, up_ptr, left_m, left_n, rank, BLOCK_R)
    offs_y = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["m"])
def _int8_matmul_low_rank_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    inner_ptr,
    up_ptr,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    stride_ym,
    rank,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program per tile of y [m, n]; inner [m, rank] and up [n, rank] are contiguous."""
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    # int64: M * K and M * N pass 2**31 at video sizes
    start_m = tile_m.to(tl.int64) * BLOCK_M
    start_n = tile_n.to(tl.int64) * BLOCK_N
    left_m = (m - start_m).to(tl.int32)
    left_n = (n - start_n).to(tl.int32)
    acc = _accumulate(
        x_ptr + start_m * stride_xm,
        w_ptr + start_n * stride_wn,
        k,
        stride_xm,
        stride_wn,
        tl.minimum(tl.arange(0, BLOCK_M), left_m - 1),
        tl.minimum(tl.arange(0, BLOCK_N), left_n - 1),
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
    )
    _finish(
        acc,
        x_scale_ptr + start_m,
        w_scale_ptr + start_n if ROW_SCALES else w_scale_ptr,
        bias_ptr + start_n,
        inner_ptr + start_m * rank,
        up_ptr + start_n * rank,
        y_ptr + start_m * stride_ym + start_n,
        left_m,
        left_n,
        stride_ym,
        rank,
        ROW_SCALES,
        HAS_BIAS,
        BLOCK_M,
        BLOCK_N,
        BLOCK_R,
    )


_launch = Launcher(_int8_matmul_low_rank_kernel)


def numbers(m, n, k, strides: tuple[int, int, int], rank: int, row_scales: bool, has_bias: bool, tile) -> tuple:
    """The kernel's arguments after its eight pointers; strides of the rows of q_x, q_w and y."""
    even_k = k % tile.block_k == 0
    return (m, n, k, *strides, rank, row_scales, has_bias, tile.block_m, tile.block_n, tile.block_k, tile.group_m,
            even_k, RANK_STEP)  # fmt: skip


def int8_matmul_low_rank_triton(q_x, x_scale, q_w, w_scale, bias, inner, up, y, tile) -> Starter | None:
    """As int8_matmul_triton, plus inner [M, R] @ up [N, R]^T, both contiguous in one dtype; R a multiple of RANK_STEP."""
    m, k = q_x.shape
    n, rank = up.shape
    # no guard: what spills here does so outside the loop, and the tile stays good for the plain kernel
    strides = (q_x.stride(0), q_w.stride(0), y.stride(0))
    tensors = (q_x, x_scale, q_w, w_scale, w_scale if bias is None else bias, y, inner, up)
    row_scales = w_scale.numel() > 1
    return _launch(
        plain.programs(m, n, tile),
        (y.device.index, tile, n, k, strides, y.dtype, None if bias is None else bias.dtype, row_scales, up.dtype),
        is_aligned(*(tensor.data_ptr() for tensor in tensors)),
        (*tensors, *numbers(m, n, k, strides, rank, row_scales, bias is not None, tile)),
        {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False},
    )
