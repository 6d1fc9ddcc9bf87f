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

from ....kernels.int8_linear_fused import fits_swiglu, swiglu_of_rows
from ....kernels.packed_rows import empty_rows
from ....kernels.quantize_activation import quantize_swiglu
from ....kernels.residual_norm import Branch, Norm, modulated_norm_torch, residual_norm
from .. import short_way
from ..shared_rows import Given
from .guards import Watched, release, why_reads_more, why_unknown


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
    known: ClassVar[dict[tuple[str, str], str]] = {}
    parts: ClassVar[tuple[str, str]]
    readers: ClassVar[tuple[str, ...]]
    swiglu: ClassVar[tuple[str, str, str]]
    norms: ClassVar[tuple[str, ...]]

    __slots__ = ("_attention", "_feed_forward", "_linears", "_module", "_watched")

    def __init__(self, module: torch.nn.Module):
        self._module = module
        self._attention, self._feed_forward = attention, feed_forward = [module._modules[name] for name in self.parts]
        self._linears = [attention._modules[name] for name in self.readers]
        self._linears += [feed_forward._modules[name] for name in self.swiglu]
        norms = [module._modules[name] for name in self.norms]
        self._watched = Watched(
            parents=(module, attention, feed_forward),
            modules=(attention, feed_forward, *norms, *self._linears),
            methods=(
                *((type(part), "forward") for part in (module, attention, feed_forward, *norms)),
                *((_owner(module, where), name) for where, name in self.known),
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
            reason = why_unknown(_owner(module, where), {name: frozenset({fingerprint})})
            if reason is not None:
                return reason
        reason = why_reads_more(type(parts[0]), "forward", "x", cls.readers)
        if reason is not None:
            return reason
        names = ((parts[0], cls.readers), (parts[1], cls.swiglu))
        linears = [(name, part._modules.get(name)) for part, children in names for name in children]
        float_ones = [name for name, linear in linears if linear is None or not short_way.is_known(linear)]
        return f"{' and '.join(float_ones)} of a block are not INT8" if float_ones else cls(module)

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
        reader, gate, down = kinds[1], kinds[-3], kinds[-1]
        if reader[1] != "triton":
            return 0
        x, hidden = (torch.zeros((1, 2, kind[2]), dtype=dtype, device=kind[0]) for kind in (reader, down))
        # the weights may lie elsewhere now, and are not needed
        vectors = self.zeros(x)
        residual_norm(x, None, vectors.first, **_static(reader))
        residual_norm(x, Branch(x, *vectors.attention), vectors.second, **_static(gate))
        residual_norm(x, Branch(x, *vectors.feed_forward), implementation=gate[1])
        quantize_swiglu(hidden, hidden, **_static(down))
        # as many rows as a picture has, for its tile
        x = torch.zeros((1, 2048, gate[2]), dtype=dtype, device=gate[0])
        codes = torch.zeros((down[2], gate[2]), dtype=torch.int8, device=gate[0])
        scale = torch.zeros((self._linears[-3].weight._params.scale.numel(), 1), device=gate[0])
        rows = empty_rows(2048, gate[2], gate[0], gate[1])[0].zero_()
        swiglu_of_rows(x, rows, (codes, scale, None), (codes, scale, None), gate[1])
        return 5

    def zeros(self, x: torch.Tensor) -> Vectors:
        """Vectors like those of `vectors`, made of zeros."""
        raise NotImplementedError

    def fused(self, run, x, condition, attend) -> torch.Tensor | str:
        """The block's output, or one sentence that says why it must run unfused; nothing was changed then.

        Args:
            attend: calls the host's attention with the tensor it is given in place of its input.
        """
        reason = self._watched.why_foreign() or _unfit(x)
        if reason is not None:
            return reason
        kinds = [short_way.rows_kind(linear, x.device) for linear in self._linears]
        if None in kinds:
            return "another pack replaced what a Linear of the block multiplies with"
        if any(kind != kinds[0] for kind in kinds[1:-3]) or kinds[-3] != kinds[-2]:
            return "Linears that read the same tensor are quantised differently"
        borrowed: list = []
        try:
            found = self.vectors(x, condition, borrowed)
            return found if isinstance(found, str) else self._run(run, x, found, attend, kinds)
        finally:
            for loan in borrowed:
                release(loan)

    def _run(self, run, x, vectors, attend, kinds) -> torch.Tensor | str:
        shared, (gate_linear, up_linear, down_linear) = run.shared, self._linears[-3:]
        first, second = vectors.first, vectors.second
        _, rows = residual_norm(x, None, first, **_static(kinds[0]))
        given = shared.given = Given(x, rows, kinds[0], lambda: _normed(x, first))
        y = attend(x)
        if given.used != len(self.readers):
            return "attention did not take the rows that were made for it"
        del rows, given

        h, rows = residual_norm(x, Branch(y.contiguous(), *vectors.attention), second, **_static(kinds[-3]))
        given = shared.given = Given(h, rows, kinds[-3], lambda: _normed(h, second))
        product = self._product(run, h, rows, kinds[-3])
        if product is not None:
            shared.given = None
            del rows, given, y
            y = down_linear(product)
            return residual_norm(h, Branch(y.contiguous(), *vectors.feed_forward), implementation=kinds[-1][1])[0]
        gate, up = gate_linear(h), up_linear(h)
        if given.used != 2:
            return "the feed-forward did not take the rows that were made for it"
        del rows, given, y

        rows = quantize_swiglu(gate, up, **_static(kinds[-1]))
        given = shared.given = Given(gate, rows, kinds[-1], lambda: torch.nn.functional.silu(gate) * up)
        y = down_linear(gate)
        shared.given = None
        if given.used != 1:
            return "the feed-forward did not take the rows that were made for it"
        return residual_norm(h, Branch(y.contiguous(), *vectors.feed_forward), implementation=kinds[-1][1])[0]

    def _product(self, run, h, rows, kind) -> torch.Tensor | None:
        """silu(gate) * up in the epilogue of one matmul, when both Linears lie there as they are; else None."""
        gate, up = (short_way.resident_parts(linear, h) for linear in self._linears[-3:-1])
        if gate is None or up is None or not fits_swiglu(gate, up):
            return None
        run.ways[short_way.RESIDENT] += 2
        run.calls[kind[1]] += 2
        run.shared.spared += 2
        return swiglu_of_rows(h, rows, gate, up, kind[1])


def _owner(module: torch.nn.Module, where: str):
    """The class of the block or of a child, or a Python module of the host by its name."""
    if where.startswith("comfy."):
        import importlib

        return importlib.import_module(where)
    return type(module._modules[where] if where else module)


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


def by_row(modulation: torch.Tensor, count: int, x: torch.Tensor) -> torch.Tensor | str:
    """[B, count K] or [B, 1 or L, count K] as [rows, count, K]: one row for all, for each image or for each token.

    One sentence when it is none of these for x [B, L, K].
    """
    batch, tokens, width = x.shape
    leading = tuple(modulation.shape[:-1])
    fits = leading in ((1,), (batch,), (1, 1), (batch, 1), (batch, tokens)) and modulation.shape[-1] == count * width
    if not fits or modulation.dtype != x.dtype or modulation.device != x.device:
        return f"the modulation is {modulation.dtype} {tuple(modulation.shape)} beside {x.dtype} {tuple(x.shape)}"
    return modulation.reshape(-1, count, width)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return modulated_norm_torch(x.view(-1, x.shape[-1]), norm).view(x.shape)
