"""Flux.1 and Flux.2: the blocks of two streams, and those of one stream whose attention and feed-forward run side by side."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from ....kernels.quantize_activation import quantize_gelu, quantize_swiglu
from ....kernels.residual_norm import Branch, residual_norm
from .. import short_way
from .feed_forward import FeedForward
from .guards import Watched, why_unknown
from .heads import Heads, is_rms_norm
from .pieces import begin, by_row, kinds_of, options, owner, read, room_for_input, why_not_int8, why_unfit
from .two_streams import Modulation, Stream, TwoStreams, layer_norm, why_no_layer_norm

HOST, MATH = "comfy.ldm.flux.layers", "comfy.ldm.flux.math"
KNOWN_DOUBLE, KNOWN_SINGLE, KNOWN_APPLY_MOD = "3fafe2c283317908", "113d6af3d69e847c", "f633f85ff351cb60"
KNOWN_ACTIVATION, KNOWN_YAK = "f7ac1794515787f6", "d8fdc93b63e120f1"
# what norms and rotates q and k: where one of these is another, the host's own code does it
KNOWN_QK_NORM, KNOWN_ROPE = (
    "327fb3b42f2ad6a9",
    {(HOST, "attention"): "250d6c88f82ae175", (MATH, "apply_rope"): "5090eeabd01f9ad4"},
)
REFERENCE = "some tokens have another modulation than others"


class Double(TwoStreams):
    """The fused form of DoubleStreamBlock."""

    name = "Flux two-stream"

    __slots__ = ("_heads",)

    def __init__(self, module: nn.Module, streams: tuple[Stream, Stream], watched: Watched):
        super().__init__(module, streams, watched)
        self._heads = _heads_of(module.txt_attn.norm, module.img_attn.norm)

    @classmethod
    def of(cls, module: nn.Module) -> Double | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        reason = _why_unknown(module, KNOWN_DOUBLE)
        if reason is not None:
            return reason
        streams, modules = [], []
        for name in ("img", "txt"):
            children = [module._modules.get(f"{name}_{part}") for part in ("attn", "norm1", "norm2", "mlp")]
            attention, *norms, mlp = children
            if None in children:
                return f"a block has not all parts of its stream {name}"
            feed = _feed_forward(mlp)
            reason = feed if isinstance(feed, str) else next(filter(None, map(why_no_layer_norm, norms)), None)
            reason = reason or why_not_int8([(f"{name}_attn.qkv", attention._modules.get("qkv"))])
            if reason is not None:
                return reason
            streams.append(Stream(tuple(norms), (attention.qkv,), feed, (False, False)))
            modules += [*norms, attention.qkv, *mlp.modules()]
        attentions = [module.img_attn, module.txt_attn]
        return cls(module, tuple(streams), _watched(module, modules, attentions))

    def forward(
        self,
        run,
        img,
        txt,
        vec,
        pe,
        attn_mask=None,
        modulation_dims_img=None,
        modulation_dims_txt=None,
        transformer_options=None,
    ):
        """What the class's forward returns, or a sentence."""
        if modulation_dims_img is not None or modulation_dims_txt is not None:
            return REFERENCE
        reason = self.why_not(img, txt)
        if reason is not None:
            return reason
        block = self._module
        made = (block.img_mod(vec), block.txt_mod(vec)) if block.modulation else vec
        modulations = []
        for branches, x in zip(made, (img, txt), strict=True):
            modulations.append([_modulation(branch, x) for branch in branches])
            reason = next((found for found in modulations[-1] if isinstance(found, str)), None)
            if reason is not None:
                return reason
        attend = partial(self._attend, pe, attn_mask, {} if transformer_options is None else transformer_options)
        return self.fused(run, (img, txt), tuple(modulations), attend)

    def _attend(self, pe, mask, transformer_options: dict, readings: list) -> tuple[torch.Tensor, torch.Tensor]:
        """What the host does from the output of `qkv` of both streams to that of `proj`."""
        block = self._module
        parts = [_heads(qkv, block.num_heads) for (qkv,) in reversed(readings)]
        readings.clear()
        text = parts[0].shape[1]
        joint = _joint(self._heads, parts, pe, transformer_options)
        if joint is None:
            norms = block.txt_attn.norm, block.img_attn.norm
            streams = [_normed_heads(norm, part) for norm, part in zip(norms, parts, strict=True)]
            q, k, v = (torch.cat(pair, dim=2) for pair in zip(*streams, strict=True))
            del streams
        else:
            q, k, v, pe = *joint, torch.cat([part[:, :, 2] for part in parts], dim=1).transpose(1, 2), None
        del parts
        extra = transformer_options.copy()
        extra["img_slice"] = [text, q.shape[2]]
        attn = _attention(q, k, v, pe, mask, transformer_options, extra)
        return block.img_attn.proj(attn[:, text:]), block.txt_attn.proj(attn[:, :text])


