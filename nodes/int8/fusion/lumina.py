"""Z-Image and Lumina 2: the blocks that are modulated, which are all but those of the text refiner."""

from __future__ import annotations

from typing import ClassVar

import torch

from .guards import why_unknown
from .sandwich import SandwichBlock

# functions that the host's block calls, repeated here
KNOWN_FUNCTIONS = {"modulate": frozenset({"611b3693c99eecf4"}), "apply_gate": frozenset({"43d984439953d762"})}


class Block(SandwichBlock):
    """The fused form of JointTransformerBlock."""

    name = "Z-Image / Lumina 2"
    known: ClassVar = {"forward": frozenset({"6e8fad7c29c55c26"})}
    modulation = "adaLN_modulation"

    __slots__ = ()

    @classmethod
    def functions(cls) -> tuple:
        """The host's functions that its block calls and that are repeated here, as (module, name)."""
        import comfy.ldm.lumina.model as host

        return tuple((host, name) for name in KNOWN_FUNCTIONS)

    @classmethod
    def of(cls, module: torch.nn.Module) -> Block | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        import comfy.ldm.lumina.model as host

        if not getattr(module, "modulation", False):
            return "a block of the text refiner has no modulation"
        return why_unknown(host, KNOWN_FUNCTIONS) or super().of(module)

    def forward(self, run, x, x_mask, freqs_cis, adaln_input=None, timestep_zero_index=None, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        if adaln_input is None or timestep_zero_index is not None:
            return "some tokens have another modulation than others"
        attention, options = self._module.attention, {} if transformer_options is None else transformer_options

        def attend(x):
            return attention(x, x_mask, freqs_cis, transformer_options=options)

        return self._fused(run, x, adaln_input, attend)
