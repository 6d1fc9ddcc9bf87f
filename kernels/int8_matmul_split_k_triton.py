"""The INT8 matmul with its last tiles split along K, for outputs that fill the GPU's rounds badly.

540 tiles on 132 SMs are four rounds and 12 tiles; those 12 would take a whole round while 120 SMs idle. Here they are cut
along K into as many pieces as fill the round, and all tiles before them run as usual. A piece writes its int32 sums to a
place of its own; a second, small kernel adds the pieces up and runs the epilogue. int32 sums do not depend on their order,
so the result is the same bit for bit.

Measured on an H200 and left: the last piece of a tile, found with a counter, adds all of them up (5 to 20 us for one
block to read them, where the second kernel takes about 5 for all); and stream-K (arXiv 2301.03598), where every block takes
an equal run of steps across tile borders: blocks then read different columns at a time and share less of what is in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .int8_matmul_triton import _accumulate, _accumulate_boxes, _store_tile, _tile_of, check_compiled, uses_tma
from .launch import Launcher, is_aligned
from .tiles import MAX_PIECES, Split


@triton.jit(do_not_specialize=["m", "whole", "rest", "pieces"])
def _int8_matmul_split_k_kernel(
    x,
    x_scale_ptr,
    w,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    partial_ptr,
    m,
    n,
    k,
    stride_xm,
    stride_wn,
    stride_ym,
    whole,
    rest,
    pieces,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    EVEN_K: tl.constexpr,
    TMA: tl.constexpr,
):
    """Programs below `whole` have a tile each; the `rest` tiles after them are done by `pieces` programs each.

    x and w are pointers, or descriptors with TMA. partial_ptr: int32 [pieces, rest, BLOCK_M, BLOCK_N], where the pieces
    write their sums.
    """
    pid = tl.program_id(0)
    steps = tl.cdiv(k, BLOCK_K)
    is_piece = pid >= whole
    # pieces of the same columns are neighbours, so that they share operands in L2
    piece = tl.where(is_piece, (pid - whole) // rest, 0)
    split_tile = (pid - whole) % rest
    parts = tl.where(is_piece, pieces, 1)
    begin = (piece * steps // parts) * BLOCK_K
    end = tl.minimum(((piece + 1) * steps // parts) * BLOCK_K, k)
    tile_m, tile_n = _tile_of(tl.where(is_piece, whole + split_tile, pid), m, n, BLOCK_M, BLOCK_N, GROUP_M)
    # int64: M * K and M * N pass 2**31 at video sizes
    start_m = tile_m.to(tl.int64) * BLOCK_M
    start_n = tile_n.to(tl.int64) * BLOCK_N
    left_m = (m - start_m).to(tl.int32)
    left_n = (n - start_n).to(tl.int32)
    if TMA:
        acc = _accumulate_boxes(x, w, tile_m * BLOCK_M, tile_n * BLOCK_N, begin, end, BLOCK_M, BLOCK_N, BLOCK_K)
    else:
        acc = _accumulate(
            x + start_m * stride_xm + begin,
            w + start_n * stride_wn + begin,
            end - begin,
            stride_xm,
            stride_wn,
            tl.minimum(tl.arange(0, BLOCK_M), left_m - 1),
            tl.minimum(tl.arange(0, BLOCK_N), left_n - 1),
            BLOCK_M,
            BLOCK_N,
            BLOCK_K,
            EVEN_K,
        )
    if is_piece:
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        tl.store(partial_ptr + (pid - whole).to(tl.int64) * (BLOCK_M * BLOCK_N) + offs, acc)
    else:
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


@triton.jit(do_not_specialize=["m", "whole", "rest", "pieces"])
def _add_up_kernel(
    partial_ptr,
    x_scale_ptr,
    w_scale_ptr,
    bias_ptr,
    y_ptr,
    m,
    n,
    stride_ym,
    whole,
    rest,
    pieces,
    ROW_SCALES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
    ROWS: tl.constexpr,
    MAX_PIECES: tl.constexpr,
):
    """One program per ROWS rows of a split tile: add up its pieces and run the epilogue."""
    parts: tl.constexpr = BLOCK_M // ROWS
    split_tile = tl.program_id(0) // parts
    first_row = tl.program_id(0) % parts * ROWS
    tile_m, tile_n = _tile_of(whole + split_tile, m, n, BLOCK_M, BLOCK_N, GROUP_M)
    offs = tl.arange(0, ROWS)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    at = (split_tile * BLOCK_M + first_row).to(tl.int64) * BLOCK_N
    acc = tl.zeros((ROWS, BLOCK_N), dtype=tl.int32)
    # unrolled, so that all pieces are on their way at once
    for piece in tl.static_range(MAX_PIECES):
        place = partial_ptr + at + piece * rest.to(tl.int64) * (BLOCK_M * BLOCK_N)
        acc += tl.load(place + offs, mask=piece < pieces, other=0)
    start_m = tile_m.to(tl.int64) * BLOCK_M + first_row
    start_n = tile_n.to(tl.int64) * BLOCK_N
    _store_tile(
        acc,
        x_scale_ptr + start_m,
        w_scale_ptr + start_n if ROW_SCALES else w_scale_ptr,
        bias_ptr + start_n,
        y_ptr + start_m * stride_ym + start_n,
        (m - start_m).to(tl.int32),
        (n - start_n).to(tl.int32),
        stride_ym,
        ROW_SCALES,
        HAS_BIAS,
        ROWS,
        BLOCK_N,
    )


_launch = Launcher(_int8_matmul_split_k_kernel)
_launch_add_up = Launcher(_add_up_kernel)
# rows that one program of the second kernel adds up
ROWS = 16


def int8_matmul_split_k_triton(q_x, x_scale, q_w, w_scale, bias, y, tile, split: Split, sm: int = 0) -> None:
    """As int8_matmul_triton, with the tiles after `split.whole` done in `split.pieces` pieces each.

    Meanwhile it needs memory for `split.pieces` int32 copies of the split tiles. split.pieces <= MAX_PIECES.
    """
    m, k = q_x.shape
    n = q_w.shape[0]
    rest = -(-m // tile.block_m) * -(-n // tile.block_n) - split.whole
    stride_xm, stride_wn, stride_ym = q_x.stride(0), q_w.stride(0), y.stride(0)
    partial = torch.empty((split.pieces * rest * tile.block_m * tile.block_n,), dtype=torch.int32, device=y.device)
    pointers = (q_x.data_ptr(), q_w.data_ptr(), x_scale.data_ptr(), w_scale.data_ptr(), y.data_ptr())
    aligned = is_aligned(*pointers, partial.data_ptr(), 0 if bias is None else bias.data_ptr())
    tma = uses_tma(tile, aligned, k, stride_xm, stride_wn)
    x, w = q_x, q_w
    if tma:
        from triton.tools.tensor_descriptor import TensorDescriptor

        x = TensorDescriptor(q_x, [m, k], [stride_xm, 1], [tile.block_m, tile.block_k])
        w = TensorDescriptor(q_w, [n, k], [stride_wn, 1], [tile.block_n, tile.block_k])
    row_scales, has_bias = w_scale.numel() > 1, bias is not None
    bias = bias if has_bias else w_scale
    kind = (y.device.index, tile, n, stride_ym, y.dtype, bias.dtype if has_bias else None, row_scales)
    _launch(
        split.whole + rest * split.pieces,
        (*kind, k, stride_xm, stride_wn, tma),
        aligned,
        (x, x_scale, w, w_scale, bias, y, partial, m, n, k, stride_xm, stride_wn, stride_ym, split.whole, rest,
         split.pieces, row_scales, has_bias, tile.block_m, tile.block_n, tile.block_k, tile.group_m,
         k % tile.block_k == 0, tma),
        {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False},
        lambda compiled: check_compiled(compiled, sm, tile, k),
    )  # fmt: skip
    _launch_add_up(
        rest * (tile.block_m // ROWS),
        kind,
        aligned,
        (partial, x_scale, w_scale, bias, y, m, n, stride_ym, split.whole, rest, split.pieces, row_scales, has_bias,
         tile.block_m, tile.block_n, tile.group_m, ROWS, MAX_PIECES),
        {"num_warps": 4, "enable_fp_fusion": False},
    )  # fmt: skip