class Single:
    """The fused form of SingleStreamBlock.

        x' = x + gate * linear2([attention(q, k, v) | act(mlp)])        [q | k | v | mlp] = linear1(n(x) * (1 + s) + b)

    The rows of linear2 are made from attention's output and mlp where they lie.
    """

    name = "Flux one-stream"

    __slots__ = ("_heads", "_linears", "_module", "_watched")

    def __init__(self, module: nn.Module):
        self._module = module
        self._linears = (module.linear1, module.linear2)
        modules = [module.pre_norm, *module.mlp_act.modules(), *self._linears]
        self._watched = _watched(module, modules, [])
        self._heads = _heads_of(module.norm)

    @classmethod
    def of(cls, module: nn.Module) -> Single | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        children = module._modules
        linears = [(name, children.get(name)) for name in ("linear1", "linear2")]
        return (
            _why_unknown(module, KNOWN_SINGLE)
            or why_no_layer_norm(children.get("pre_norm"))
            or _why_no_activation(children.get("mlp_act"), module.yak_mlp)
            or why_not_int8(linears)
            or cls(module)
        )

    def kernels(self, device: torch.device) -> tuple | None:
        """As `TwoStreams.kernels`."""
        kinds = [short_way.static_kind(linear, device) for linear in self._linears]
        return None if None in kinds else (type(self), *kinds)

    def warm_up(self, kinds: tuple, dtype: torch.dtype) -> int:
        """As `TwoStreams.warm_up`."""
        _, first, last = kinds
        if first[1] != "triton":
            return 0
        block = self._module
        x = torch.zeros((1, 2, first[2]), dtype=dtype, device=first[0])
        modulation = Modulation(*x.new_zeros((3, 1, first[2])))
        residual_norm(x, None, layer_norm(block.pre_norm, modulation), **options(first))
        mlp = x.new_zeros((1, 2, block.linear1.out_features))[..., 3 * block.hidden_size :]
        self._rows(x, mlp, last)
        residual_norm(x, Branch(x, None, 0.0, modulation.gate), implementation=first[1])
        return 3

    def forward(self, run, x, vec, pe, attn_mask=None, modulation_dims=None, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        if modulation_dims is not None:
            return REFERENCE
        reason = self._watched.why_foreign() or why_unfit(x)
        if reason is not None:
            return reason
        kinds = kinds_of([(linear,) for linear in self._linears], x.device)
        block = self._module
        modulation = _modulation(block.modulation(vec)[0] if block.modulation else vec, x)
        reason = next((found for found in (kinds, modulation) if isinstance(found, str)), None)
        if reason is not None:
            return reason
        norm = layer_norm(block.pre_norm, modulation)
        _, rows, make = begin((block.linear1,), x, None, norm, kinds[0])
        found = read(run, (block.linear1,), x, rows, kinds[0], make)
        if isinstance(found, str):
            return found
        (hidden,) = found
        del rows, found, make
        qkv, mlp = torch.split(hidden, [3 * block.hidden_size, block.mlp_hidden_dim_first], dim=-1)
        heads = _heads(qkv, block.num_heads)
        transformer_options = {} if transformer_options is None else transformer_options
        joint = _joint(self._heads, [heads], pe, transformer_options)
        if joint is None:
            q, k, v = _normed_heads(block.norm, heads)
        else:
            q, k, v, pe = *joint, heads[:, :, 2].transpose(1, 2), None
        attn = _attention(q, k, v, pe, attn_mask, transformer_options, transformer_options.copy())
        del q, k, v, qkv, heads, joint

        attn = attn.contiguous()
        kept = room_for_input((block.linear2,), attn, block.linear2.in_features)
        rows = self._rows(attn, mlp, kinds[1], kept)
        # memory that is there, in the shape of what linear2 reads
        shape = (*x.shape[:-1], block.linear2.in_features)
        stand_in = hidden.reshape(-1)[: shape[0] * shape[1] * shape[2]].view(shape)
        make = partial(self._joined, attn, mlp) if kept is None else lambda: kept
        y = read(run, (block.linear2,), stand_in, rows, kinds[1], make)
        if isinstance(y, str):
            return y
        return residual_norm(x, Branch(y[0].contiguous(), None, 0.0, modulation.gate), implementation=kinds[0][1])[0]

    def _rows(self, attn: torch.Tensor, mlp: torch.Tensor, kind: tuple, kept: torch.Tensor | None = None):
        """The rows of [attn | act(mlp)], which is written to `kept` as it is."""
        if type(self._module.mlp_act) is nn.GELU:
            return quantize_gelu(mlp, before=attn, kept=kept, **options(kind))
        gate, up = mlp.chunk(2, -1)[:: -1 if self._module.yak_mlp else 1]
        return quantize_swiglu(gate, up, before=attn, kept=kept, **options(kind))

    def _joined(self, attn: torch.Tensor, mlp: torch.Tensor) -> torch.Tensor:
        """[attn | act(mlp)], as the host computes it."""
        block = self._module
        if block.yak_mlp:
            half = block.mlp_hidden_dim_first // 2
            activated = block.mlp_act(mlp[..., half:]) * mlp[..., :half]
        else:
            activated = block.mlp_act(mlp)
        return torch.cat((attn, activated), 2)


def _why_unknown(module: nn.Module, of_block: str) -> str | None:
    return why_unknown(type(module), {"forward": frozenset({of_block})}) or why_unknown(
        owner(module, HOST), {"apply_mod": frozenset({KNOWN_APPLY_MOD})}
    )


def _watched(module: nn.Module, modules: list, parents: list) -> Watched:
    """modules: those that are not called, or called with a stand-in."""
    holders = [child for child in modules if child._modules]
    return Watched(
        parents=(module, *parents, *holders),
        modules=modules,
        methods=(
            (owner(module, HOST), "apply_mod"),
            *((kind, "forward") for kind in {type(module), *map(type, modules)}),
        ),
    )


def _feed_forward(mlp: nn.Module) -> FeedForward | str:
    """The feed-forward of a two-stream block, or one sentence that says why it is not known."""
    children = mlp._modules
    if type(mlp) is nn.Sequential and len(children) == 3:
        first, activation, last = mlp
        reason = _why_no_activation(activation, False) or why_not_int8([("mlp.0", first), ("mlp.2", last)])
        return reason or FeedForward((first,), last, type(activation) is nn.GELU)
    if type(mlp).__name__ != "YakMLP":
        return f"the feed-forward of a block is a {type(mlp).__name__}"
    linears = [(name, children.get(name)) for name in ("gate_proj", "up_proj", "down_proj")]
    reason = why_unknown(type(mlp), {"forward": frozenset({KNOWN_YAK})}) or _why_no_activation(
        children.get("act_fn"), True
    )
    if reason is not None or (reason := why_not_int8(linears)) is not None:
        return reason
    return FeedForward((mlp.gate_proj, mlp.up_proj), mlp.down_proj)


def _why_no_activation(activation: nn.Module | None, of_yak: bool) -> str | None:
    """None for GELU by tanh and the host's SiLU of a half; `of_yak` for SiLU, whose half the block chooses."""
    if type(activation).__name__ == "SiLUActivation" and not of_yak:
        reason = why_unknown(type(activation), {"forward": frozenset({KNOWN_ACTIVATION})})
        return reason or _why_no_activation(activation.gate_fn, True)
    known = (
        type(activation) is (nn.SiLU if of_yak else nn.GELU) and getattr(activation, "approximate", "tanh") == "tanh"
    )
    return None if known else f"the activation of a block is a {type(activation).__name__} that is not known"


def _modulation(made, x: torch.Tensor) -> Modulation | str:
    """The host's ModulationOut for x, or one sentence."""
    rows = [by_row(vector, 1, x) for vector in (made.shift, made.scale, made.gate)]
    wrong = next((row for row in rows if isinstance(row, str)), None)
    return wrong or Modulation(*(row[:, 0] for row in rows))


def _heads(qkv: torch.Tensor, heads: int) -> torch.Tensor:
    """[B, L, 3 H D] as [B, L, 3, H, D]."""
    return qkv.view(qkv.shape[0], qkv.shape[1], 3, heads, -1)


def _normed_heads(norm: nn.Module, heads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v [B, H, L, D] of one stream, as the host makes them."""
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    return *norm(q, k, v), v


def _heads_of(*norms: nn.Module) -> Heads | None:
    """What norms and rotates q and k of streams in one pass; None when the host's way is not the known one."""
    pairs = [(norm._modules.get("query_norm"), norm._modules.get("key_norm")) for norm in norms]
    reasons = [why_unknown(type(norm), {"forward": frozenset({KNOWN_QK_NORM})}) for norm in norms]
    reasons += [
        why_unknown(owner(norms[0], where), {name: frozenset({known})}) for (where, name), known in KNOWN_ROPE.items()
    ]
    if any(reasons) or not all(is_rms_norm(norm) for pair in pairs for norm in pair):
        return None
    return Heads(pairs, list(norms), [(owner(norms[0], where), name) for where, name in KNOWN_ROPE])


def _joint(heads: Heads | None, parts: list[torch.Tensor], pe, transformer_options: dict):
    """q and k as `Heads.joint` makes them; None when there is none, and for patches, which want them unrotated."""
    if heads is None or "attn1_patch" in transformer_options.get("patches", {}):
        return None
    return heads.joint([(part[:, :, 0], part[:, :, 1]) for part in parts], pe)


def _attention(q, k, v, pe, mask, transformer_options: dict, extra: dict) -> torch.Tensor:
    """Attention with the host's rope, and what patches make of it; called by the name that other packs may replace."""
    patches = transformer_options.get("patches", {})
    for patch in patches.get("attn1_patch", ()):
        out = patch(q, k, v, pe=pe, attn_mask=mask, extra_options=extra)
        q, k, v = (out.get(name, own) for name, own in (("q", q), ("k", k), ("v", v)))
        pe, mask = out.get("pe", pe), out.get("attn_mask", mask)
    attend = owner(None, HOST).attention
    attn = attend(q, k, v, pe=pe, mask=mask, transformer_options=transformer_options)
    for patch in patches.get("attn1_output_patch", ()):
        attn = patch(attn, extra)
    return attn
