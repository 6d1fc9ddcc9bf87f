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


@triton.jit
def _product_and_sum(a, b, c, d, like_ptr):
    """a b, rounded to the type that like_ptr points to, + c d, in fp32."""
    return tl.fma(c, d, (a * b).to(like_ptr.dtype.element_ty).to(tl.float32))


@triton.jit(do_not_specialize=["length", "q_heads", "k_heads", "stride_freqs"])
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
    stride_freqs,
    stride_qb,
    stride_ql,
    stride_qh,
    stride_kb,
    stride_kl,
    stride_kh,
    stride_q_outb,
    stride_q_outl,
    stride_q_outh,
    stride_k_outb,
    stride_k_outl,
    stride_k_outh,
    SPLIT_HALF: tl.constexpr,
    BY_LANE: tl.constexpr,
    ROTATE_BY_LANE: tl.constexpr,
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
        out_ptr = q_out_ptr + image * stride_q_outb + place * stride_q_outl + first * stride_q_outh
        weight_ptr, stride, stride_out = q_weight_ptr, stride_qh, stride_q_outh
    else:
        heads, first = k_heads, (part - q_parts) * HEADS
        x_ptr = k_ptr + image * stride_kb + place * stride_kl + first * stride_kh
        out_ptr = k_out_ptr + image * stride_k_outb + place * stride_k_outl + first * stride_k_outh
        weight_ptr, stride, stride_out = k_weight_ptr, stride_kh, stride_k_outh
    pair = tl.arange(0, HALF)
    inside = pair < D // 2
    freqs_ptr += image * stride_freqs + place * (2 * D) + pair * 4
    f00 = tl.load(freqs_ptr, mask=inside, other=0.0).to(tl.float32)
    f01 = tl.load(freqs_ptr + 1, mask=inside, other=0.0).to(tl.float32)
    f10 = tl.load(freqs_ptr + 2, mask=inside, other=0.0).to(tl.float32)
    f11 = tl.load(freqs_ptr + 3, mask=inside, other=0.0).to(tl.float32)
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
        if ROTATE_BY_LANE:
            out_0 = _product_and_sum(f01, x_1, f00, x_0, freqs_ptr)
        else:
            out_0 = _product_and_sum(f00, x_0, f01, x_1, freqs_ptr)
        if ROTATE_BY_LANE or SPLIT_HALF:
            out_1 = _product_and_sum(f11, x_1, f10, x_0, freqs_ptr)
        else:
            out_1 = _product_and_sum(f10, x_0, f11, x_1, freqs_ptr)
        tl.store(out_ptr + at_0, out_0.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(out_ptr + at_1, out_1.to(out_ptr.dtype.element_ty), mask=inside)
        x_ptr += stride
        out_ptr += stride_out


_launch = Launcher(_rms_rope_kernel)


def rms_rope_triton(q, k, freqs, q_weight, k_weight, eps: float, split_half: bool, orders: tuple, q_out, k_out) -> None:
    """q, k [B, L, H, D] with D side by side, freqs [B or 1, L, D / 2, 2, 2] -> q_out, k_out of their shapes; not empty.

    orders: whether the norm and the rotation add up by lane.
    """
    batch, length, q_heads, dim = q.shape
    k_heads = k.shape[2]
    parts = -(-q_heads // HEADS_PER_PROGRAM) + -(-k_heads // HEADS_PER_PROGRAM)
    strides = [stride for t in (q, k, q_out, k_out) for stride in t.stride()[:3]]
    constants = (split_half, *orders, dim, triton.next_power_of_2(dim // 2), HEADS_PER_PROGRAM)
    tensors = (q, k, freqs, q_weight, k_weight, q_out, k_out)
    _launch(
        batch * length * parts,
        (q.device.index, q.dtype, freqs.dtype, eps, *strides, constants),
        is_aligned(*[t.data_ptr() for t in tensors]),
        (*tensors, eps, length, q_heads, k_heads, freqs.stride(0) if len(freqs) > 1 else 0, *strides, *constants),
        # the multiply-adds that are fused are written out
        {"num_warps": 1, "enable_fp_fusion": False},
    )
