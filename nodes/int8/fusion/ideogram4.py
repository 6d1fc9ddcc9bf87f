"""Ideogram 4's block: single stream, norms before and after attention and feed-forward, tanh gates.

    h  = x  + tanh(g1) * norm2(attention(norm1(x) * (1 + s1)))
    x' = h  + tanh(g2) * norm4(w2(silu(w1(u)) * w3(u)))          with u = norm3(h) * (1 + s2)

The unfused block reads and writes a tensor of the size of x some thirty times; fused, it is norm1 to the codes of qkv,
from attention's output to the codes of w1 and w3, SiLU to the codes of w2, and the last addition. Attention itself, with
its rope and its output Linear, is the host's own method.
"""

from __future__ import annotations

import torch

from ....kernels.quantize_swiglu import quantize_swiglu
from ....kernels.residual_norm import Branch, Norm, modulated_norm_torch, residual_norm
from .. import short_way
from ..shared_rows import Given
from .guards import Watched, affine, release, why_unknown

# the host's methods that are repeated here or called with a stand-in, as they were when this was written
KNOWN_BLOCK = {"forward": frozenset({"d7348ccd245d4ea8"})}
KNOWN_ATTENTION = {"forward": frozenset({"45ee03c7c2f62d48"})}
KNOWN_FEED_FORWARD = {
    "forward": frozenset({"2a391b2b74c7b711"}),
    "_forward_silu_gating": frozenset({"37616c6cdf6f7e74"}),
}
KNOWN_MODEL = {"_run_conditional": frozenset({"c0a16e94dd27f3ea"})}
CHILDREN = (
    "attention",
    "feed_forward",
    "attention_norm1",
    "attention_norm2",
    "ffn_norm1",
    "ffn_norm2",
    "adaln_modulation",
)
NORMS = CHILDREN[2:6]
FEED_FORWARD = "comfy.ldm.lumina.model.FeedForward"


