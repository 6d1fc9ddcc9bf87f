"""One program per row: the row is read, added to, normed, modulated and quantised, and never leaves the SM in between.

A norm needs the sum of all squares first. It is taken from a second reading, which comes from the cache, since the
order of its additions is PyTorch's: 128 partial sums over four columns of every 512, then a tree. From the registers
the compiler would choose an order of its own, and the last bit of the result would differ.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launcher, is_aligned
from .quantize_rows_triton import quantize_blocks, row_blocks


@triton.jit
def _rounded(v, like_ptr):
    """v fp32 rounded to the type that like_ptr points to, as fp32."""
    return v.to(like_ptr.dtype.element_ty).to(tl.float32)


@triton.jit
def inverse_rms(x_ptr, eps, K: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps) of the K values at x_ptr, added up as PyTorch's CUDA kernel does."""
    offs = tl.arange(0, 512)
    acc = tl.zeros((128,), dtype=tl.float32)
    for chunk in tl.static_range((K + 511) // 512):
        if (chunk + 1) * 512 <= K:
            v = tl.load(x_ptr + chunk * 512 + offs).to(tl.float32)
        else:
            v = tl.load(x_ptr + chunk * 512 + offs, mask=chunk * 512 + offs < K, other=0.0).to(tl.float32)
        even, odd = tl.split(tl.reshape(v * v, (256, 2)))
        v0, v2 = tl.split(tl.reshape(even, (128, 2)))
        v1, v3 = tl.split(tl.reshape(odd, (128, 2)))
        acc = acc + v0 + v1 + v2 + v3
    # lanes that are 16, 8, 4, 2, 1 apart, then warps that are 2, 1 apart; a sum of two has no order
    acc = tl.sum(tl.reshape(acc, (4, 2, 16)), axis=1)
    acc = tl.sum(tl.reshape(acc, (4, 2, 8)), axis=1)
    acc = tl.sum(tl.reshape(acc, (4, 2, 4)), axis=1)
    acc = tl.sum(tl.reshape(acc, (4, 2, 2)), axis=1)
    acc = tl.sum(acc, axis=1)
    acc = tl.sum(tl.reshape(acc, (2, 2)), axis=0)
    return tl.rsqrt(tl.math.div_rn(tl.sum(acc, axis=0), K * 1.0) + eps)


@triton.jit
def _load(ptr, offs, K: tl.constexpr, MASKED: tl.constexpr):
    v = tl.load(ptr + offs, mask=offs < K, other=0.0) if MASKED else tl.load(ptr + offs)
    return v.to(tl.float32)


@triton.jit
def _with_branch(
    x, y_ptr, weight_ptr, gate_ptr, out_ptr, offs, inverse, NORM: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr
):
    """x + gate * (weight * (y / rms)), or x + gate * y, each step rounded; also stored at out_ptr."""
    v = _load(y_ptr, offs, K, MASKED)
    if NORM:
        v = _rounded(_load(weight_ptr, offs, K, MASKED) * (inverse * v), y_ptr)
    v = _rounded(_load(gate_ptr, offs, K, MASKED) * v, y_ptr)
    v = (x + v).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, v, mask=offs < K)
    return v.to(tl.float32)


@triton.jit
def _modulated(
    x, x_ptr, weight_ptr, mod_ptr, shift_ptr, offs, inverse, SHIFT: tl.constexpr, K: tl.constexpr, MASKED: tl.constexpr
):
    """(weight * (x / rms)) * (1 + scale) + shift, each step rounded to the type of x."""
    v = _rounded(_load(weight_ptr, offs, K, MASKED) * (inverse * x), x_ptr)
    v = _rounded(v * _rounded(1.0 + _load(mod_ptr, offs, K, MASKED), x_ptr), x_ptr)
    if SHIFT:
        v = _rounded(v + _load(shift_ptr, offs, K, MASKED), x_ptr)
    return v


