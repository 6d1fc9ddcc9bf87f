"""Qwen-Image: its block of two streams."""

from __future__ import annotations

from functools import partial
from typing import ClassVar

import torch
from torch import nn

from .feed_forward import FeedForward
from .guards import Watched, why_unknown
from .heads import Heads, is_rms_norm
from .pieces import by_row, owner, why_not_int8
from .two_streams import Modulation, Stream, TwoStreams, why_no_layer_norm

HOST = "comfy.ldm.qwen_image.model"
READERS = {"img": ("to_q", "to_k", "to_v"), "txt": ("add_q_proj", "add_k_proj", "add_v_proj")}
# which additions are one operation; that of attention to the text is two
ONE_ROUNDING = {"img": (True, True), "txt": (False, True)}
# what rotates q and k: where it is another, the host's own code does it, and norms
ROPE, KNOWN_ROPE = "apply_rope1", "c68b4d968b5fd98b"


class Block(TwoStreams):
    """The fused form of QwenImageTransformerBlock."""

    name = "Qwen-Image"
    known: ClassVar = {
        ("", "forward"): "e5406d9d3cde4361",
        ("", "_apply_gate"): "1295274f870ae612",
        ("", "_modulate"): "b9402ca0cea97a97",
        ("attn", "forward"): "899652b0a23b2dcb",
        ("img_mlp", "forward"): "6ef02fad075c6bd5",
        ("txt_mlp", "forward"): "6ef02fad075c6bd5",
        ("img_mlp.net.0", "forward"): "914b43393a6730dd",
        ("txt_mlp.net.0", "forward"): "914b43393a6730dd",
    }

    __slots__ = ("_heads",)

    def __init__(self, module: nn.Module, streams: tuple[Stream, Stream], watched: Watched):
        super().__init__(module, streams, watched)
        self._heads = _heads_of(module.attn)

    @classmethod
    def of(cls, module: nn.Module) -> Block | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        try:
            owners = {where: owner(module, where) for where, _ in cls.known}
        except AttributeError as error:
            return f"a block has another structure: {error}"
        for (where, name), fingerprint in cls.known.items():
            reason = why_unknown(owners[where], {name: frozenset({fingerprint})})
            if reason is not None:
                return reason
        attention, streams, modules = module.attn, [], []
        for name, readers in READERS.items():
            norms = tuple(module._modules.get(f"{name}_norm{i}") for i in (1, 2))
            mlp = module._modules[f"{name}_mlp"]
            linears = [(f"attn.{reader}", attention._modules.get(reader)) for reader in readers]
            reason = (
                next(filter(None, map(why_no_layer_norm, norms)), None)
                or _why_no_mlp(mlp)
                or why_not_int8([*linears, ("mlp.net.0.proj", mlp.net[0].proj), ("mlp.net.2", mlp.net[2])])
            )
            if reason is not None:
                return reason
            linears = tuple(linear for _, linear in linears)
            feed = FeedForward((mlp.net[0].proj,), mlp.net[2], gelu=True)
            streams.append(Stream(norms, linears, feed, ONE_ROUNDING[name]))
            modules += [*norms, *linears, *mlp.modules()]
        watched = Watched(
            parents=(module, attention, attention.to_out, *(m for m in modules if m._modules)),
            modules=(attention, *modules),
            methods=(
                *((owners[where], name) for where, name in cls.known),
                *((kind, "forward") for kind in set(map(type, modules))),
            ),
        )
        return cls(module, tuple(streams), watched)

    def forward(
        self,
        run,
        hidden_states,
        encoder_hidden_states,
        encoder_hidden_states_mask,
        temb,
        image_rotary_emb=None,
        timestep_zero_index=None,
        transformer_options=None,
    ):
        """What the class's forward returns, or a sentence."""
        if timestep_zero_index is not None:
            return "some tokens have another modulation than others"
        inputs, block = (hidden_states, encoder_hidden_states), self._module
        reason = self.why_not(*inputs)
        if reason is not None:
            return reason
        modulations = []
        for make, x in zip((block.img_mod, block.txt_mod), inputs, strict=True):
            found = by_row(make(temb), 6, x)
            if isinstance(found, str):
                return found
            modulations.append([Modulation(*found[:, start : start + 3].unbind(1)) for start in (0, 3)])
        options = {} if transformer_options is None else transformer_options
        attend = partial(self._attend, encoder_hidden_states_mask, image_rotary_emb, options)
        found = self.fused(run, inputs, tuple(modulations), attend)
        return found if isinstance(found, str) else found[::-1]

    def _attend(self, mask, turns, transformer_options: dict, readings: list) -> tuple[torch.Tensor, torch.Tensor]:
        """What the host's attention does from the output of its first Linears to that of its last ones."""
        host, attention = owner(None, HOST), self._module.attn
        parts = [[t.view(*t.shape[:2], attention.heads, -1) for t in reading] for reading in reversed(readings)]
        readings.clear()
        text, patches = parts[0][0].shape[1], transformer_options.get("patches", {}).get("attn1_patch", ())
        joint = None
        # patches want them unrotated
        if self._heads is not None and not patches:
            joint = self._heads.joint([(q, k) for q, k, _ in parts], turns)
        v = torch.cat([part[2].transpose(1, 2) for part in parts], dim=2)
        q, k = joint or _normed(attention, parts)
        del parts
        attn_mask = None
        if mask is not None:
            attn_mask = q.new_zeros((q.shape[0], 1, q.shape[2]))
            attn_mask[:, 0, :text] = mask
        extra = transformer_options.copy()
        extra["img_slice"] = [text, q.shape[2]]
        for patch in patches:
            out = patch(q, k, v, pe=turns, attn_mask=mask, extra_options=extra)
            q, k, v = (out.get(name, own) for name, own in (("q", q), ("k", k), ("v", v)))
            turns, mask = out.get("pe", turns), out.get("attn_mask", mask)
        if joint is None:
            q, k = host.apply_rope1(q, turns), host.apply_rope1(k, turns)
        y = host.optimized_attention_masked(
            q, k, v, attention.heads, attn_mask, transformer_options=transformer_options, skip_reshape=True
        )
        del q, k, v, joint
        img = attention.to_out[1](attention.to_out[0](y[:, text:, :]))
        return img, attention.to_add_out(y[:, :text, :])


