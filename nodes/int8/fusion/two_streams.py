"""The fused form of blocks in which an image and a text stream attend together.

For each stream, with n a LayerNorm without weights:

    h  = x + g1 * out(attention(n(x) * (1 + s1) + b1))
    x' = h + g2 * feed_forward(n(h) * (1 + s2) + b2)

Fused, it is n to the codes of the Linears of q, k and v, from attention's output to the codes of the feed-forward's first
Linear, its activation to the codes of its last, and the last addition. What lies between q, k and v and the output Linears
is the host's code, repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ....kernels.residual_norm import Branch, Norm, residual_norm
from .. import short_way
from .feed_forward import FeedForward
from .guards import Watched
from .pieces import begin, kinds_of, options, read, why_unfit


class Modulation(NamedTuple):
    """What modulates one branch: [rows, K] each, as `pieces.by_row` gives them."""

    shift: torch.Tensor
    scale: torch.Tensor
    gate: torch.Tensor


class Stream(NamedTuple):
    """The children of a block that one stream runs through.

    norms: before attention and before the feed-forward. readers: the Linears that read the first. one_rounding: whether
    the host adds attention and feed-forward with torch.addcmul.
    """

    norms: tuple[torch.nn.Module, torch.nn.Module]
    readers: tuple[torch.nn.Module, ...]
    feed: FeedForward
    one_rounding: tuple[bool, bool]

    @property
    def groups(self) -> tuple[tuple[torch.nn.Module, ...], ...]:
        """The Linears that read one tensor each."""
        return self.readers, self.feed.first, (self.feed.last,)


def layer_norm(norm: torch.nn.Module, modulation: Modulation) -> Norm:
    """A LayerNorm of the host without weights and the torch.addcmul after it, as residual_norm takes them."""
    return Norm(None, norm.eps, modulation.scale, modulation.shift, centred=True, one_rounding=True)


def why_no_layer_norm(norm: torch.nn.Module | None) -> str | None:
    """None for the host's LayerNorm without weights over the last dimension."""
    known = type(norm).__module__ == "comfy.ops" and type(norm).__name__ == "LayerNorm"
    if not known or norm.weight is not None or norm.bias is not None or len(norm.normalized_shape) != 1:
        return f"a norm of a block is a {type(norm).__name__} that is not known"
    return None


class TwoStreams:
    """The fused form of one block; the methods `of` and `forward` are the subclass's.

    Args:
        module: the block. streams: of image and text. watched: what must stay as it is for the block to run fused.
    """

    name = ""

    __slots__ = ("_module", "_streams", "_watched")

    def __init__(self, module: torch.nn.Module, streams: tuple[Stream, Stream], watched: Watched):
        self._module, self._streams, self._watched = module, streams, watched

    def kernels(self, device: torch.device) -> tuple | None:
        """What decides which machine code the block needs on `device`: equal for equal blocks; None without its weights."""
        linears = [group[0] for stream in self._streams for group in stream.groups]
        kinds = [short_way.static_kind(linear, device) for linear in linears]
        return None if None in kinds else (type(self), *kinds)

    def warm_up(self, kinds: tuple, dtype: torch.dtype) -> int:
        """Compile, and launch once, the kernels of `kernels`; returns how many."""
        parts = zip(self._streams, (kinds[1:4], kinds[4:]), strict=True)
        needed = {(own, stream.one_rounding): stream for stream, own in parts if own[0][1] == "triton"}
        return sum(_warm_up(stream, key[0], dtype) for key, stream in needed.items())

    def fused(
        self,
        run: short_way.Run,
        inputs: tuple[torch.Tensor, torch.Tensor],
        modulations: tuple[list[Modulation], list[Modulation]],
        attend: Callable[[list], tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor] | str:
        """The two streams after the block, or one sentence that says why it must run unfused; nothing was changed then.

        Args:
            inputs: the streams, [B, L, K] each.
            modulations: of each stream, for attention and feed-forward.
            attend: takes a list of what the readers of each stream gave, to be emptied, and gives what the output
                Linears gave.
        """
        kinds = [kinds_of(stream.groups, x.device) for stream, x in zip(self._streams, inputs, strict=True)]
        reason = next((found for found in kinds if isinstance(found, str)), None)
        if reason is not None:
            return reason
        readings = []
        parts = list(zip(self._streams, inputs, modulations, kinds, strict=True))
        for stream, x, modulation, own in parts:
            norm = layer_norm(stream.norms[0], modulation[0])
            _, rows, make = begin(stream.readers, x, None, norm, own[0])
            readings.append(read(run, stream.readers, x, rows, own[0], make))
            if isinstance(readings[-1], str):
                return readings[-1]
            del rows, make
        ends = []
        for part, y in zip(parts, attend(readings), strict=True):
            ends.append(_end(run, *part, y))
            if isinstance(ends[-1], str):
                return ends[-1]
        return tuple(ends)

    def why_not(self, *inputs: torch.Tensor) -> str | None:
        """None when the block may run fused on these inputs."""
        return self._watched.why_foreign() or next((reason for reason in map(why_unfit, inputs) if reason), None)


def _end(run: short_way.Run, stream: Stream, x, modulation, kinds: list[tuple], y) -> torch.Tensor | str:
    """From the output of attention to the end of the block."""
    branch, norm = _branch(stream, 0, y, modulation[0]), layer_norm(stream.norms[1], modulation[1])
    h, rows, make = begin(stream.feed.first, x, branch, norm, kinds[1])
    y = stream.feed(run, h, rows, kinds[1:], make)
    if isinstance(y, str):
        return y
    return residual_norm(h, _branch(stream, 1, y, modulation[1]), implementation=kinds[1][1])[0]


def _branch(stream: Stream, which: int, y: torch.Tensor, modulation: Modulation) -> Branch:
    return Branch(y.contiguous(), None, 0.0, modulation.gate, stream.one_rounding[which])


def _warm_up(stream: Stream, kinds: tuple, dtype: torch.dtype) -> int:
    reader, first, last = kinds
    x = torch.zeros((1, 2, reader[2]), dtype=dtype, device=reader[0])
    modulation = Modulation(*x.new_zeros((3, 1, reader[2])))
    norms = [layer_norm(norm, modulation) for norm in stream.norms]
    residual_norm(x, None, norms[0], **options(reader))
    residual_norm(x, _branch(stream, 0, x, modulation), norms[1], **options(first))
    residual_norm(x, _branch(stream, 1, x, modulation), implementation=first[1])
    return 3 + stream.feed.warm_up([first, last], dtype)
