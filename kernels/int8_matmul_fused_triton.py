"""INT8 matmuls whose epilogue does more: SwiGLU of two weights, or gate * y + residual.

swiglu: y = silu(x w_gate^T) * (x w_up^T). One tile holds the gate and the up column of the same output side by side:
because the weight is addressed row by row, interleaving is only an index (even columns read w_gate, odd ones w_up), so
neither checkpoint nor LoRA nor offload sees a repacked weight. The accumulator is split after the loop.

residual: y = residual + gate * (x w^T + bias), gate per column and per image. Rows past the edge are masked, never
wrapped, so y may be written where residual is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .compiled import interpreted
from .int8_matmul_low_rank_triton import _with_low_rank
from .int8_matmul_triton import _accumulate, _scaled, _tile_of, check_compiled
from .launch import Launcher, is_aligned
from .low_rank import RANK_STEP
from .quantize_activation_triton import silu_product


@triton.jit(do_not_specialize=["m"])
def _int8_matmul_residual_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    gate_ptr,
    residual_ptr,
    y_ptr,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    stride_ym,
    stride_rm,
    stride_gate,
    rows_per_gate,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    GATES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per tile of y [m, n]. GATES: 0 none, 1 one row for all, 2 row i takes that of image i // rows_per_gate."""
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    # int64: M * K and M * N pass 2**31 at video sizes
    start_m = tile_m.to(tl.int64) * BLOCK_M
    start_n = tile_n.to(tl.int64) * BLOCK_N
    left_m = (m - start_m).to(tl.int32)
    left_n = (n - start_n).to(tl.int32)
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    acc = _accumulate(
        x_ptr + start_m * stride_xm,
        w_ptr + start_n * stride_wn,
        k,
        stride_xm,
        stride_wn,
        tl.minimum(offs_m, left_m - 1),
        tl.minimum(offs_n, left_n - 1),
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        EVEN_K,
    )
    mask_m = offs_m < left_m
    mask_n = offs_n < left_n
    mask = mask_m[:, None] & mask_n[None, :]
    x_scale = tl.load(x_scale_ptr + start_m + offs_m, mask=mask_m, other=0.0)
    w_scales = w_scale_ptr + start_n if ROW_SCALES else w_scale_ptr
    y = _scaled(acc, x_scale, w_scales, bias_ptr + start_n, offs_n, mask_n, ROW_SCALES, HAS_BIAS)
    if GATES == 1:
        y *= tl.load(gate_ptr + start_n + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    if GATES == 2:
        image = (start_m + offs_m) // rows_per_gate
        gates = gate_ptr + start_n + image[:, None] * stride_gate + offs_n[None, :]
        y *= tl.load(gates, mask=mask, other=0.0).to(tl.float32)
    residual = residual_ptr + start_m * stride_rm + start_n + offs_m[:, None] * stride_rm + offs_n[None, :]
    y += tl.load(residual, mask=mask, other=0.0).to(tl.float32)
    out = y_ptr + start_m * stride_ym + start_n + offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["m"])
