"""One warp norms and rotates a few heads of one token, so that the token's rotation matrices are read once for them.

A warp needs no barrier for the sum of squares, and all its loads are under way at once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .launch import Launcher, is_aligned
from .residual_norm_triton import inverse_rms

HEADS_PER_PROGRAM = 6


@triton.jit
def _inverse_rms_by_lane(x_ptr, eps, D: tl.constexpr):
    """1 / sqrt(mean(x^2) + eps): each lane adds up every 32nd value, then a tree over the lanes."""
    offs = tl.arange(0, 32)
    acc = tl.zeros((32,), dtype=tl.float32)
    for chunk in tl.static_range((D + 31) // 32):
        v = tl.load(x_ptr + chunk * 32 + offs, mask=chunk * 32 + offs < D, other=0.0).to(tl.float32)
        acc = acc + v * v
    # lanes that are 16, 8, 4, 2, 1 apart
    acc = tl.sum(tl.reshape(acc, (2, 16)), axis=0)
    acc = tl.sum(tl.reshape(acc, (2, 8)), axis=0)
    acc = tl.sum(tl.reshape(acc, (2, 4)), axis=0)
    acc = tl.sum(tl.reshape(acc, (2, 2)), axis=0)
    return tl.rsqrt(tl.math.div_rn(tl.sum(acc, axis=0), D * 1.0) + eps)


@triton.jit(do_not_specialize=["length", "q_heads", "k_heads", "freqs_batch"])
def _rms_rope_kernel(
    q_ptr,
    k_ptr,
    freqs_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    eps,
    length,
    q_heads,
    k_heads,
    freqs_batch,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    SPLIT_HALF: tl.constexpr,
    BY_LANE: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
    HEADS: tl.constexpr,
):
    """A program takes HEADS heads of one token, first those of q, then those of k. HALF >= D / 2, a power of two."""
    q_parts = (q_heads + HEADS - 1) // HEADS
    parts = q_parts + (k_heads + HEADS - 1) // HEADS
    # int64: B * L * H * D passes 2**31 at video sizes
    token = (tl.program_id(0) // parts).to(tl.int64)
    part = tl.program_id(0) % parts
    image = token // length
    place = token % length
    if part < q_parts:
        heads, first = q_heads, part * HEADS
        x_ptr = q_ptr + image * stride_qb + place * stride_ql + first * stride_qh
        out_ptr = q_out_ptr + (token * q_heads + first) * D
        weight_ptr, stride = q_weight_ptr, stride_qh
    else:
        heads, first = k_heads, (part - q_parts) * HEADS
        x_ptr = k_ptr + image * stride_kb + place * stride_kl + first * stride_kh
        out_ptr = k_out_ptr + (token * k_heads + first) * D
        weight_ptr, stride = k_weight_ptr, stride_kh
    pair = tl.arange(0, HALF)
    inside = pair < D // 2
    freqs_ptr += (image % freqs_batch * length + place) * (2 * D) + pair * 4
    f00 = tl.load(freqs_ptr, mask=inside, other=0.0)
    f01 = tl.load(freqs_ptr + 1, mask=inside, other=0.0)
    f10 = tl.load(freqs_ptr + 2, mask=inside, other=0.0)
    f11 = tl.load(freqs_ptr + 3, mask=inside, other=0.0)
    at_0 = pair if SPLIT_HALF else 2 * pair
    at_1 = pair + D // 2 if SPLIT_HALF else 2 * pair + 1
    weight_0 = tl.load(weight_ptr + at_0, mask=inside, other=0.0).to(tl.float32)
    weight_1 = tl.load(weight_ptr + at_1, mask=inside, other=0.0).to(tl.float32)
    for _ in range(0, tl.minimum(HEADS, heads - first)):
        inverse = _inverse_rms_by_lane(x_ptr, eps, D) if BY_LANE else inverse_rms(x_ptr, eps, D)
        x_0 = tl.load(x_ptr + at_0, mask=inside, other=0.0).to(tl.float32)
        x_1 = tl.load(x_ptr + at_1, mask=inside, other=0.0).to(tl.float32)
        # the norm's output is rounded before the rotation
        x_0 = (weight_0 * (inverse * x_0)).to(out_ptr.dtype.element_ty).to(tl.float32)
        x_1 = (weight_1 * (inverse * x_1)).to(out_ptr.dtype.element_ty).to(tl.float32)
        # which of the two products is rounded before they are added
        out_0 = tl.fma(f00, x_0, f01 * x_1) if BY_LANE else tl.fma(f01, x_1, f00 * x_0)
        out_1 = tl.fma(f10, x_0, f11 * x_1) if BY_LANE or SPLIT_HALF else tl.fma(f11, x_1, f10 * x_0)
        tl.store(out_ptr + at_0, out_0.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + at_1, out_1.to(out_ptr.dtype.element_ty), mask=inside)
        x_ptr += stride
        out_ptr += D


_launch = Launcher(_rms_rope_kernel)


def rms_rope_triton(q, k, freqs, q_weight, k_weight, eps: float, split_half: bool, by_lane: bool, q_out, k_out) -> None:
    """q, k [B, L, H, D] with D side by side, freqs [B or 1, L, D / 2, 2, 2] fp32 -> q_out, k_out contiguous; not empty."""
    batch, length, q_heads, dim = q.shape
    k_heads = k.shape[2]
    parts = -(-q_heads // HEADS_PER_PROGRAM) + -(-k_heads // HEADS_PER_PROGRAM)
    strides = (*q.stride()[:3], *k.stride()[:3])
    constants = (split_half, by_lane, dim, triton.next_power_of_2(dim // 2), HEADS_PER_PROGRAM)
    tensors = (q, k, freqs, q_weight, k_weight, q_out, k_out)
    _launch(
        batch * length * parts,
        (q.device.index, q.dtype, eps, strides, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, eps, length, q_heads, k_heads, freqs.shape[0], *strides, *constants),
        # the multiply-adds that are fused are written out
        {"num_warps": 1, "enable_fp_fusion": False},
    )
