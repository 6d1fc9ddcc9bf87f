"""The fused INT8 matmul: int8 x int8 -> int32 on the tensor cores, scales and bias in the epilogue.

y[m, n] = sum_k q_x[m, k] * q_w[n, k], then * x_scale[m] * w_scale[n] + bias[n], rounded once.

Form of the loop, and why (checked by tests/kernels/test_machine_code.py on every Triton that is installed):
- The weight is [N, K] with K contiguous, loaded as [BLOCK_N, BLOCK_K] and transposed in `tl.dot`. Loaded the
  usual way, as [BLOCK_K, BLOCK_N], the same maths compiles to byte permutes and spills on sm_80, sm_86 and
  sm_89 from Triton 3.8 on; with N contiguous it does so on every Triton.
- The base pointers advance by a scalar; the [BLOCK, BLOCK_K] offsets are computed once and stay int32, because
  the tile's row offset is folded into the (64-bit) base. M * K and M * N may pass 2**31.
- Rows past the edge read the last row again instead of being masked, and are dropped by the masked store.
- A warp never holds more than 4096 accumulators, else they spill (tiles.py).
- The multiply-adds of the epilogue are not contracted (enable_fp_fusion=False), so the result equals the
  reference bit for bit on every Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launcher, Starter, is_aligned
from .tiles import k_kind, reject, split_of


@triton.jit
def _tile_of(pid, m, n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """Tile row and column of program `pid`, GROUP_M tile rows at a time, so that a weight tile is used from L2."""
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    in_group = GROUP_M * tiles_n
    first_m = (pid // in_group) * GROUP_M
    rows = tl.minimum(tiles_m - first_m, GROUP_M)
    return first_m + (pid % in_group) % rows, (pid % in_group) // rows


@triton.jit
def _accumulate(
    x_ptr,
    w_ptr,
    k,
    stride_xm,
    stride_wn,
    rows_x,
    rows_w,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """int32 [BLOCK_M, BLOCK_N]. rows_x [BLOCK_M] and rows_w [BLOCK_N] are row numbers relative to the bases."""
    offs_k = tl.arange(0, BLOCK_K)
    offs_x = rows_x[:, None] * stride_xm + offs_k[None, :]
    offs_w = rows_w[:, None] * stride_wn + offs_k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k_start in range(0, k, BLOCK_K):
        if EVEN_K:
            x = tl.load(x_ptr + offs_x)
            w = tl.load(w_ptr + offs_w)
        else:
            inside = offs_k[None, :] < k - k_start
            x = tl.load(x_ptr + offs_x, mask=inside, other=0)
            w = tl.load(w_ptr + offs_w, mask=inside, other=0)
        acc = tl.dot(x, tl.trans(w), acc, out_dtype=tl.int32)
        x_ptr += BLOCK_K
        w_ptr += BLOCK_K
    return acc


@triton.jit
def _accumulate_boxes(
    x_desc, w_desc, row_m, row_n, begin, end, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """int32 [BLOCK_M, BLOCK_N] of columns [begin, end), fetched by TMA."""
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for k_start in range(begin, end, BLOCK_K):
        acc = tl.dot(x_desc.load([row_m, k_start]), w_desc.load([row_n, k_start]).T, acc, out_dtype=tl.int32)
    return acc


@triton.jit
def _scaled(acc, x_scale, w_scale_ptr, bias_ptr, offs_n, mask_n, ROW_SCALES: tl.constexpr, HAS_BIAS: tl.constexpr):
    """fp32 [BLOCK_M, BLOCK_N]: acc * x_scale * w_scale + bias. Pointers are at the tile's first column."""
    if ROW_SCALES:
        w_scale = tl.load(w_scale_ptr + offs_n, mask=mask_n, other=0.0)
        y = acc.to(tl.float32) * x_scale[:, None] * w_scale[None, :]
    else:
        y = acc.to(tl.float32) * x_scale[:, None] * tl.load(w_scale_ptr)
    if HAS_BIAS:
        y += tl.load(bias_ptr + offs_n, mask=mask_n, other=0.0).to(tl.float32)[None, :]
    return y