def _int8_matmul_swiglu_kernel(
    x_ptr,
    x_scale_ptr,
    gate_w_ptr,
    up_w_ptr,
    gate_scale_ptr,
    up_scale_ptr,
    gate_bias_ptr,
    up_bias_ptr,
    gate_inner_ptr,
    gate_factor_ptr,
    up_inner_ptr,
    up_factor_ptr,
    y_ptr,
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
    STEPS: tl.constexpr,
    CUDA_EXP: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """One program per [BLOCK_M, BLOCK_N // 2] tile of y [m, n]; both weights are [n, k] with the same row stride.

    STEPS: round to the type of y after each Linear, after SiLU and after the product, as separate operations do.
    BLOCK_R > 0: each Linear gets inner [m, rank] @ factor [n, rank]^T added before it is rounded; all are contiguous.
    """
    HALF: tl.constexpr = BLOCK_N // 2
    tile_m, tile_n = _tile_of(tl.program_id(0), m, n, BLOCK_M, HALF, GROUP_M)
    # int64: M * K and M * N pass 2**31 at video sizes
    start_m = tile_m.to(tl.int64) * BLOCK_M
    start_n = tile_n.to(tl.int64) * HALF
    left_m = (m - start_m).to(tl.int32)
    left_n = (n - start_n).to(tl.int32)
    offs_m = tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    column = tl.arange(0, BLOCK_N)
    row_w = tl.minimum(column // 2, left_n - 1)
    # the distance of the two weights; both are 16-byte aligned, or the launcher passes even_k False and masks
    to_up = tl.multiple_of(up_w_ptr.to(tl.int64) - gate_w_ptr.to(tl.int64), 16)
    offs_w = (row_w.to(tl.int64) * stride_wn + (column % 2) * to_up)[:, None] + offs_k[None, :]
    w_tile = gate_w_ptr + start_n * stride_wn
    x_tile = x_ptr + start_m * stride_xm
    offs_x = tl.minimum(offs_m, left_m - 1)[:, None] * stride_xm + offs_k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k_start in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_tile + offs_x)
            w = tl.load(w_tile + offs_w)
        else:
            inside = offs_k[None, :] < k - k_start
            x = tl.load(x_tile + offs_x, mask=inside, other=0)
            w = tl.load(w_tile + offs_w, mask=inside, other=0)
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        x_tile += BLOCK_K
        w_tile += BLOCK_K
    gate, up = tl.split(tl.reshape(acc, (BLOCK_M, HALF, 2)))
    offs_n = tl.arange(0, HALF)
    mask_m = offs_m < left_m
    mask_n = offs_n < left_n
    x_scale = tl.load(x_scale_ptr + start_m + offs_m, mask=mask_m, other=0.0)
    gate_scales = gate_scale_ptr + start_n if ROW_SCALES else gate_scale_ptr
    up_scales = up_scale_ptr + start_n if ROW_SCALES else up_scale_ptr
    gate = _scaled(gate, x_scale, gate_scales, gate_bias_ptr + start_n, offs_n, mask_n, ROW_SCALES, HAS_BIAS)
    up = _scaled(up, x_scale, up_scales, up_bias_ptr + start_n, offs_n, mask_n, ROW_SCALES, HAS_BIAS)
    if BLOCK_R > 0:
        gate = _with_low_rank(
            gate, gate_inner_ptr + start_m * rank, gate_factor_ptr + start_n * rank, left_m, left_n, rank, BLOCK_R
        )
        up = _with_low_rank(
            up, up_inner_ptr + start_m * rank, up_factor_ptr + start_n * rank, left_m, left_n, rank, BLOCK_R
        )
    y = silu_product(gate, up, y_ptr, CUDA_EXP) if STEPS else gate / (1.0 + tl.exp(-gate)) * up
    out = y_ptr + start_m * stride_ym + start_n + offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(out, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


_launch_residual = Launcher(_int8_matmul_residual_kernel)
_launch_swiglu = Launcher(_int8_matmul_swiglu_kernel)


def _options(tile) -> dict:
    return {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}


def int8_matmul_residual_triton(q_x, x_scale, q_w, w_scale, bias, gate, residual, y, tile) -> None:
    """y [M, N] = residual [M, N] + gate * (q_x q_w^T * scales + bias); gate [images, N] | None, M % images == 0.

    q_x [M, K] int8, x_scale [M] fp32, q_w [N, K] int8, w_scale fp32 of 1 or N values, bias [N] | None. Columns of all
    are contiguous; y may be residual itself. M, N and K > 0.
    """
    m, k = q_x.shape
    n = q_w.shape[0]
    strides = (q_x.stride(0), q_w.stride(0), y.stride(0), residual.stride(0), 0 if gate is None else gate.stride(0))
    gates = 0 if gate is None else min(gate.shape[0], 2)
    rows_per_gate = m // gate.shape[0] if gates == 2 else 1
    row_scales = w_scale.numel() > 1
    even_k = k % tile.block_k == 0
    optional = [t for t in (bias, gate) if t is not None]
    key = (y.device.index, tile, n, k, strides, rows_per_gate, gates, y.dtype, residual.dtype, row_scales)
    key += tuple(None if t is None else t.dtype for t in (bias, gate))
    _launch_residual(
        -(-m // tile.block_m) * -(-n // tile.block_n),
        key,
        is_aligned(*(t.data_ptr() for t in (q_x, q_w, x_scale, w_scale, y, residual, *optional))),
        (q_x, x_scale, q_w, w_scale, w_scale if bias is None else bias, y if gate is None else gate, residual, y,
         m, n, k, *strides, rows_per_gate, row_scales, bias is not None, gates,
         tile.block_m, tile.block_n, tile.block_k, tile.group_m, even_k),
        # no guard: reading the residual parks a few registers once per tile, outside the loop
        _options(tile),
    )  # fmt: skip


def int8_matmul_swiglu_triton(
    q_x,
    x_scale,
    gate_w,
    gate_scale,
    up_w,
    up_scale,
    gate_bias,
    up_bias,
    y,
    tile,
    sm: int = 0,
    steps: bool = False,
    low_rank: tuple | None = None,
) -> None:
    """y [M, N] = silu(gate) * up, each q_x times its own weight [N, K] with its scale (1 or N values) and bias [N].

    Both weights have the same row stride, both scales the same number of values, both biases exist or none. steps: round
    where separate operations in the dtype of y round. low_rank: (inner [M, R], factor [N, R]) of the gate and the same two
    of the other Linear, which get inner factor^T added; contiguous, of one dtype, R a multiple of RANK_STEP.
    """
    m, k = q_x.shape
    n = gate_w.shape[0]
    strides = (q_x.stride(0), gate_w.stride(0), y.stride(0))
    row_scales = gate_scale.numel() > 1
    has_bias = gate_bias is not None
    even_k = k % tile.block_k == 0
    biases = (gate_bias, up_bias) if has_bias else (gate_scale, up_scale)
    rank = 0 if low_rank is None else low_rank[0].shape[1]
    low_rank = (y,) * 4 if low_rank is None else low_rank
    key = (y.device.index, tile, n, k, strides, y.dtype, biases[0].dtype, biases[1].dtype, row_scales, has_bias, steps)
    key += (low_rank[0].dtype, rank > 0)
    _launch_swiglu(
        -(-m // tile.block_m) * -(-n // (tile.block_n // 2)),
        key,
        is_aligned(*(t.data_ptr() for t in (q_x, gate_w, up_w, x_scale, gate_scale, up_scale, y, *biases, *low_rank))),
        (q_x, x_scale, gate_w, up_w, gate_scale, up_scale, *biases, *low_rank, y, m, n, k, *strides, rank, row_scales,
         has_bias, tile.block_m, tile.block_n, tile.block_k, tile.group_m, even_k, steps, not interpreted(),
         RANK_STEP if rank else 0),
        _options(tile),
        # what spills with a low-rank product does so outside the loop
        None if rank else lambda compiled: check_compiled(compiled, sm, tile, k),
    )  # fmt: skip
