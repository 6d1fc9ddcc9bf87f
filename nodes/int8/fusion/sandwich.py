"""Blocks with a norm before and after attention and feed-forward, and tanh gates: Ideogram 4, Z-Image, Lumina 2.

    h  = x + tanh(g1) * norm2(attention(norm1(x) * (1 + s1)))
    x' = h + tanh(g2) * norm4(w2(silu(w1(u)) * w3(u)))           with u = norm3(h) * (1 + s2)

The unfused block reads and writes a tensor of the size of x some thirty times; fused, it is norm1 to the codes of qkv,
from attention's output to the codes of w1 and w3, SiLU to the codes of w2, and the last addition. Attention itself, with
its rope and its output Linear, is the host's own method.
"""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.quantize_swiglu import quantize_swiglu
from ....kernels.residual_norm import Branch, Norm, modulated_norm_torch, residual_norm
from .. import short_way
from ..shared_rows import Given
from .guards import Watched, affine, release, why_reads_more, why_unknown

NORMS = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
FEED_FORWARD = "comfy.ldm.lumina.model.FeedForward"
# the host's methods that are repeated here, as they were when this was written
KNOWN_FEED_FORWARD = {
    "forward": frozenset({"2a391b2b74c7b711"}),
    "_forward_silu_gating": frozenset({"37616c6cdf6f7e74"}),
}


