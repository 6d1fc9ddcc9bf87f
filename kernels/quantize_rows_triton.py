"""Row quantisation in one pass: read a row once, keep it in registers, write its int8 codes and one scale.

The kernel moves 3 bytes per bf16 value and does almost nothing else, so its time is the memory's. Three things
keep it there:
- A row is two power-of-two blocks, BLOCK_A + BLOCK_B, instead of one padded to the next power of two: 4608 is
  4096 + 512, 24576 is 16384 + 8192, and no lane idles on padding.
- The largest magnitude is found on the bit patterns. With the sign bit cleared, floats order as integers, and
  Inf and NaN order above every finite value: one integer maximum finds the scale and the bad rows together.
- Rounding is one addition: adding 1.5 * 2**23 leaves round_half_even(v) in the low bits of the fp32 pattern, and
  its low byte is the int8 code. libdevice.rint would not run in Triton's interpreter.
"""

from __future__ import annotations

import functools

import triton
import triton.language as tl

from .launch import Launcher, Starter, is_aligned
from .rotate_triton import rotate_block_reversed

ACT_NONE, ACT_GELU_TANH, ACT_SWIGLU = 0, 1, 2
ACT_CODES = {None: ACT_NONE, "gelu_tanh": ACT_GELU_TANH, "swiglu": ACT_SWIGLU}


@triton.jit
def _sigmoid(v):
    return 1.0 / (1.0 + tl.exp(-v))


@triton.jit
def _load_values(x_ptr, offs_k, k, MASKED: tl.constexpr, ACT: tl.constexpr):
    """Columns offs_k of one row as fp32, after the activation. ACT 2 reads [gate | up], each k wide."""
    if MASKED:
        v = tl.load(x_ptr + offs_k, mask=offs_k < k, other=0.0).to(tl.float32)
    else:
        v = tl.load(x_ptr + offs_k).to(tl.float32)
    if ACT == 1:
        # 0.5 * (1 + tanh(u)) == sigmoid(2 * u)
        v = v * _sigmoid(1.5957691216057308 * (v + 0.044715 * v * v * v))
    if ACT == 2:
        if MASKED:
            up = tl.load(x_ptr + k + offs_k, mask=offs_k < k, other=0.0).to(tl.float32)
        else:
            up = tl.load(x_ptr + k + offs_k).to(tl.float32)
        v = v * _sigmoid(v) * up
    return v


@triton.jit
def _magnitude_bits(v):
    """Bit pattern of |v| as int32: orders like |v|, with Inf and NaN above every finite value."""
    return v.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _code_bits(v, inverse_scale, bad):
    """round_half_even(v * inverse_scale) in the low byte of an int32, as two's complement; 0 in a bad row."""
    # 12582912 = 1.5 * 2**23
    shifted = v * inverse_scale + 12582912.0
    return tl.where(bad, 0, shifted.to(tl.int32, bitcast=True))