class Block:
    """The fused form of one block. `of` makes it; `forward` runs it or returns why it cannot, having changed nothing."""

    name = "Ideogram 4"

    __slots__ = ("_module", "_norms", "_watched")

    def __init__(self, module: torch.nn.Module):
        attention, feed_forward = module.attention, module.feed_forward
        self._module = module
        self._norms = [getattr(module, name) for name in NORMS]
        self._watched = Watched(
            parents=(module, attention, feed_forward),
            modules=(
                attention, feed_forward, *self._norms, attention.qkv, feed_forward.w1, feed_forward.w2, feed_forward.w3
            ),
            methods=(
                (type(module), "forward"), (type(attention), "forward"), (type(feed_forward), "forward"),
                (type(feed_forward), "_forward_silu_gating"), *((type(norm), "forward") for norm in self._norms),
            ),
        )  # fmt: skip

    @classmethod
    def of(cls, module: torch.nn.Module) -> Block | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        missing = [name for name in CHILDREN if not isinstance(module._modules.get(name), torch.nn.Module)]
        if missing:
            return f"a block has no {' and no '.join(missing)}"
        attention, feed_forward = module.attention, module.feed_forward
        kind = type(feed_forward)
        if f"{kind.__module__}.{kind.__qualname__}" != FEED_FORWARD:
            return f"the feed-forward is a {kind.__qualname__}"
        reason = (
            why_unknown(type(module), KNOWN_BLOCK)
            or why_unknown(type(attention), KNOWN_ATTENTION)
            or why_unknown(kind, KNOWN_FEED_FORWARD)
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

    def forward(self, run, x, attn_mask, freqs_cis, adaln_input, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        reason = self._watched.why_foreign() or _unfit(x)
        if reason is not None:
            return reason
        module = self._module
        attention, feed_forward = module.attention, module.feed_forward
        kinds = [short_way.rows_kind(linear, x) for linear in (attention.qkv, feed_forward.w1, feed_forward.w3)]
        # the width of w2's input is not that of x, but rows_kind reads the device only
        down_kind = short_way.rows_kind(feed_forward.w2, x)
        if None in kinds or down_kind is None:
            return "another pack replaced what one of qkv, w1, w2 and w3 multiplies with"
        if kinds[1] != kinds[2]:
            return "w1 and w3 are quantised differently"
        weights = [affine(norm, x) for norm in self._norms]
        try:
            reason = next((found for found in weights if isinstance(found, str)), None)
            if reason is not None:
                return reason
            modulation = module.adaln_modulation(adaln_input)
            rows = _rows_of(modulation, x)
            if rows is None:
                return f"the modulation has the shape {tuple(modulation.shape)} beside {tuple(x.shape)}"
            return self._run(run, x, attn_mask, freqs_cis, rows, transformer_options, weights, kinds, down_kind)
        finally:
            for found in weights:
                if not isinstance(found, str):
                    release(found[1])

    def _run(self, run, x, attn_mask, freqs_cis, modulation, transformer_options, weights, kinds, down_kind):
        attention, feed_forward = self._module.attention, self._module.feed_forward
        norms = [(weight[0], norm.eps) for weight, norm in zip(weights, self._norms, strict=True)]
        gates = torch.tanh(modulation[:, 1::2])
        first, second = Norm(*norms[0], modulation[:, 0]), Norm(*norms[2], modulation[:, 2])

        _, rows = residual_norm(x, None, first, rotation_group=kinds[0][3], implementation=kinds[0][1])
        given = run.shared.given = Given(x, rows, kinds[0], lambda: _normed(x, first))
        options = {} if transformer_options is None else transformer_options
        y = attention(x, attn_mask, freqs_cis, transformer_options=options)
        if given.used != 1:
            return "qkv did not take the rows that were made for it"
        del rows, given

        h, rows = residual_norm(
            x, _branch(y, norms[1], gates[:, 0]), second, rotation_group=kinds[1][3], implementation=kinds[1][1]
        )
        given = run.shared.given = Given(h, rows, kinds[1], lambda: _normed(h, second))
        gate, up = feed_forward.w1(h), feed_forward.w3(h)
        if given.used != 2:
            return "w1 and w3 did not take the rows that were made for them"
        del rows, given, y

        rows = quantize_swiglu(gate, up, rotation_group=down_kind[3], implementation=down_kind[1])
        given = run.shared.given = Given(gate, rows, down_kind, lambda: feed_forward._forward_silu_gating(gate, up))
        y = feed_forward.w2(gate)
        run.shared.given = None
        if given.used != 1:
            return "w2 did not take the rows that were made for it"
        return residual_norm(h, _branch(y, norms[3], gates[:, 1]), implementation=down_kind[1])[0]


def _unfit(x: torch.Tensor) -> str | None:
    import comfy.model_management

    if type(x) is not torch.Tensor or x.dim() != 3 or not x.is_contiguous() or not x.numel():
        return "the input is no plain tensor of tokens"
    # the host clamps float16 between SiLU and w2
    if x.dtype not in (torch.bfloat16, torch.float32):
        return f"the input is {x.dtype}"
    if x.requires_grad or comfy.model_management.in_training:
        return "the MODEL is in training"
    return None


def _rows_of(modulation: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    """[B, 1 or L, 4 K] as [rows, 4, K], one row for each image, for each token, or for all; None when it does not fit."""
    batch, tokens, width = x.shape
    fits = (1, 1), (batch, 1), (batch, tokens)
    if modulation.dim() != 3 or tuple(modulation.shape[:2]) not in fits or modulation.shape[2] != 4 * width:
        return None
    if modulation.dtype != x.dtype or modulation.device != x.device:
        return None
    return modulation.reshape(-1, 4, width)


def _branch(y: torch.Tensor, norm: tuple, gate: torch.Tensor) -> Branch:
    return Branch(y.contiguous(), *norm, gate)


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return modulated_norm_torch(x.view(-1, x.shape[-1]), norm).view(x.shape)


def without_full_mask(module: torch.nn.Module, of_class):
    """A seat for the model's `_run_conditional` that drops a mask which hides no token; None for an unknown host.

    Attention over a mask of zeros is attention without one, but slower. Whether the mask hides something is asked once
    per call: it waits for the GPU before anything of the step is queued.
    """
    if why_unknown(type(module), KNOWN_MODEL) is not None:
        return None

    def _run_conditional(x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs):
        run = short_way.current_run()
        if run is not None and attn_mask_chunk is not None and bool((attn_mask_chunk != 0).all()):
            run.fused["attention mask dropped, since it hides nothing"] += 1
            attn_mask_chunk = None
        return of_class(module, x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs)

    return _run_conditional