@triton.jit(do_not_specialize=["rows_per_gate", "rows_per_scale"])
def _residual_norm_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    branch_weight_ptr,
    gate_ptr,
    norm_weight_ptr,
    mod_ptr,
    shift_ptr,
    q_ptr,
    scale_ptr,
    branch_eps,
    norm_eps,
    rows_per_gate,
    rows_per_scale,
    stride_gate,
    stride_mod,
    stride_shift,
    HAS_BRANCH: tl.constexpr,
    BRANCH_NORM: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """x, y, out [M, K] contiguous. Row i takes gate row i // rows_per_gate and scale row i // rows_per_scale."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * K
    offs_a = tl.arange(0, BLOCK_A)
    ONE: tl.constexpr = BLOCK_B == 0
    a = _load(x_ptr, offs_a, K, ONE)
    b = a
    if BLOCK_B > 0:
        offs_b = BLOCK_A + tl.arange(0, BLOCK_B)
        b = _load(x_ptr, offs_b, K, True)
    if HAS_BRANCH:
        y_ptr += row * K
        out_ptr += row * K
        gate_ptr += row // rows_per_gate * stride_gate
        inverse = 1.0
        if BRANCH_NORM:
            inverse = inverse_rms(y_ptr, branch_eps, K)
        a = _with_branch(a, y_ptr, branch_weight_ptr, gate_ptr, out_ptr, offs_a, inverse, BRANCH_NORM, K, ONE)
        if BLOCK_B > 0:
            b = _with_branch(b, y_ptr, branch_weight_ptr, gate_ptr, out_ptr, offs_b, inverse, BRANCH_NORM, K, True)
        x_ptr = out_ptr
        # the row that was just stored is read again, by other threads
        tl.debug_barrier()
    if HAS_NORM:
        mod_ptr += row // rows_per_scale * stride_mod
        shift_ptr += row // rows_per_scale * stride_shift
        inverse = inverse_rms(x_ptr, norm_eps, K)
        a = _modulated(a, x_ptr, norm_weight_ptr, mod_ptr, shift_ptr, offs_a, inverse, HAS_SHIFT, K, ONE)
        if BLOCK_B > 0:
            b = _modulated(b, x_ptr, norm_weight_ptr, mod_ptr, shift_ptr, offs_b, inverse, HAS_SHIFT, K, True)
        quantize_blocks(q_ptr + row * K, scale_ptr + row, a, b, K, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_residual_norm_kernel)


def warps(k: int) -> int:
    """Warps per row: PyTorch's 128 partial sums are one per thread of four warps."""
    return 4 if k <= 8192 else 8


def residual_norm_triton(x, branch, out, norm, q, scale, rotation_group: int) -> None:
    """x [M, K] contiguous -> out [M, K] (with a branch), q [M, K] int8 and scale [M] fp32 (with a norm); M > 0."""
    m, k = x.shape
    y, branch_weight, branch_eps, gate = (x, x, 0.0, x) if branch is None else branch
    norm_weight, norm_eps, mod, shift = (x, 0.0, x, None) if norm is None else norm
    has_branch = branch is not None
    halves = (has_branch, has_branch and branch_weight is not None, norm is not None, shift is not None)
    branch_weight, shift = x if branch_weight is None else branch_weight, mod if shift is None else shift
    block_a, block_b = row_blocks(k, rotation_group)
    constants = (*halves, k, rotation_group, block_a, block_b)
    tensors = (
        x,
        y,
        x if out is None else out,
        branch_weight,
        gate,
        norm_weight,
        mod,
        shift,
        x if q is None else q,
        x if scale is None else scale,
    )
    strides = (gate.stride(0), mod.stride(0), shift.stride(0))
    _launch(
        m,
        (x.device.index, x.dtype, branch_weight.dtype, norm_weight.dtype, branch_eps, norm_eps, strides, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, branch_eps, norm_eps, m // gate.shape[0], m // mod.shape[0], *strides, *constants),
        # as quantize_rows, so that the codes are its codes; the steps before are rounded too often to be fused
        {"num_warps": warps(k), "enable_fp_fusion": rotation_group > 0},
    )
