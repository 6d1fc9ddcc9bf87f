"""Ideogram 4: its block, and its attention mask."""

from __future__ import annotations

import weakref

import torch

from .. import short_way
from .guards import why_unknown
from .sandwich import KNOWN_FEED_FORWARD, SandwichBlock

HIDES_NOTHING = "the attention mask hides nothing"
KNOWN_MODEL = {"_run_conditional": frozenset({"c0a16e94dd27f3ea"})}


class Block(SandwichBlock):
    """The fused form of Ideogram4TransformerBlock."""

    name = "Ideogram 4"
    known = KNOWN_FEED_FORWARD | {("", "forward"): "d7348ccd245d4ea8"}
    modulation = "adaln_modulation"

    __slots__ = ()

    def forward(self, run, x, attn_mask, freqs_cis, adaln_input, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        options = {} if transformer_options is None else transformer_options

        def attend(x):
            return self._attention(x, attn_mask, freqs_cis, transformer_options=options)

        return self.fused(run, x, adaln_input, attend)


def without_full_mask(module: torch.nn.Module, of_class):
    """A seat for the model's `_run_conditional` that drops a mask which hides no token; None for an unknown host.

    Attention over a mask of zeros is attention without one, but slower. Whether the mask hides something is asked once
    per call: it waits for the GPU before anything of the step is queued.
    """
    if why_unknown(type(module), KNOWN_MODEL) is not None:
        return None
    # the seat is kept for as long as the model lives, which it must not prolong
    kept = weakref.ref(module)

    def _run_conditional(x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs):
        run = short_way.current_run()
        if run is not None and attn_mask_chunk is not None:
            hides_nothing = run.facts.get(HIDES_NOTHING)
            if _hides_nothing(attn_mask_chunk) if hides_nothing is None else hides_nothing:
                run.fused["attention mask dropped, since it hides nothing"] += 1
                attn_mask_chunk = None
        return of_class(kept(), x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs)

    return _run_conditional


def facts(kwargs: dict) -> dict[str, bool]:
    """What the seat of a call with `kwargs` asks of its tensors; for who must know it before the call."""
    mask = kwargs.get("attention_mask")
    return {} if mask is None else {HIDES_NOTHING: _hides_nothing(mask)}


def _hides_nothing(mask: torch.Tensor) -> bool:
    return bool((mask != 0).all())