@triton.jit
def _store_tile(
    acc,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    left_m,
    left_n,
    stride_ym,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The epilogue: scale, add the bias, round once, store. Pointers are at the tile; left_m, left_n rows and columns exist."""
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask_m = offs_m < left_m
    mask_n = offs_n < left_n
    x_scale = tl.load(x_scale_ptr + offs_m, mask=mask_m, other=0.0)
    y = _scaled(acc, x_scale, w_scale_ptr, bias_ptr, offs_n, mask_n, ROW_SCALES, HAS_BIAS)
    offs_y = offs_m[:, None] * stride_ym + offs_n[None, :]
    tl.store(y_ptr + offs_y, y.to(y_ptr.dtype.element_ty), mask=mask_m[:, None] & mask_n[None, :])


@triton.jit(do_not_specialize=["m"])
def _int8_matmul_kernel(
    x_ptr,
    x_scale_ptr,
    w_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    stride_ym,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
):
    """One program per [BLOCK_M, BLOCK_N] tile of y. ROW_SCALES: w_scale holds n values, else one."""
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
    _store_tile(
        acc,
        x_scale_ptr + start_m,
        w_scale_ptr + start_n if ROW_SCALES else w_scale_ptr,
        bias_ptr + start_n,
        y_ptr + start_m * stride_ym + start_n,
        left_m,
        left_n,
        stride_ym,
        ROW_SCALES,
        HAS_BIAS,
        BLOCK_M,
        BLOCK_N,
    )


_launch = Launcher(_int8_matmul_kernel)
# spilled bytes per thread that are accepted; more means that the loop touches memory for its accumulators
MAX_SPILLS = 32


def check_compiled(compiled, sm: int, tile, k: int) -> None:
    """The guard: a tile whose registers spilled is rejected, so that the next one of the table is used instead.

    Only for K of the same kind: a layer of an odd size must not take the tile away from all others.
    """
    if (compiled.n_spills or 0) > MAX_SPILLS:
        reason = f"{compiled.n_spills} bytes of registers spilled with {compiled.n_regs} registers"
        reject(sm, tile, reason, k_kind(tile, k))


def numbers(m, n, k, strides: tuple[int, int, int], row_scales: bool, has_bias: bool, tile) -> tuple:
    """The pointer kernel's arguments after its six pointers; strides of the rows of q_x, q_w and y."""
    even_k = k % tile.block_k == 0
    return (m, n, k, *strides, row_scales, has_bias, tile.block_m, tile.block_n, tile.block_k, tile.group_m, even_k)


def programs(m: int, n: int, tile) -> int:
    """Tiles of an [m, n] output."""
    return -(-m // tile.block_m) * -(-n // tile.block_n)


def uses_tma(tile, aligned: bool, k: int, stride_xm: int, stride_wn: int) -> bool:
    """Whether the tile asks for the TMA kernel and the operands allow it."""
    return tile.tma and aligned and k % 16 == 0 and stride_xm % 16 == 0 and stride_wn % 16 == 0


def int8_matmul_triton(
    q_x, x_scale, q_w, w_scale, bias, y, tile, sm: int = 0, multiprocessors: int | None = None
) -> Starter | None:
    """q_x [M, K] int8, x_scale [M] fp32, q_w [N, K] int8, w_scale fp32 of 1 or N values, bias [N] | None -> y [M, N].

    Rows of q_x, q_w and y may be strided; columns must be contiguous. M, N and K > 0. sm names the architecture for
    the guard, multiprocessors counts the SMs for split-K. Returns what starts the same pointer kernel again, None for
    the TMA and split-K kernels.
    """
    m, k = q_x.shape
    n = q_w.shape[0]
    split = split_of(tile, m, n, k, multiprocessors) if tile.split_k and multiprocessors else None
    if split is not None:
        from .int8_matmul_split_k_triton import int8_matmul_split_k_triton

        int8_matmul_split_k_triton(q_x, x_scale, q_w, w_scale, bias, y, tile, split, sm)
        return None
    stride_xm, stride_wn, stride_ym = q_x.stride(0), q_w.stride(0), y.stride(0)
    pointers = (q_x.data_ptr(), q_w.data_ptr(), x_scale.data_ptr(), w_scale.data_ptr(), y.data_ptr())
    aligned = is_aligned(*pointers, 0 if bias is None else bias.data_ptr())
    bias_dtype = None if bias is None else bias.dtype
    if uses_tma(tile, aligned, k, stride_xm, stride_wn):
        from .int8_matmul_tma_triton import int8_matmul_tma_triton

        int8_matmul_tma_triton(q_x, x_scale, q_w, w_scale, bias, y, tile, sm)
        return None
    row_scales = w_scale.numel() > 1
    strides = (stride_xm, stride_wn, stride_ym)
    return _launch(
        programs(m, n, tile),
        (y.device.index, tile, n, k, strides, y.dtype, bias_dtype, row_scales),
        aligned,
        (q_x, x_scale, q_w, w_scale, w_scale if bias is None else bias, y,
         *numbers(m, n, k, strides, row_scales, bias is not None, tile)),
        {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False},
        lambda compiled: check_compiled(compiled, sm, tile, k),
    )  # fmt: skip