def _normed(attention: nn.Module, parts: list) -> tuple[torch.Tensor, torch.Tensor]:
    """q and k [B, H, L, D] of text and image, normed and joined as the host does."""
    (txt_q, txt_k), (img_q, img_k) = ([t.transpose(1, 2).contiguous() for t in part[:2]] for part in parts)
    q = torch.cat([attention.norm_added_q(txt_q), attention.norm_q(img_q)], dim=2)
    return q, torch.cat([attention.norm_added_k(txt_k), attention.norm_k(img_k)], dim=2)


def _heads_of(attention: nn.Module) -> Heads | None:
    """What norms and rotates q and k of both streams in one pass; None when the host's way is not the known one."""
    pairs = [(attention.norm_added_q, attention.norm_added_k), (attention.norm_q, attention.norm_k)]
    reason = why_unknown(owner(attention, HOST), {ROPE: frozenset({KNOWN_ROPE})})
    if reason is not None or not all(is_rms_norm(norm) for pair in pairs for norm in pair):
        return None
    return Heads(pairs, [], [(owner(attention, HOST), ROPE)])


def _why_no_mlp(mlp: nn.Module) -> str | None:
    """None for Linear, GELU by tanh, a dropout that drops nothing, and Linear."""
    if len(mlp.net) != 3 or mlp.net[0].approximate != "tanh":
        return "the feed-forward of a block is not Linear, GELU by tanh and Linear"
    dropout = mlp.net[1]
    return None if type(dropout) is nn.Dropout and dropout.p == 0 else "the feed-forward of a block drops values"
