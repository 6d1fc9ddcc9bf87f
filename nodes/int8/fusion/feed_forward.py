"""The feed-forward of a fused block: from the rows that its first Linears read to what its last one gives.

Three forms: SwiGLU of two Linears, SwiGLU of one Linear whose output is [gate | up], GELU by tanh of one Linear. Hosts that
hand the GELU to the last Linear (linear_input_act) do not round it in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from ....kernels.int8_linear_fused import fits_low_rank, fits_swiglu, swiglu_of_rows
from ....kernels.low_rank import LowRank
from ....kernels.packed_rows import empty_rows
from ....kernels.quantize_activation import activated_torch, quantize_gelu, quantize_swiglu
from .. import short_way
from .pieces import options, read, room_for_input


class FeedForward:
    """One feed-forward of the host.

    Args:
        first: the Linears that read its input: gate and up, or one.
        last: the Linear that reads their activation.
        gelu: whether the activation is the GELU of the one Linear, else it is SwiGLU.
        rounded: whether the host rounds the GELU to the type of the activation before it is quantised.
    """

    __slots__ = ("_gelu", "_rounded", "first", "last")

    def __init__(
        self, first: tuple[torch.nn.Module, ...], last: torch.nn.Module, gelu: bool = False, rounded: bool = True
    ):
        self.first, self.last, self._gelu, self._rounded = first, last, gelu, rounded

    @property
    def linears(self) -> tuple[torch.nn.Module, ...]:
        """All Linears in the order in which they run."""
        return *self.first, self.last

    def __call__(
        self,
        run: short_way.Run,
        x: torch.Tensor,
        rows: torch.Tensor | tuple,
        kinds: list[tuple],
        make: Callable[[], torch.Tensor],
    ) -> torch.Tensor | str:
        """What the last Linear gives, or one sentence that says why it is not what the host would give.

        Args:
            x: [..., K], of the shape and dtype of the input; not read.
            rows: the quantised input.
            kinds: of the rows that the first Linears and the last one read.
            make: returns the input itself.
        """
        product = self._product(run, x, rows, kinds[0], make)
        if product is not None:
            return self.last(product)
        hidden = read(run, self.first, x, rows, kinds[0], make)
        if isinstance(hidden, str):
            return hidden
        gate, up = self._halves(hidden)
        kept = room_for_input([self.last], gate, gate.shape[-1])
        if up is None:
            # with a LoRA beside it the last Linear is called, with the rounded activation (direct_linears.py)
            rounded = self._rounded or short_way.low_rank_of(self.last) is not None
            rows = quantize_gelu(gate, kept=kept, rounded=rounded, **options(kinds[1]))
        else:
            rows = quantize_swiglu(gate, up, kept=kept, **options(kinds[1]))
        # memory that is there, in the shape of what the last Linear reads
        stand_in = hidden[0].reshape(-1)[: gate.numel()].view(gate.shape)
        make = partial(activated_torch, gate, up) if kept is None else lambda: kept
        y = read(run, (self.last,), stand_in, rows, kinds[1], make)
        return y if isinstance(y, str) else y[0]

    def _halves(self, hidden: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._gelu:
            return hidden[0], None
        return tuple(hidden[0].chunk(2, -1) if len(hidden) == 1 else hidden)

    def _product(self, run: short_way.Run, x, rows, kind: tuple, make) -> torch.Tensor | None:
        """silu(gate) * up in the epilogue of one matmul, when the Linears lie there as they are; else None."""
        if self._gelu:
            return None
        parts = [short_way.resident_parts(linear, x) for linear in self.first]
        low_rank = [short_way.low_rank_of(linear) for linear in self.first]
        if None in parts:
            return None
        gate, up = parts if len(parts) == 2 else halves(parts[0])
        if not fits_swiglu(gate, up):
            return None
        beside = None
        if low_rank != [None] * len(parts):
            # the op of a graph adds none
            if None in low_rank or torch.compiler.is_compiling():
                return None
            beside = tuple(low_rank) if len(low_rank) == 2 else halves_of_low_rank(low_rank[0])
            if not fits_low_rank(beside, x):
                return None
            x = make()
        # a graph is traced once and runs often
        if not torch.compiler.is_compiling():
            count = len(parts)
            run.ways[short_way.RESIDENT] += count
            run.calls[kind[1]] += count
            run.shared.spared += count
        return swiglu_of_rows(x, rows, gate, up, kind[1], beside)

    def warm_up(self, kinds: list[tuple], dtype: torch.dtype) -> int:
        """Compile, and launch once, the kernels for these kinds of rows; returns how many."""
        first, last = kinds
        hidden = torch.zeros((1, 2, last[2]), dtype=dtype, device=last[0])
        if self._gelu:
            quantize_gelu(hidden, rounded=self._rounded, **options(last))
            return 1
        pair = (hidden, hidden)
        if len(self.first) == 1:
            pair = torch.zeros((1, 2, 2 * last[2]), dtype=dtype, device=last[0]).chunk(2, -1)
        quantize_swiglu(*pair, **options(last))
        # as many rows as a picture has, for its tile
        x = torch.zeros((1, 2048, first[2]), dtype=dtype, device=first[0])
        codes = torch.zeros((last[2], first[2]), dtype=torch.int8, device=first[0])
        # the weights may lie elsewhere now, and are not needed
        scales = self.first[0].weight._params.scale.numel()
        scale = torch.zeros((last[2] if scales > 1 else 1, 1), device=first[0])
        rows = empty_rows(2048, first[2], first[0], first[1])[0].zero_()
        bias = None if self.first[0].bias is None else torch.zeros(last[2], dtype=dtype, device=first[0])
        swiglu_of_rows(x, rows, (codes, scale, bias), (codes, scale, bias), first[1])
        return 2


def halves(linear: tuple) -> tuple[tuple, tuple]:
    """(codes [2 N, K], scale, bias) of one Linear as two of N rows each, without a copy."""
    codes, scale, bias = linear
    n = codes.shape[0] // 2
    parts = (slice(0, n), slice(n, 2 * n))
    return tuple(
        (codes[part], scale if scale.numel() == 1 else scale.view(-1)[part], None if bias is None else bias[part])
        for part in parts
    )


def halves_of_low_rank(low_rank: LowRank) -> tuple[LowRank, LowRank]:
    """What is added to one Linear of 2 N rows, as what is added to each N of them."""
    return tuple(LowRank(low_rank.down, half) for half in low_rank.up.chunk(2))
