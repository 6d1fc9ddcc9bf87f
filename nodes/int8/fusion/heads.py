"""q and k of the attention of fused blocks: norm, rope and the joining of streams in one pass.

The host makes q and k contiguous, norms them, joins the streams and rotates the result, each in a pass of its own. Here
each stream's heads go from what its Linear gave to their place in the joint tensor at once, rounded after the norm and
after the rotation as the host's are. The joint tensors lie in memory by token, [B, L, H, D], which attention takes as well.
"""

from __future__ import annotations

import functools

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ....kernels import choose, detect, rms_rope
from ....kernels.rms_rope import MAX_HEAD_DIM
from .guards import Watched, affine, release


class Heads:
    """The norms of q and k of one block.

    Args:
        norms: the RMSNorms of q and k for each stream, in the order in which the streams are joined.
        holders: modules of the host around them whose forward is repeated.
        functions: (Python module, name) of host functions that rotate.
    """

    __slots__ = ("_norms", "_watched")

    def __init__(self, norms: list[tuple], holders: list[torch.nn.Module], functions: list[tuple]):
        self._norms = norms
        modules = [*holders, *(norm for pair in norms for norm in pair)]
        methods = [*functions, *((kind, "forward") for kind in set(map(type, modules)))]
        self._watched = Watched(holders, modules, methods)

    def joint(self, parts: list[tuple], turns: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor] | None:
        """q and k of all streams, normed and rotated; None where the host's own code must run, as it was.

        Args:
            parts: q and k [B, L, H, D] of each stream, columns side by side.
            turns: [B or 1, 1, all L, D / 2, 2, 2] float32 or the dtype of q.
        Returns:
            q and k [B, H, all L, D], views of [B, all L, H, D].
        """
        like = parts[0][0]
        length = sum(q.shape[1] for q, _ in parts)
        by_lane = _order(like, turns, length)
        if by_lane is None or self._watched.why_foreign() is not None:
            return None
        loans, found = [], []
        try:
            for pair in self._norms:
                weights = [affine(norm, like) for norm in pair]
                loans += [weight[1] for weight in weights if not isinstance(weight, str)]
                eps = {_eps(norm, like) for norm in pair}
                if any(isinstance(weight, str) for weight in weights) or len(eps) > 1 or None in eps:
                    return None
                found.append((*(weight[0] for weight in weights), eps.pop()))
            batch, _, heads, dim = like.shape
            joint = [torch.empty((batch, length, heads, dim), dtype=like.dtype, device=like.device) for _ in "qk"]
            start, options = 0, {"split_half": False, "rotate_by_lane": by_lane}
            for (q, k), own in zip(parts, found, strict=True):
                part = slice(start, start + q.shape[1])
                rms_rope(q, k, turns[:, 0, part], *own, **options, out=tuple(t[:, part] for t in joint))
                start = part.stop
            return tuple(t.transpose(1, 2) for t in joint)
        finally:
            for loan in loans:
                release(loan)


def is_rms_norm(norm: torch.nn.Module | None) -> bool:
    """Whether it is the host's RMSNorm over the last dimension."""
    return type(norm).__module__ == "comfy.ops" and type(norm).__name__ == "RMSNorm" and len(norm.normalized_shape) == 1


def _order(like: torch.Tensor, turns: torch.Tensor | None, length: int) -> bool | None:
    """Whether the host's rotation adds up by lane; None when it cannot be repeated here."""
    if type(turns) is not torch.Tensor or type(like) is not torch.Tensor:
        return None
    batch, _, _, dim = like.shape
    shapes = [(images, 1, length, dim // 2, 2, 2) for images in (1, batch)]
    fits = tuple(turns.shape) in shapes and turns.is_contiguous() and turns.device == like.device
    fits = fits and turns.dtype in (torch.float32, like.dtype) and dim % 4 == 0 and dim <= MAX_HEAD_DIM
    if not fits or choose(detect(like.device), in_features=dim, out_features=dim).implementation != "triton":
        return None
    from comfy_kitchen.registry import registry

    if registry.is_available("cuda"):
        return True
    if registry.is_available("triton"):
        # how its compiler rounds products of half precision is not known
        return True if turns.dtype == torch.float32 else None
    return False


def _eps(norm: torch.nn.Module, like: torch.Tensor) -> float | None:
    return _default_eps(like.dtype, like.device) if norm.eps is None else norm.eps


@functools.cache
def _default_eps(dtype: torch.dtype, device: torch.device) -> float | None:
    """What rms_norm adds when no eps is given, which depends on the version of PyTorch; None when it is neither guess."""
    guesses = (torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    # asked once and no part of the model: what watches a forward, such as for a CUDA graph, need not see it
    with _disable_current_modes():
        x = torch.full((1, 8), 2.0**-8, dtype=dtype, device=device)
        expected = torch.nn.functional.rms_norm(x, (8,))
        found = [torch.equal(torch.nn.functional.rms_norm(x, (8,), None, eps), expected) for eps in guesses]
    return next((eps for eps, equal in zip(guesses, found, strict=True) if equal), None)