class SandwichBlock:
    """The fused form of one block. A subclass knows its host class: `known`, `modulation` and the signature of `forward`.

    name: the architecture, for reports. known: methods of the host's block that are repeated here -> fingerprints.
    modulation: the child that makes the four modulation vectors.
    """

    name = ""
    known: ClassVar[dict[str, frozenset[str]]] = {}
    modulation = ""

    __slots__ = ("_module", "_norms", "_watched")

    def __init__(self, module: torch.nn.Module):
        attention, feed_forward = module.attention, module.feed_forward
        self._module = module
        self._norms = [getattr(module, name) for name in NORMS]
        linears = (attention.qkv, feed_forward.w1, feed_forward.w2, feed_forward.w3)
        repeated = (module, attention, feed_forward, *self._norms)
        self._watched = Watched(
            parents=(module, attention, feed_forward),
            modules=(attention, feed_forward, *self._norms, *linears),
            methods=(
                *((type(part), "forward") for part in repeated),
                (type(feed_forward), "_forward_silu_gating"),
                *self.functions(),
            ),
        )

    @classmethod
    def functions(cls) -> tuple:
        """The host's functions that its block calls and that are repeated here, as (module, name)."""
        return ()

    @classmethod
    def of(cls, module: torch.nn.Module) -> SandwichBlock | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        children = ("attention", "feed_forward", *NORMS, cls.modulation)
        missing = [name for name in children if not isinstance(module._modules.get(name), torch.nn.Module)]
        if missing:
            return f"a block has no {' and no '.join(missing)}"
        attention, feed_forward = module.attention, module.feed_forward
        kind = type(feed_forward)
        if f"{kind.__module__}.{kind.__qualname__}" != FEED_FORWARD:
            return f"the feed-forward of a block is a {kind.__qualname__}"
        reason = (
            why_unknown(type(module), cls.known)
            or why_unknown(kind, KNOWN_FEED_FORWARD)
            or why_reads_more(type(attention), "forward", "x", "qkv")
        )
        if reason is not None:
            return reason
        for name in NORMS:
            norm = getattr(module, name)
            if type(norm).__module__ != "comfy.ops" or type(norm).__name__ != "RMSNorm" or norm.eps is None:
                return f"{name} is a {type(norm).__name__}"
        linears = (attention.qkv, feed_forward.w1, feed_forward.w2, feed_forward.w3)
        if not all(short_way.is_known(linear) for linear in linears):
            return "one of qkv, w1, w2 and w3 is not INT8"
        return cls(module)

    def kernels(self, device: torch.device) -> tuple | None:
        """What decides which machine code the block needs on `device`: equal for equal blocks; None without its weights."""
        attention, feed_forward = self._module.attention, self._module.feed_forward
        kinds = [
            short_way.static_kind(linear, device)
            for linear in (attention.qkv, feed_forward.w1, feed_forward.w3, feed_forward.w2)
        ]
        return None if None in kinds else (type(self), *kinds)

    def warm_up(self, kinds: tuple, dtype: torch.dtype) -> int:
        """Compile, and launch once, the kernels of `kernels`; returns how many."""
        device, implementation, width = kinds[1][:3]
        if implementation != "triton":
            return 0

        def zeros(*shape):
            return torch.zeros(shape, dtype=dtype, device=device)

        x, modulation, weight = zeros(1, 2, width), zeros(1, 4, width), zeros(width)
        gate = torch.tanh(modulation[:, 1::2])[:, 0]
        halves = [Norm(weight, norm.eps, modulation[:, 0]) for norm in self._norms]
        ends = [Branch(x, weight, norm.eps, gate) for norm in self._norms]
        residual_norm(x, None, halves[0], **_static(kinds[1]))
        residual_norm(x, ends[1], halves[2], **_static(kinds[2]))
        residual_norm(x, ends[3], implementation=implementation)
        hidden = zeros(2, kinds[4][2])
        quantize_swiglu(hidden, hidden, **_static(kinds[4]))
        return 4

    def _fused(self, run, x, adaln_input, attend) -> torch.Tensor | str:
        """The block's output, or one sentence that says why it must run unfused; nothing was changed then.

        Args:
            attend: calls the host's attention with the tensor it is given in place of its input.
        """
        reason = self._watched.why_foreign() or _unfit(x)
        if reason is not None:
            return reason
        attention, feed_forward = self._module.attention, self._module.feed_forward
        linears = (attention.qkv, feed_forward.w1, feed_forward.w3, feed_forward.w2)
        kinds = [short_way.rows_kind(linear, x.device) for linear in linears]
        if None in kinds:
            return "another pack replaced what one of qkv, w1, w2 and w3 multiplies with"
        if kinds[1] != kinds[2]:
            return "w1 and w3 are quantised differently"
        weights = []
        try:
            for norm in self._norms:
                weights.append(affine(norm, x))
                if isinstance(weights[-1], str):
                    return weights.pop()
            made = self._module._modules[self.modulation](adaln_input)
            modulation = _rows_of(made, x)
            if modulation is None:
                return f"the modulation is {made.dtype} {tuple(made.shape)} beside {x.dtype} {tuple(x.shape)}"
            return self._run(run, x, modulation, attend, [weight for weight, _ in weights], kinds)
        finally:
            for _, borrowed in weights:
                release(borrowed)

    def _run(self, run, x, modulation, attend, weights, kinds) -> torch.Tensor | str:
        feed_forward, shared = self._module.feed_forward, run.shared
        norms = [(weight, norm.eps) for weight, norm in zip(weights, self._norms, strict=True)]
        gates = torch.tanh(modulation[:, 1::2])
        first, second = Norm(*norms[0], modulation[:, 0]), Norm(*norms[2], modulation[:, 2])

        _, rows = residual_norm(x, None, first, **_static(kinds[0]))
        given = shared.given = Given(x, rows, kinds[0], lambda: _normed(x, first))
        y = attend(x)
        if given.used != 1:
            return "qkv did not take the rows that were made for it"
        del rows, given

        h, rows = residual_norm(x, Branch(y.contiguous(), *norms[1], gates[:, 0]), second, **_static(kinds[1]))
        given = shared.given = Given(h, rows, kinds[1], lambda: _normed(h, second))
        gate, up = feed_forward.w1(h), feed_forward.w3(h)
        if given.used != 2:
            return "w1 and w3 did not take the rows that were made for them"
        del rows, given, y

        rows = quantize_swiglu(gate, up, **_static(kinds[3]))
        given = shared.given = Given(gate, rows, kinds[3], lambda: feed_forward._forward_silu_gating(gate, up))
        y = feed_forward.w2(gate)
        shared.given = None
        if given.used != 1:
            return "w2 did not take the rows that were made for it"
        last = Branch(y.contiguous(), *norms[3], gates[:, 1])
        return residual_norm(h, last, implementation=kinds[3][1])[0]


def _static(kind: tuple) -> dict:
    return {"rotation_group": kind[3], "implementation": kind[1]}


def _unfit(x: torch.Tensor) -> str | None:
    import comfy.model_management

    if type(x) is not torch.Tensor or x.dim() != 3 or not x.is_contiguous() or not x.numel():
        return "the input is no plain tensor of tokens"
    # the host clamps float16 in between
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"the input is {x.dtype}"
    if x.requires_grad or comfy.model_management.in_training:
        return "the MODEL is in training"
    return None


def _rows_of(modulation: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """[B, 4 K] or [B, 1 or L, 4 K] as [rows, 4, K]: one row for all, for each image or for each token; None for others."""
    batch, tokens, width = x.shape
    leading = tuple(modulation.shape[:-1])
    if leading not in ((1,), (batch,), (1, 1), (batch, 1), (batch, tokens)) or modulation.shape[-1] != 4 * width:
        return None
    if modulation.dtype != x.dtype or modulation.device != x.device:
        return None
    return modulation.reshape(-1, 4, width)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return modulated_norm_torch(x.view(-1, x.shape[-1]), norm).view(x.shape)
