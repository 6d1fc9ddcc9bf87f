"""Ideogram 4: its block, and its attention mask."""

from __future__ import annotations

import torch

from .. import short_way
from .guards import why_unknown
from .sandwich import KNOWN_FEED_FORWARD, SandwichBlock

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

    def _run_conditional(x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs):
        run = short_way.current_run()
        if run is not None and attn_mask_chunk is not None and bool((attn_mask_chunk != 0).all()):
            run.fused["attention mask dropped, since it hides nothing"] += 1
            attn_mask_chunk = None
        return of_class(module, x_chunk, context_chunk, attn_mask_chunk, *args, **kwargs)

    return _run_conditional
