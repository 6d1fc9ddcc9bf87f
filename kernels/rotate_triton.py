"""The grouped Hadamard rotation on tensor cores, inside whatever kernel needs it.

H(256) = H16 (x) H16, so a run of 256 values seen as a [16, 16] square X becomes H16 X H16: two products with a
16 x 16 matrix of signs instead of one with 256 x 256. The other groups are the same two products with smaller
or block-diagonal factors: 4 and 16 need only the right one, 64 = 4 x 16, 1024 = 64 x 16. The signs are made
from the indices (no table to load): an entry is -1 for every base-4 digit in which row and column add up to 3,
that is, in which their exclusive or has both bits set.

The products run in bf16 on exact operands: signs are exact, and a value is split into two bf16 terms, which
keeps 16 bits of it. What is lost is 2**-17 of a value; the int8 step that follows is 2**-7 of the largest.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .compiled import interpreted

# the interpreter multiplies bf16 bit patterns instead of values; in fp32 the second term is zero
TERM = tl.constexpr(tl.float32 if interpreted() else tl.bfloat16)


@triton.jit
def _signs(SIZE: tl.constexpr, GROUP: tl.constexpr):
    """[SIZE, SIZE] bf16: blocks of the unscaled H(GROUP), entries +-1, on the diagonal, 0 elsewhere."""
    row = tl.arange(0, SIZE)[:, None]
    col = tl.arange(0, SIZE)[None, :]
    differ = row ^ col
    both = differ & (differ >> 1) & 0x55
    parity = (both ^ (both >> 2) ^ (both >> 4)) & 1
    inside = (row // GROUP) == (col // GROUP)
    return tl.where(inside, 1.0 - 2.0 * parity.to(tl.float32), 0.0).to(TERM)


@triton.jit
def _times_signs(v, signs):
    """v [R, SIZE] fp32 @ signs [SIZE, SIZE] bf16 -> fp32, with v in two bf16 terms."""
    high = v.to(TERM)
    low = (v - high.to(tl.float32)).to(TERM)
    return tl.dot(low, signs, tl.dot(high, signs))


@triton.jit
def rotate_block(v, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """v [BLOCK] fp32 -> [BLOCK] fp32, each run of GROUP values times H(GROUP).

    BLOCK is a power of two, at least 256, and at least 1024 for GROUP 1024; GROUP is 4, 16, 64, 256 or 1024.
    """
    RIGHT: tl.constexpr = 4 if GROUP == 4 else 16
    v = _times_signs(tl.reshape(v, (BLOCK // 16, 16)), _signs(16, RIGHT))
    if GROUP > 16:
        LEFT: tl.constexpr = 64 if GROUP == 1024 else 16
        # the square is transposed so that the left product is a right product as well (H is symmetric)
        v = tl.permute(tl.reshape(v, (BLOCK // (16 * LEFT), LEFT, 16)), (0, 2, 1))
        v = _times_signs(tl.reshape(v, (BLOCK // LEFT, LEFT)), _signs(LEFT, GROUP // 16))
        v = tl.permute(tl.reshape(v, (BLOCK // (16 * LEFT), 16, LEFT)), (0, 2, 1))
    NORM: tl.constexpr = 0.5 if GROUP == 4 else (0.25 if GROUP == 16 else (0.125 if GROUP == 64 else (0.0625 if GROUP == 256 else 0.03125)))
    return tl.reshape(v, (BLOCK,)) * NORM


@triton.jit
def _rotate_kernel(x_ptr, y_ptr, k, stride_xm, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """One program rotates BLOCK columns of one row; y is contiguous [M, K]."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_k = offs_k < k
    v = tl.load(x_ptr + row * stride_xm + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    v = rotate_block(v, BLOCK, GROUP)
    tl.store(y_ptr + row * k + offs_k, v.to(y_ptr.dtype.element_ty), mask=mask_k)


def rotate_triton(x, y, group: int) -> None:
    """x [M, K] float with unit column stride -> y [M, K] contiguous, same dtype; K % group == 0, M > 0."""
    m, k = x.shape
    block = min(max(256, 1024 if group == 1024 else 256, triton.next_power_of_2(k)), 2048)
    _rotate_kernel[(m, triton.cdiv(k, block))](x, y, k, x.stride(0), BLOCK=block, GROUP=group, num_warps=4)
