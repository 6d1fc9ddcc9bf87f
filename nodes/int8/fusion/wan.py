"""Wan 2.1 and 2.2: blocks with self-attention, cross-attention and a GELU feed-forward, each after a LayerNorm.

    h  = x + g1 * self_attention(n1(x) * (1 + s1) + b1)
    h' = h + cross_attention(n3(h), context)
    x' = h' + g2 * feed_forward(n2(h') * (1 + s2) + b2)

Both attentions are the host's own methods, with their norms, their rope and what other packs attach to them.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch

from ....kernels.residual_norm import Branch, Norm, residual_norm
from .. import short_way
from ..direct_linears import direct_of
from .feed_forward import FeedForward
from .guards import Watched, affine_pair, release, why_unknown
from .pieces import begin, called, kinds_of, options, owner, why_not_int8, why_unfit

HOST = "comfy.ldm.wan.model"
FORWARD = frozenset({"94743eb4e5a84d47"})
# host functions that are repeated here, or called with a stand-in that their source shows to be read by Linears only
KNOWN = {
    ("self_attn", "forward"): frozenset({"94ba6bf08e4176c2"}),
    # to text; to text and an image, of which newer hosts keep SageAttention away
    ("cross_attn", "forward"): frozenset({"26be034470ca9541", "37027c882065bbbe", "e98b8eb4e38660a2"}),
    (HOST, "repeat_e"): frozenset({"6bee1d242719a436"}),
}
NORMS = ("norm1", "norm2", "norm3")
READERS = ("q", "k", "v")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class Vectors(NamedTuple):
    """What the passes take beside the activations; gates [B, K]."""

    first: Norm
    gate: torch.Tensor
    cross: Norm
    second: Norm
    last_gate: torch.Tensor


class Block:
    """The fused form of WanAttentionBlock."""

    name = "Wan"
    known: ClassVar = KNOWN | {("", "forward"): FORWARD}

    __slots__ = ("_cross", "_feed", "_module", "_readers", "_self", "_watched")

    def __init__(self, module: torch.nn.Module):
        children = module._modules
        self._module, self._self, self._cross = module, children["self_attn"], children["cross_attn"]
        first, activation, last = children["ffn"]
        self._feed = FeedForward((first,), last, gelu=True, rounded=direct_of(children["ffn"]) is None)
        self._readers = [self._self._modules[name] for name in READERS]
        parts = (self._self, self._cross, children["ffn"], activation, *(children[name] for name in NORMS))
        self._watched = Watched(
            parents=(module, self._self, self._cross, children["ffn"]),
            modules=(*parts, *self._readers, self._cross.q, first, last),
            methods=(
                *((kind, "forward") for kind in type(module).__mro__ if "forward" in vars(kind)),
                *((type(part), "forward") for part in parts),
                *((owner(module, where), name) for where, name in self.known),
            ),
        )

    @classmethod
    def of(cls, module: torch.nn.Module) -> Block | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        children = module._modules
        missing = [name for name in ("self_attn", "cross_attn", "ffn", *NORMS) if children.get(name) is None]
        if missing:
            return f"a block has no {' and no '.join(missing)}"
        for (where, name), fingerprints in cls.known.items():
            reason = why_unknown(owner(module, where), {name: fingerprints})
            if reason is not None:
                return reason
        for name in NORMS:
            norm, has_weight = children[name], name == "norm3"
            known = type(norm).__module__ == "comfy.ops" and type(norm).__name__ == "LayerNorm"
            if not known or any((norm._parameters[part] is None) == has_weight for part in ("weight", "bias")):
                return f"{name} of a block is a {type(norm).__name__} of another kind"
        feed = list(children["ffn"].children())
        is_gelu = len(feed) == 3 and type(feed[1]) is torch.nn.GELU and feed[1].approximate == "tanh"
        is_known = type(children["ffn"]) is torch.nn.Sequential or direct_of(children["ffn"]) is not None
        if not is_known or not is_gelu:
            return "the feed-forward of a block is not a GELU by tanh between two Linears"
        linears = [(name, children["self_attn"]._modules.get(name)) for name in READERS]
        linears += [("cross_attn.q", children["cross_attn"]._modules.get("q")), ("ffn.0", feed[0]), ("ffn.2", feed[2])]
        return why_not_int8(linears) or cls(module)

    def forward(self, run, x, e, freqs, context, context_img_len=257, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        # the first block gets a transposed view, which the host copies, too
        x = x.contiguous()
        reason = self._watched.why_foreign() or why_unfit(x, DTYPES)
        if reason is not None:
            return reason
        feed = self._feed
        kinds = kinds_of((self._readers, (self._cross.q,), feed.first, (feed.last,)), x.device)
        if isinstance(kinds, str):
            return kinds
        modulation = self._modulation(e, x)
        if isinstance(modulation, str):
            return modulation
        pair = affine_pair(self._module.norm3, x)
        if isinstance(pair, str):
            return pair
        weight, bias, loan = pair
        try:
            vectors = self._vectors(modulation, weight, bias)
            found = self._attended(run, x, vectors, freqs, context, context_img_len, transformer_options or {}, kinds)
            if isinstance(found, str):
                return found
            x, rows, make = found
            if rows is None:
                return self._last_part(x, modulation)
            return self._fed(run, x, rows, make, vectors, kinds[2:])
        finally:
            release(loan)

    def _attended(self, run, x, vectors, freqs, context, context_img_len, transformer_options, kinds):
        """As `begin` for the feed-forward; no rows for an h' that no kernel takes. Or a sentence."""

        def attend(x):
            return self._self(x, freqs, transformer_options=transformer_options)

        def attend_to_context(x):
            return self._cross(x, context, context_img_len=context_img_len, transformer_options=transformer_options)

        _, rows, make = begin(self._readers, x, None, vectors.first, kinds[0])
        y = called(run, attend, len(READERS), x, rows, kinds[0], make)
        if isinstance(y, str):
            return y
        branch = Branch(y.contiguous(), None, 0.0, vectors.gate, one_rounding=True)
        h, rows, make = begin((self._cross.q,), x, branch, vectors.cross, kinds[1])
        y = called(run, attend_to_context, 1, h, rows, kinds[1], make)
        if isinstance(y, str):
            return y
        branch = Branch(y.contiguous(), None, 0.0, None)
        patches = transformer_options.get("patches", {}).get("attn2_patch", ())
        if patches:
            branch, patched = None, h + y
            for patch in patches:
                patched = patch({"x": patched, "transformer_options": transformer_options})
            alike = patched.shape == h.shape and patched.dtype == h.dtype
            h = patched.contiguous()
            if not alike or why_unfit(h, DTYPES) is not None:
                return patched, None, None
        return begin(self._feed.first, h, branch, vectors.second, kinds[2])

    def _fed(self, run, x, rows, make, vectors, kinds):
        y = self._feed(run, x, rows, kinds, make)
        if isinstance(y, str):
            return y
        branch = Branch(y.contiguous(), None, 0.0, vectors.last_gate, one_rounding=True)
        return residual_norm(x, branch, implementation=kinds[1][1])[0]

    def _last_part(self, x: torch.Tensor, modulation: torch.Tensor) -> torch.Tensor:
        """The feed-forward as the host runs it, for an x that patches made and no kernel takes: they must not run twice."""
        from comfy.ldm.wan.model import repeat_e

        children = self._module._modules
        shift, scale, gate = (repeat_e(vector, x) for vector in modulation.unbind(2)[3:])
        y = children["ffn"](torch.addcmul(shift, children["norm2"](x), 1 + scale))
        return torch.addcmul(x, y, gate)

    def _modulation(self, e: torch.Tensor, x: torch.Tensor) -> torch.Tensor | str:
        """[B, parts, 6, K]: one for all tokens of an image, or one for each of `parts` runs of tokens, such as frames."""
        import comfy.model_management

        batch, tokens, width = x.shape
        if e.dim() not in (3, 4) or e.shape[-2:] != (6, width) or e.shape[0] not in (1, batch):
            return f"the modulation is {tuple(e.shape)} beside {tuple(x.shape)}"
        parts = e.shape[1] if e.dim() == 4 else 1
        if parts > 1 and (tokens % parts or e.shape[0] != batch):
            return f"{tokens} tokens are modulated in {parts} parts, which are not of one length"
        own = comfy.model_management.cast_to(self._module.modulation, dtype=x.dtype, device=x.device)
        made = own.unsqueeze(0) + (e if e.dim() == 4 else e.unsqueeze(1))
        if made.dtype != x.dtype or made.device != x.device:
            return f"the modulation is {made.dtype} beside {x.dtype}"
        return made

    def _vectors(self, modulation: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Vectors:
        shift, scale, gate, last_shift, last_scale, last_gate = modulation.flatten(0, 1).unbind(1)
        eps = [self._module._modules[name].eps for name in NORMS]
        return Vectors(
            Norm(None, eps[0], scale, shift, centred=True, one_rounding=True),
            gate,
            Norm(weight, eps[2], None, bias=bias, centred=True),
            Norm(None, eps[1], last_scale, last_shift, centred=True, one_rounding=True),
            last_gate,
        )

    def kernels(self, device: torch.device) -> tuple | None:
        """What decides which machine code the block needs on `device`: equal for equal blocks; None without its weights."""
        linears = (self._readers[0], self._cross.q, *self._feed.linears)
        kinds = [short_way.static_kind(linear, device) for linear in linears]
        return None if None in kinds else (type(self), *kinds)

    def warm_up(self, kinds: tuple, dtype: torch.dtype) -> int:
        """Compile, and launch once, the kernels of `kernels`; returns how many."""
        reader, query, first, last = kinds[1:]
        if reader[1] != "triton":
            return 0
        x = torch.zeros((1, 2, reader[2]), dtype=dtype, device=reader[0])
        vectors = self._vectors(x.new_zeros((1, 1, 6, reader[2])), x[0, 0], x[0, 0])
        residual_norm(x, None, vectors.first, **options(reader))
        residual_norm(x, Branch(x, None, 0.0, vectors.gate, one_rounding=True), vectors.cross, **options(query))
        residual_norm(x, Branch(x, None, 0.0, None), vectors.second, **options(first))
        residual_norm(x, Branch(x, None, 0.0, vectors.last_gate, one_rounding=True), implementation=first[1])
        return 4 + self._feed.warm_up([first, last], dtype)


class VaceBlock(Block):
    """The fused form of VaceWanAttentionBlock: the same block, with a Linear before the first and one after each."""

    known: ClassVar = KNOWN | {("", "forward"): frozenset({"ebea1f3f4964c840"})}

    __slots__ = ()

    @classmethod
    def of(cls, module: torch.nn.Module) -> Block | str:
        """As `Block.of`; the class's forward calls that of the class it is derived from."""
        return why_unknown(type(module).__mro__[1], {"forward": FORWARD}) or super().of(module)

    def forward(self, run, c, x, **keywords):
        """What the class's forward returns, or a sentence."""
        module = self._module
        if module.block_id == 0:
            c = module.before_proj(c) + x
        found = super().forward(run, c, **keywords)
        return found if isinstance(found, str) else (module.after_proj(found), found)
