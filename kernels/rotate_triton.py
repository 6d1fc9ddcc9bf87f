"""The grouped Hadamard rotation in registers, inside whatever kernel needs it.

H(4) / 2 has -1 where row + column == 3, so it is (J / 2 - I) times a reversal, J all ones. Kronecker products keep
that form: H(4^s) = (J / 2 - I) (x) ... (x) (J / 2 - I), times a reversal of the whole group. One factor costs almost
nothing: replace each of four values by half their sum minus itself. So a rotation is s such steps, each a sum of
four that are 1, 4, 16, ... apart, and one reversal at the end; all in fp32, no table, no matrix, no shared memory.

A sum of four is written as a sum of two sums of two. Left to itself, the compiler adds four in an order that depends on how
many warps share the row, and two kernels would make codes of the same values that differ now and then.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _half_sum_minus_self(v, BLOCK: tl.constexpr, STEP: tl.constexpr):
    """One factor J / 2 - I over the four values that are STEP apart. v [BLOCK] fp32."""
    v = tl.reshape(v, (BLOCK // (4 * STEP), 2, 2, STEP))
    pairs = tl.sum(v, axis=2, keep_dims=True)
    return tl.reshape(tl.sum(pairs, axis=1, keep_dims=True) * 0.5 - v, (BLOCK,))


@triton.jit
def rotate_block_reversed(v, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """v [BLOCK] fp32 -> [BLOCK] fp32: each run of GROUP values times H(GROUP), still in reverse order within the run.

    BLOCK is a power of two and at least GROUP; GROUP is 4, 16, 64, 256 or 1024.
    """
    v = _half_sum_minus_self(v, BLOCK, 1)
    if GROUP >= 16:
        v = _half_sum_minus_self(v, BLOCK, 4)
    if GROUP >= 64:
        v = _half_sum_minus_self(v, BLOCK, 16)
    if GROUP >= 256:
        v = _half_sum_minus_self(v, BLOCK, 64)
    if GROUP >= 1024:
        v = _half_sum_minus_self(v, BLOCK, 256)
    return v


@triton.jit
def _rotate_kernel(x_ptr, y_ptr, k, stride_xm, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """One program rotates BLOCK columns of one row; y is contiguous [M, K]."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    offs_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask_k = offs_k < k
    v = tl.load(x_ptr + row * stride_xm + offs_k, mask=mask_k, other=0.0).to(tl.float32)
    v = rotate_block_reversed(v, BLOCK, GROUP)
    v = tl.reshape(tl.flip(tl.reshape(v, (BLOCK // GROUP, GROUP)), 1), (BLOCK,))
    tl.store(y_ptr + row * k + offs_k, v.to(y_ptr.dtype.element_ty), mask=mask_k)


def rotate_triton(x, y, group: int) -> None:
    """x [M, K] float with unit column stride -> y [M, K] contiguous, same dtype; K % group == 0, M > 0."""
    m, k = x.shape
    block = min(max(group, triton.next_power_of_2(k)), 2048)
    _rotate_kernel[(m, triton.cdiv(k, block))](x, y, k, x.stride(0), BLOCK=block, GROUP=group, num_warps=4)