@triton.jit
def _store_codes(q_ptr, start, v, k, inverse_scale, bad, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Store the codes of v [BLOCK] at columns start, start + 1, ... < k; reversed within each GROUP > 0.

    Reversed runs are stored as 32-bit words: the bytes are reversed while packing, the words by their addresses.
    """
    bits = _code_bits(v, inverse_scale, bad)
    if GROUP == 0:
        offs = start + tl.arange(0, BLOCK)
        tl.store(q_ptr + offs, bits.to(tl.int8), mask=offs < k)
    else:
        bytes_of_word = tl.reshape(bits & 0xFF, (BLOCK // 4, 4))
        words = tl.sum(bytes_of_word << (24 - 8 * tl.arange(0, 4))[None, :], axis=1)
        WORDS: tl.constexpr = GROUP // 4
        offs = tl.arange(0, BLOCK // 4)
        offs = start // 4 + offs // WORDS * WORDS + (WORDS - 1 - offs % WORDS)
        tl.store(q_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + offs, words, mask=offs < k // 4)


@triton.jit
def quantize_blocks(q_ptr, scale_ptr, a, b, k, GROUP: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr):
    """Rotate a row held as a [BLOCK_A] and b [BLOCK_B] fp32, find its scale, store both; b is ignored for BLOCK_B 0."""
    if GROUP > 0:
        a = rotate_block_reversed(a, BLOCK_A, GROUP)
        if BLOCK_B > 0:
            b = rotate_block_reversed(b, BLOCK_B, GROUP)
    top = tl.max(_magnitude_bits(a), axis=0)
    if BLOCK_B > 0:
        top = tl.maximum(top, tl.max(_magnitude_bits(b), axis=0))
    bad = top >= 0x7F800000
    # 1.27e-28 = 127 * the smallest scale
    amax = tl.maximum(tl.where(bad, 0x3F800000, top).to(tl.float32, bitcast=True), 1.27e-28)
    inverse_scale = tl.math.div_rn(127.0, amax)
    scale = tl.where(bad, float("nan"), tl.math.div_rn(amax, 127.0))
    tl.store(scale_ptr, scale)
    _store_codes(q_ptr, 0, a, k, inverse_scale, bad, BLOCK_A, GROUP)
    if BLOCK_B > 0:
        _store_codes(q_ptr, BLOCK_A, b, k, inverse_scale, bad, BLOCK_B, GROUP)


@triton.jit
def _quantize_rows_kernel(
    x_ptr,
    q_ptr,
    scale_ptr,
    k,
    stride_xm,
    stride_qm,
    ACT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One program per row of x [M, K]. BLOCK_B > 0: BLOCK_A <= k <= BLOCK_A + BLOCK_B; else k <= BLOCK_A."""
    # int64: M * K passes 2**31 at video sizes
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * stride_xm
    q_ptr += row * stride_qm
    a = _load_values(x_ptr, tl.arange(0, BLOCK_A), k, BLOCK_B == 0, ACT)
    if BLOCK_B > 0:
        b = _load_values(x_ptr, BLOCK_A + tl.arange(0, BLOCK_B), k, True, ACT)
    if BLOCK_B == 0:
        b = a
    quantize_blocks(q_ptr, scale_ptr + row, a, b, k, GROUP, BLOCK_A, BLOCK_B)


_launch = Launcher(_quantize_rows_kernel)


def row_blocks(k: int, rotation_group: int) -> tuple[int, int]:
    """Split a row of k values into (BLOCK_A, BLOCK_B), powers of two that cover it; BLOCK_B is 0 when not needed.

    A rotated block must be a whole number of groups.
    """
    least = max(rotation_group, 16)
    block_a = 1 << (k.bit_length() - 1)
    if block_a < least:
        return max(least, triton.next_power_of_2(k)), 0
    rest = k - block_a
    return block_a, max(least, triton.next_power_of_2(rest)) if rest else 0


def row_warps(k: int, rotation_group: int = 0) -> int:
    """Warps per row: 16 to 40 values a thread; more, on fewer warps, when sums cross the lanes of a rotated row."""
    plain = ((1, 768), (2, 1536), (4, 4096), (8, 16384))
    rotated = ((1, 768), (2, 1536), (4, 16384), (8, 32768))
    limits = rotated if rotation_group else plain
    return next((warps for warps, limit in limits if k <= limit), 16)


@functools.lru_cache(maxsize=4096)
def numbers(k: int, stride_xm: int, stride_qm: int, rotation_group: int, input_act: str | None) -> tuple[int, ...]:
    """The kernel's arguments after its three pointers."""
    return (k, stride_xm, stride_qm, ACT_CODES[input_act], rotation_group, *row_blocks(k, rotation_group))


def quantize_rows_triton(x, q, scale, rotation_group: int, input_act: str | None) -> Starter | None:
    """x [M, K] float (or [M, 2K] for "swiglu") with unit column stride -> q [M, K] int8, scale [M] fp32; M > 0.

    q may be a view of a wider buffer; its columns must be contiguous. Returns what starts the same kernel again.
    """
    m, k = q.shape
    rest = numbers(k, x.stride(0), q.stride(0), rotation_group, input_act)
    return _launch(
        m,
        (x.device.index, x.dtype, rest),
        is_aligned(x.data_ptr(), q.data_ptr(), scale.data_ptr()),
        (x, q, scale, *rest),
        # without fused multiply-adds the codes equal the reference; a rotated row is bound by its additions instead
        {"num_warps": row_warps(k, rotation_group), "enable_fp_fusion": rotation_group > 0},
    )
