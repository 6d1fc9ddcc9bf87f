"""The norm and rope of q and k for blocks that run fused: one pass of ours in place of comfy_kitchen's.

ComfyUI asks comfy_kitchen for it by name. Its plain PyTorch backend makes a dozen passes in fp32, and its CUDA kernel is
there for CUDA 13 and newer only. Ours is rounded as the plain one; at 4352 rows of 18 heads of 256 values an H200 takes
60 us for it, 126 us with comfy_kitchen's CUDA kernel and 749 us with plain PyTorch (tests/bench/block_fusion.py). It
declines outside of fused runs.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

import torch

from ....kernels import choose, detect
from ....kernels import rms_rope as rms_rope_of
from ....kernels.dispatch import Int8Error
from ....kernels.rms_rope import MAX_HEAD_DIM

KEYS = frozenset({"q", "k", "freqs_cis", "q_scale", "k_scale", "epsilon", "rot_dim"})

_thread = threading.local()


@contextlib.contextmanager
def inside():
    """Let this thread's calls of comfy_kitchen come here."""
    outer = getattr(_thread, "on", False)
    _thread.on = True
    try:
        yield
    finally:
        _thread.on = outer


def refusal(function: str, kwargs: Mapping[str, Any]) -> str | None:
    """None if the call can run here, else one sentence."""
    if not kwargs:
        return None
    if not getattr(_thread, "on", False):
        return "the MODEL does not run fused"
    if not kwargs.keys() <= KEYS:
        return f"an argument of {function} is not known here: {', '.join(kwargs.keys() - KEYS)}"
    return _unfit(kwargs)


def _unfit(kwargs: Mapping[str, Any]) -> str | None:
    q, k, freqs = kwargs["q"], kwargs["k"], kwargs["freqs_cis"]
    weights = [kwargs["q_scale"], kwargs.get("k_scale")]
    weights = [weights[0] if weight is None else weight for weight in weights]
    if any(type(t) not in (torch.Tensor, torch.nn.Parameter) or t.device != q.device for t in (q, k, freqs, *weights)):
        return "not all arguments are plain tensors on one device"
    if any(t.requires_grad for t in (q, k)):
        return "q or k requires a gradient"
    dim = q.shape[-1]
    if q.dim() != 4 or k.dim() != 4 or q.shape[:2] != k.shape[:2] or k.shape[3] != dim or dim % 4 or dim > MAX_HEAD_DIM:
        return f"q is {tuple(q.shape)} and k {tuple(k.shape)}"
    if any(t.dtype != q.dtype for t in (k, *weights)) or q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"q is {q.dtype}, k {k.dtype}, the norms' weights {weights[0].dtype} and {weights[1].dtype}"
    if any(t.shape != (dim,) or not t.is_contiguous() for t in weights) or q.stride(3) != 1 or k.stride(3) != 1:
        return "a norm's weight is not one value per column"
    shapes = [(batch, q.shape[1], 1, dim // 2, 2, 2) for batch in (1, q.shape[0])]
    if tuple(freqs.shape) not in shapes or freqs.dtype != torch.float32 or not freqs.is_contiguous():
        return f"the frequencies are {freqs.dtype} {tuple(freqs.shape)}"
    if kwargs.get("rot_dim") not in (None, 0, dim):
        return "only a part of each head is rotated"
    try:
        chosen = choose(detect(q.device), in_features=dim, out_features=dim)
    except Int8Error as error:
        return str(error)
    return None if chosen.implementation == "triton" else "plain PyTorch is as good as the host's own"


def rms_rope_split_half(q, k, freqs_cis, q_scale, k_scale=None, epsilon=1e-6, rot_dim=0):
    """q, k [B, L, H, D] normed and rotated by freqs_cis [B or 1, L, 1, D / 2, 2, 2], pairs half a head apart."""
    return _run(q, k, freqs_cis, q_scale, k_scale, epsilon, True)


def rms_rope(q, k, freqs_cis, q_scale, k_scale=None, epsilon=1e-6):
    """The same for pairs that lie side by side."""
    return _run(q, k, freqs_cis, q_scale, k_scale, epsilon, False)


def _run(q, k, freqs, q_weight, k_weight, eps, split_half):
    k_weight = q_weight if k_weight is None else k_weight
    like_host = {"split_half": split_half, "by_lane": _host_has_a_kernel()}
    return rms_rope_of(q, k, freqs[:, :, 0], q_weight, k_weight, float(eps), **like_host)


def _host_has_a_kernel() -> bool:
    """Whether comfy_kitchen would run its CUDA kernel, whose order of additions is another than its plain PyTorch's."""
    from comfy_kitchen.registry import registry

    return registry.is_available("cuda")


FUNCTIONS = {"rms_rope": rms_rope, "rms_rope_split_half": rms_rope_split_half}
