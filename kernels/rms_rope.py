"""rms_rope: RMSNorm of each head and rotary embedding of q and k, in one pass.

    n = rms_norm(head);  out = (f00 * n0 + f01 * n1, f10 * n0 + f11 * n1) for each pair (n0, n1)

Pairs are (i, i + D / 2) when `split_half`, else (2 i, 2 i + 1). The norm is rounded to the dtype of q; the rotation is a
product, rounded to the dtype of the matrices, and a fused multiply-add, rounded once. The order of additions is that of
PyTorch's CUDA operations (a product, then addcmul), or, `by_lane`, that of a CUDA kernel in which a warp norms and rotates
a head.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device

# heads wider than this would not fit the kernel's one pass
MAX_HEAD_DIM = 512


def rms_rope_torch(
    x: torch.Tensor, freqs: torch.Tensor, weight: torch.Tensor, eps: float, split_half: bool
) -> torch.Tensor:
    """x [B, L, H, D], freqs [B or 1, L, D / 2, 2, 2] -> [B, L, H, D] in the dtype of x, step by step."""
    normed = torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps).to(freqs.dtype)
    first, second = normed.chunk(2, -1) if split_half else (normed[..., ::2], normed[..., 1::2])
    (f00, f01), (f10, f11) = (row.unbind(-1) for row in freqs.unsqueeze(2).unbind(-2))
    out = [torch.addcmul(f00 * first, f01, second)]
    # as PyTorch code in use does: with the diagonal first for halves, with the column first for neighbours
    out += [torch.addcmul(f11 * second, f10, first) if split_half else torch.addcmul(f10 * first, f11, second)]
    return (torch.cat(out, -1) if split_half else torch.stack(out, -1).flatten(-2)).to(x.dtype)


def rms_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    freqs: torch.Tensor,
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    eps: float,
    *,
    split_half: bool,
    by_lane: bool = False,
    rotate_by_lane: bool | None = None,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    implementation: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norm and rotate the heads of q and k.

    Args:
        q, k: [B, L, H, D] float16, bfloat16 or float32 of one dtype, D columns side by side, D a multiple of 4 and at
            most 512; H of both may differ.
        freqs: [B or 1, L, D / 2, 2, 2] float32 or of that dtype, each image's contiguous: the rotation matrix of each pair.
        q_weight, k_weight: [D] of that dtype, contiguous.
        eps: added to the mean of squares.
        split_half: how values pair up.
        by_lane: the order of additions, see above; "triton" only. rotate_by_lane: that of the rotation, if it is another.
        out: where q and k are written, of their shape and dtype with columns side by side; None for new tensors.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        q and k: `out`, or newly made and contiguous.
    Raises:
        UnsupportedInput: a shape or dtype that is not listed here.
    """
    batch, length, _, dim = q.shape if q.dim() == 4 else (0, 0, 0, 0)
    fits = (
        dim
        and dim % 4 == 0
        and dim <= MAX_HEAD_DIM
        and q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and k.dim() == 4
        and (k.shape[0], k.shape[1], k.shape[3]) == (batch, length, dim)
        and q.stride(3) == k.stride(3) == 1
        and freqs.dtype in (torch.float32, q.dtype)
        and freqs[0].is_contiguous()
        and tuple(freqs.shape) in ((batch, length, dim // 2, 2, 2), (1, length, dim // 2, 2, 2))
        and all(w.shape == (dim,) and w.is_contiguous() for w in (q_weight, k_weight))
        and len({q.dtype, k.dtype, q_weight.dtype, k_weight.dtype}) == 1
        and (out is None or all(_alike(*pair) for pair in zip(out, (q, k), strict=True)))
    )
    if not fits:
        raise UnsupportedInput(
            f"rms_rope: q {q.dtype} {tuple(q.shape)}, k {k.dtype} {tuple(k.shape)}, freqs {freqs.dtype} "
            f"{tuple(freqs.shape)}, weights {q_weight.dtype} {tuple(q_weight.shape)} and {k_weight.dtype} "
            f"{tuple(k_weight.shape)}, out {None if out is None else [(t.dtype, tuple(t.shape)) for t in out]}. Needed: heads "
            f"[B, L, H, D] with D a multiple of 4 up to {MAX_HEAD_DIM}, matrices [B or 1, L, D / 2, 2, 2] of float32 or the "
            "dtype of q, weights [D] of that dtype, and out like q and k. Norm and rotate them by themselves instead."
        )
    chosen = choose(detect(q.device), in_features=dim, out_features=dim, implementation=implementation)
    made = out
    if made is None:
        made = (
            torch.empty(q.shape, dtype=q.dtype, device=q.device),
            torch.empty(k.shape, dtype=k.dtype, device=k.device),
        )
    if chosen.implementation == "torch" or not q.numel() or not k.numel():
        for to, x, weight in zip(made, (q, k), (q_weight, k_weight), strict=True):
            to.copy_(rms_rope_torch(x, freqs, weight, eps, split_half))
        return made
    from .rms_rope_triton import rms_rope_triton

    orders = by_lane, by_lane if rotate_by_lane is None else rotate_by_lane
    with on_device(q.device):
        rms_rope_triton(q, k, freqs, q_weight, k_weight, eps, split_half, orders, *made)
    return made


def _alike(out: torch.Tensor, x: torch.Tensor) -> bool:
    return out.shape == x.shape and out.dtype == x.dtype and out.stride(3) == 1 and out.device == x.device
