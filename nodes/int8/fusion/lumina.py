"""Z-Image and Lumina 2: the blocks that are modulated, which are all but those of the text refiner."""

from __future__ import annotations

import torch

from .sandwich import KNOWN_FEED_FORWARD, SandwichBlock

HOST = "comfy.ldm.lumina.model"


class Block(SandwichBlock):
    """The fused form of JointTransformerBlock."""

    name = "Z-Image / Lumina 2"
    known = KNOWN_FEED_FORWARD | {
        ("", "forward"): "6e8fad7c29c55c26",
        (HOST, "modulate"): "611b3693c99eecf4",
        (HOST, "apply_gate"): "43d984439953d762",
    }
    modulation = "adaLN_modulation"

    __slots__ = ()

    @classmethod
    def of(cls, module: torch.nn.Module) -> Block | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        if not getattr(module, "modulation", False):
            return "a block of the text refiner has no modulation"
        return super().of(module)

    def forward(self, run, x, x_mask, freqs_cis, adaln_input=None, timestep_zero_index=None, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        if adaln_input is None or timestep_zero_index is not None:
            return "some tokens have another modulation than others"
        options = {} if transformer_options is None else transformer_options

        def attend(x):
            return self._attention(x, x_mask, freqs_cis, transformer_options=options)

        return self.fused(run, x, adaln_input, attend)
