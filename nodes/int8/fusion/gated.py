"""The fused form of blocks with two gated branches, attention and a SwiGLU feed-forward.

    h  = x + g1 * n2(attention(n1(x) * (1 + s1) + b1))
    x' = h + g2 * n4(down(silu(gate(u)) * up(u)))           with u = n3(h) * (1 + s2) + b2

The norms n2 and n4 and the shifts b1 and b2 are not in every architecture. The unfused block reads and writes a tensor of
the size of x some thirty times; fused, it is n1 to the codes of the attention's Linears, from attention's output to the
codes of gate and up, SiLU to the codes of down, and the last addition. Attention itself, with its rope and its output
Linear, is the host's own method.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from ....kernels.residual_norm import Branch, Norm, residual_norm
from .. import short_way
from .feed_forward import FeedForward
from .guards import Watched, release, why_reads_more, why_unknown
from .pieces import begin, called, kinds_of, options, owner, why_not_int8, why_unfit


class Ending(NamedTuple):
    """A branch without its output: the weight of its norm or None, eps, gate [B, K]."""

    weight: torch.Tensor | None
    eps: float
    gate: torch.Tensor


class Vectors(NamedTuple):
    """What the four passes of a block take beside the activations."""

    first: Norm
    attention: Ending
    second: Norm
    feed_forward: Ending


class GatedBlock:
    """The fused form of one block of the host. A subclass fills in what follows, `vectors` and the signature of `forward`.

    name: the architecture, for reports. known: functions of the host that are repeated here, as (child or "" for the block
    or a Python module, name) -> fingerprints. parts: the children that are attention and feed-forward. readers: Linears of
    attention that read its input. swiglu: gate, up and down of the feed-forward. norms: children whose forward is repeated.
    """

    name = ""
    # whether torch.compile can trace `forward`, which tests show
    traceable = False
    known: ClassVar[dict[tuple[str, str], str]] = {}
    parts: ClassVar[tuple[str, str]]
    readers: ClassVar[tuple[str, ...]]
    swiglu: ClassVar[tuple[str, str, str]]
    norms: ClassVar[tuple[str, ...]]

    __slots__ = ("_attention", "_feed", "_linears", "_module", "watched")

    def __init__(self, module: torch.nn.Module):
        self._module = module
        attention, feed_forward = [module._modules[name] for name in self.parts]
        self._attention = attention
        gate, up, down = [feed_forward._modules[name] for name in self.swiglu]
        self._feed = FeedForward((gate, up), down)
        self._linears = [*(attention._modules[name] for name in self.readers), gate, up, down]
        norms = [module._modules[name] for name in self.norms]
        self.watched = Watched(
            parents=(module, attention, feed_forward),
            modules=(attention, feed_forward, *norms, *self._linears),
            methods=(
                *((type(part), "forward") for part in (module, attention, feed_forward, *norms)),
                *((owner(module, where), name) for where, name in self.known),
            ),
        )

    @classmethod
    def of(cls, module: torch.nn.Module) -> GatedBlock | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        parts = [module._modules.get(name) for name in cls.parts]
        missing = [name for name, part in zip(cls.parts, parts, strict=True) if part is None]
        missing += [name for name in cls.norms if module._modules.get(name) is None]
        if missing:
            return f"a block has no {' and no '.join(missing)}"
        for (where, name), fingerprint in cls.known.items():
            reason = why_unknown(owner(module, where), {name: frozenset({fingerprint})})
            if reason is not None:
                return reason
        reason = why_reads_more(type(parts[0]), "forward", "x", cls.readers)
        if reason is not None:
            return reason
        names = ((parts[0], cls.readers), (parts[1], cls.swiglu))
        linears = [(name, part._modules.get(name)) for part, children in names for name in children]
        return why_not_int8(linears) or cls(module)

    def vectors(self, x: torch.Tensor, condition, borrowed: list) -> Vectors | str:
        """The norms' weights and the modulation for the input x, or one sentence that says why they do not fit.

        Args:
            condition: what the host's block modulates with.
            borrowed: gets what `release` must be told afterwards.
        """
        raise NotImplementedError

    def kernels(self, device: torch.device) -> tuple | None:
        """What decides which machine code the block needs on `device`: equal for equal blocks; None without its weights."""
        kinds = [short_way.static_kind(linear, device) for linear in self._linears]
        return None if None in kinds else (type(self), *kinds)

    def warm_up(self, kinds: tuple, dtype: torch.dtype) -> int:
        """Compile, and launch once, the kernels of `kernels`; returns how many."""
        reader, gate = kinds[1], kinds[-3]
        if reader[1] != "triton":
            return 0
        x = torch.zeros((1, 2, reader[2]), dtype=dtype, device=reader[0])
        # the weights may lie elsewhere now, and are not needed
        vectors = self.zeros(x)
        residual_norm(x, None, vectors.first, **options(reader))
        residual_norm(x, Branch(x, *vectors.attention), vectors.second, **options(gate))
        residual_norm(x, Branch(x, *vectors.feed_forward), implementation=gate[1])
        return 3 + self._feed.warm_up([gate, kinds[-1]], dtype)

    def zeros(self, x: torch.Tensor) -> Vectors:
        """Vectors like those of `vectors`, made of zeros."""
        raise NotImplementedError

    def fused(self, run, x, condition, attend) -> torch.Tensor | str:
        """The block's output, or one sentence that says why it must run unfused; nothing was changed then.

        Args:
            attend: calls the host's attention with the tensor it is given in place of its input.
        """
        reason = self.watched.why_foreign() or why_unfit(x)
        if reason is not None:
            return reason
        kinds = kinds_of((self._linears[:-3], self._feed.first, (self._feed.last,)), x.device)
        if isinstance(kinds, str):
            return kinds
        borrowed: list = []
        try:
            found = self.vectors(x, condition, borrowed)
            return found if isinstance(found, str) else self._run(run, x, found, attend, kinds)
        finally:
            for loan in borrowed:
                release(loan)

    def _run(self, run, x, vectors, attend, kinds) -> torch.Tensor | str:
        first, second = vectors.first, vectors.second
        _, rows, make = begin(self._linears[: len(self.readers)], x, None, first, kinds[0])
        y = called(run, attend, len(self.readers), x, rows, kinds[0], make)
        if isinstance(y, str):
            return y
        del rows, make

        branch = Branch(y.contiguous(), *vectors.attention)
        h, rows, make = begin(self._feed.first, x, branch, second, kinds[1])
        y = self._feed(run, h, rows, kinds[1:], make)
        if isinstance(y, str):
            return y
        return residual_norm(h, Branch(y.contiguous(), *vectors.feed_forward), implementation=kinds[1][1])[0]
