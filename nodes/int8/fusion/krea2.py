"""Krea 2: its block, with norms in float32, shifts, and gates as they are."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.residual_norm import Norm
from .gated import Ending, GatedBlock, Vectors
from .pieces import by_row


class Block(GatedBlock):
    """The fused form of SingleStreamBlock."""

    name = "Krea 2"
    known: ClassVar = {
        ("", "forward"): "452a2f48ec6db631",
        ("prenorm", "forward"): "85ea0f6c57810a03",
        ("postnorm", "forward"): "85ea0f6c57810a03",
        ("mlp", "forward"): "bb0affb28460aa15",
    }
    parts = ("attn", "mlp")
    readers = ("wq", "wk", "wv", "gate")
    swiglu = ("gate", "up", "down")
    norms = ("prenorm", "postnorm")

    __slots__ = ()

    def forward(self, run, x, vec, freqs, mask=None, timestep_zero_index=None, transformer_options=None):
        """What the class's forward returns, or a sentence."""
        if timestep_zero_index is not None:
            return "some tokens have another modulation than others"
        options = {} if transformer_options is None else transformer_options

        def attend(x):
            return self._attention(x, freqs, mask, transformer_options=options)

        return self.fused(run, x, vec, attend)

    def vectors(self, x, condition, borrowed):
        """As `GatedBlock.vectors`; condition: the vector that all blocks share, to which each adds its own."""
        made = self._module.mod(condition)
        rows = [by_row(vector, 1, x) for vector in made]
        wrong = next((row for row in rows if isinstance(row, str)), None)
        if len(rows) != 6 or wrong is not None:
            return wrong or f"the modulation has {len(rows)} vectors"
        norms = [
            (norm.scale.to(device=x.device, dtype=torch.float32) + 1.0, norm.eps)
            for norm in (self._module.prenorm, self._module.postnorm)
        ]
        return _vectors(norms, [row[:, 0] for row in rows])

    def zeros(self, x):
        """As `GatedBlock.zeros`."""
        norms = [(torch.zeros(x.shape[-1], device=x.device), self._module._modules[name].eps) for name in self.norms]
        return _vectors(norms, list(x.new_zeros((6, 1, x.shape[-1]))))


def _vectors(norms: list[tuple], modulation: list[torch.Tensor]) -> Vectors:
    scale, shift, gate, post_scale, post_shift, post_gate = modulation
    return Vectors(
        Norm(*norms[0], scale, shift),
        Ending(None, 0.0, gate),
        Norm(*norms[1], post_scale, post_shift),
        Ending(None, 0.0, post_gate),
    )
