"""One program per row: the row is read, added to, normed, modulated and quantised, and never leaves the SM in between.

A norm needs the sum of all squares first. It is taken from a second reading, which comes from the cache, since the
order of its additions is PyTorch's: 128 partial sums over four columns of every 512, then a tree. From the registers
the compiler would choose an order of its own, and the last bit of the result would differ. For a LayerNorm the partial
sums are Welford's mean and sum of squared distances from it, which move on value by value.
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
def _product(a, b, like_ptr, FUSES: tl.constexpr):
    """a * b, rounded to the type that like_ptr points to, as fp32.

    Where the compiler FUSES products into additions it would make this one a part of the addition that follows, and leave
    the rounding out; so there it is added to nothing, by an instruction of its own.
    """
    return _rounded(tl.fma(a, b, 0.0) if FUSES else a * b, like_ptr)


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
def _next_value(mean, spread, v, COUNT: tl.constexpr):
    """Mean and sum of squared distances of COUNT values, the last of which is v; of COUNT - 1 before."""
    delta = v - mean
    mean = tl.fma(delta, 1.0 / COUNT, mean)
    return mean, tl.fma(delta, v - mean, spread)


@triton.jit
def _merged(mean, spread, COUNT: tl.constexpr, OUTER: tl.constexpr, INNER: tl.constexpr):
    """Means and spreads of [OUTER, 2, INNER] parts of COUNT values each -> those of [OUTER, INNER] pairs.

    Both parts weigh one half, exactly, so that a sum of two has no order here either.
    """
    mean = tl.reshape(mean, (OUTER, 2, INNER))
    sign = tl.reshape(1.0 - 2.0 * tl.arange(0, 2), (1, 2, 1))
    delta = tl.sum(mean * sign, axis=1)
    spread = tl.sum(tl.reshape(spread, (OUTER, 2, INNER)), axis=1)
    return tl.sum(mean * 0.5, axis=1), tl.fma(delta * delta * COUNT, 0.5, spread)


@triton.jit
def moments(x_ptr, eps, K: tl.constexpr):
    """Mean and 1 / sqrt(variance + eps) of the K values at x_ptr; as PyTorch's CUDA kernel takes them where 512 divides K."""
    offs = tl.arange(0, 512)
    if K % 512 == 0:
        mean = tl.zeros((128,), dtype=tl.float32)
        spread = tl.zeros((128,), dtype=tl.float32)
        for chunk in tl.static_range(K // 512):
            v = tl.load(x_ptr + chunk * 512 + offs).to(tl.float32)
            even, odd = tl.split(tl.reshape(v, (256, 2)))
            v0, v2 = tl.split(tl.reshape(even, (128, 2)))
            v1, v3 = tl.split(tl.reshape(odd, (128, 2)))
            mean, spread = _next_value(mean, spread, v0, 4 * chunk + 1)
            mean, spread = _next_value(mean, spread, v1, 4 * chunk + 2)
            mean, spread = _next_value(mean, spread, v2, 4 * chunk + 3)
            mean, spread = _next_value(mean, spread, v3, 4 * chunk + 4)
        # lanes that are 16, 8, 4, 2, 1 apart, then warps that are 2, 1 apart
        mean, spread = _merged(mean, spread, K // 128, 4, 16)
        mean, spread = _merged(mean, spread, K // 64, 4, 8)
        mean, spread = _merged(mean, spread, K // 32, 4, 4)
        mean, spread = _merged(mean, spread, K // 16, 4, 2)
        mean, spread = _merged(mean, spread, K // 8, 4, 1)
        mean, spread = _merged(mean, spread, K // 4, 1, 2)
        mean, spread = _merged(mean, spread, K // 2, 1, 1)
        mean = tl.sum(tl.sum(mean, axis=1), axis=0)
        spread = tl.sum(tl.sum(spread, axis=1), axis=0)
    else:
        acc = tl.zeros((512,), dtype=tl.float32)
        for chunk in tl.static_range((K + 511) // 512):
            acc += tl.load(x_ptr + chunk * 512 + offs, mask=chunk * 512 + offs < K, other=0.0).to(tl.float32)
        mean = tl.math.div_rn(tl.sum(acc, axis=0), K * 1.0)
        acc = tl.zeros((512,), dtype=tl.float32)
        for chunk in tl.static_range((K + 511) // 512):
            inside = chunk * 512 + offs < K
            delta = tl.load(x_ptr + chunk * 512 + offs, mask=inside, other=0.0).to(tl.float32) - mean
            acc += tl.where(inside, delta * delta, 0.0)
        spread = tl.sum(acc, axis=0)
    return mean, tl.rsqrt(tl.math.div_rn(spread, K * 1.0) + eps)


@triton.jit
def _load(ptr, offs, K: tl.constexpr, MASKED: tl.constexpr):
    v = tl.load(ptr + offs, mask=offs < K, other=0.0) if MASKED else tl.load(ptr + offs)
    return v.to(tl.float32)


@triton.jit
def _with_branch(
    x,
    y_ptr,
    weight_ptr,
    gate_ptr,
    out_ptr,
    offs,
    inverse,
    NORM: tl.constexpr,
    GATE: tl.constexpr,
    FUSES: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """x + gate * (weight * (y / rms)), or without norm or gate, each step rounded (GATE 2: not the product); stored, too."""
    v = _load(y_ptr, offs, K, MASKED)
    if NORM:
        v = _rounded(_load(weight_ptr, offs, K, MASKED) * (inverse * v), y_ptr)
    if GATE == 1:
        v = _product(_load(gate_ptr, offs, K, MASKED), v, y_ptr, FUSES)
    if GATE == 2:
        v = _load(gate_ptr, offs, K, MASKED) * v
    v = (x + v).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + offs, v, mask=offs < K)
    return v.to(tl.float32)


@triton.jit
def _modulated(
    x,
    x_ptr,
    weight_ptr,
    bias_ptr,
    mod_ptr,
    shift_ptr,
    kept_ptr,
    offs,
    mean,
    inverse,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MODULATION: tl.constexpr,
    SHIFT: tl.constexpr,
    KEPT: tl.constexpr,
    FUSES: tl.constexpr,
    K: tl.constexpr,
    MASKED: tl.constexpr,
):
    """norm(x) * (1 + scale) + shift, each step rounded to the type of x (MODULATION 2: not the product; 0: norm(x))."""
    v = inverse * (x - mean) if CENTRED else inverse * x
    if BIAS:
        v = tl.fma(_load(weight_ptr, offs, K, MASKED), v, _load(bias_ptr, offs, K, MASKED))
    elif WEIGHT:
        v = _load(weight_ptr, offs, K, MASKED) * v
    v = _rounded(v, x_ptr)
    if MODULATION > 0:
        scale = _rounded(1.0 + _load(mod_ptr, offs, K, MASKED), x_ptr)
        v = _product(v, scale, x_ptr, FUSES) if MODULATION == 1 else v * scale
    if SHIFT:
        v = _rounded(v + _load(shift_ptr, offs, K, MASKED), x_ptr)
    if KEPT:
        tl.store(kept_ptr + offs, v.to(kept_ptr.dtype.element_ty), mask=offs < K)
    # columns that are not there must not count in the row's scale
    return tl.where(offs < K, v, 0.0) if CENTRED and MASKED else v


@triton.jit(do_not_specialize=["rows_per_gate", "rows_per_scale"])
def _residual_norm_kernel(
    x_ptr,
    y_ptr,
    out_ptr,
    branch_weight_ptr,
    gate_ptr,
    norm_weight_ptr,
    bias_ptr,
    mod_ptr,
    shift_ptr,
    q_ptr,
    scale_ptr,
    kept_ptr,
    branch_eps,
    norm_eps,
    rows_per_gate,
    rows_per_scale,
    stride_gate,
    stride_mod,
    stride_shift,
    HAS_BRANCH: tl.constexpr,
    BRANCH_NORM: tl.constexpr,
    GATE: tl.constexpr,
    HAS_NORM: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
    MODULATION: tl.constexpr,
    SHIFT: tl.constexpr,
    KEPT: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """x, y, out [M, K] contiguous. Row i takes gate row i // rows_per_gate and scale row i // rows_per_scale.

    GATE, MODULATION: 0 for none, 1 for a product that is rounded, 2 for one that is not. KEPT: store what is quantised at
    kept_ptr, too.
    """
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * K
    offs_a = tl.arange(0, BLOCK_A)
    ONE: tl.constexpr = BLOCK_B == 0
    FUSES: tl.constexpr = GROUP > 0
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
        a = _with_branch(
            a, y_ptr, branch_weight_ptr, gate_ptr, out_ptr, offs_a, inverse, BRANCH_NORM, GATE, FUSES, K, ONE
        )
        if BLOCK_B > 0:
            b = _with_branch(
                b, y_ptr, branch_weight_ptr, gate_ptr, out_ptr, offs_b, inverse, BRANCH_NORM, GATE, FUSES, K, True
            )
        x_ptr = out_ptr
        # the row that was just stored is read again, by other threads
        tl.debug_barrier()
    if HAS_NORM:
        mod_ptr += row // rows_per_scale * stride_mod
        shift_ptr += row // rows_per_scale * stride_shift
        kept_ptr += row * K
        mean = 0.0
        if CENTRED:
            mean, inverse = moments(x_ptr, norm_eps, K)
        else:
            inverse = inverse_rms(x_ptr, norm_eps, K)
        a = _modulated(
            a, x_ptr, norm_weight_ptr, bias_ptr, mod_ptr, shift_ptr, kept_ptr, offs_a, mean, inverse,
            CENTRED, WEIGHT, BIAS, MODULATION, SHIFT, KEPT, FUSES, K, ONE,
        )  # fmt: skip
        if BLOCK_B > 0:
            b = _modulated(
                b, x_ptr, norm_weight_ptr, bias_ptr, mod_ptr, shift_ptr, kept_ptr, offs_b, mean, inverse,
                CENTRED, WEIGHT, BIAS, MODULATION, SHIFT, KEPT, FUSES, K, True,
            )  # fmt: skip
        quantize_blocks(q_ptr + row * K, scale_ptr + row, a, b, K, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_residual_norm_kernel)


def warps(k: int) -> int:
    """Warps per row: PyTorch's 128 partial sums are one per thread of four warps."""
    return 4 if k <= 8192 else 8


def constants_of(branch, norm, kept=None) -> tuple:
    """The kernel's constants from HAS_BRANCH to KEPT."""
    ends = (False, False, 0)
    if branch is not None:
        ends = (True, branch.weight is not None, 0 if branch.gate is None else 1 + branch.one_rounding)
    begins = (False, False, False, False, 0, False)
    if norm is not None:
        modulation = 0 if norm.scale is None else 1 + norm.one_rounding
        there = (norm.weight is not None, norm.bias is not None, modulation, norm.shift is not None)
        begins = (True, norm.centred, *there)
    return *ends, *begins, norm is not None and kept is not None


def residual_norm_triton(x, branch, out, norm, q, scale, kept, rotation_group: int) -> None:
    """x [M, K] contiguous -> out [M, K] (with a branch), q [M, K] int8, scale [M] fp32 and kept [M, K] (with a norm); M > 0."""
    m, k = x.shape
    y, branch_weight, branch_eps, gate = (None, None, 0.0, None) if branch is None else branch[:4]
    norm_weight, norm_eps, mod, shift, bias = (None, 0.0, None, None, None) if norm is None else norm[:5]
    constants = (*constants_of(branch, norm, kept), k, rotation_group, *row_blocks(k, rotation_group))
    # in place of a tensor that is not there stands x, which is not read
    given = (x, y, out, branch_weight, gate, norm_weight, bias, mod, shift, q, scale, kept)
    tensors = tuple(x if t is None else t for t in given)
    gate, mod, shift = tensors[4], tensors[7], tensors[8]
    strides = (gate.stride(0), mod.stride(0), shift.stride(0))
    dtypes = (tensors[3].dtype, tensors[5].dtype)
    _launch(
        m,
        (x.device.index, x.dtype, dtypes, branch_eps, norm_eps, strides, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, branch_eps, norm_eps, m // gate.shape[0], m // mod.shape[0], *strides, *constants),
        # as quantize_rows, so that the codes are its codes; the steps before are rounded too often to be fused
        {"num_warps": warps(k), "enable_fp_fusion": rotation_group > 0},
    )
