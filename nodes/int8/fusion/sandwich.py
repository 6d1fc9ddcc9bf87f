"""Blocks with a norm before and after attention and feed-forward, and tanh gates: Ideogram 4, Z-Image, Lumina 2."""

from __future__ import annotations

from typing import ClassVar

import torch

from ....kernels.residual_norm import Norm
from .gated import Ending, GatedBlock, Vectors
from .guards import affine
from .pieces import by_row

# the host's feed-forward that these share, as it was when this was written
KNOWN_FEED_FORWARD = {
    ("feed_forward", "forward"): "2a391b2b74c7b711",
    ("feed_forward", "_forward_silu_gating"): "37616c6cdf6f7e74",
}


class SandwichBlock(GatedBlock):
    """`GatedBlock` whose child `modulation` makes four vectors: scale and gate of attention, scale and gate of the rest."""

    parts = ("attention", "feed_forward")
    readers = ("qkv",)
    swiglu = ("w1", "w3", "w2")
    norms = ("attention_norm1", "attention_norm2", "ffn_norm1", "ffn_norm2")
    traceable = True
    modulation: ClassVar[str]

    __slots__ = ()

    @classmethod
    def of(cls, module: torch.nn.Module) -> SandwichBlock | str:
        """The fused block of `module`, or one sentence that says why there is none."""
        if module._modules.get(cls.modulation) is None:
            return f"a block has no {cls.modulation}"
        for name in cls.norms:
            norm = module._modules.get(name)
            if type(norm).__module__ != "comfy.ops" or type(norm).__name__ != "RMSNorm" or norm.eps is None:
                return f"{name} of a block is a {type(norm).__name__}"
        return super().of(module)

    def vectors(self, x, condition, borrowed):
        """As `GatedBlock.vectors`; condition: what the modulation's Linear reads."""
        children = self._module._modules
        weights = []
        for name in self.norms:
            found = affine(children[name], x)
            if isinstance(found, str):
                return found
            weights.append((found[0], children[name].eps))
            borrowed.append(found[1])
        modulation = by_row(children[self.modulation](condition), 4, x)
        return modulation if isinstance(modulation, str) else _vectors(weights, modulation)

    def zeros(self, x):
        """As `GatedBlock.zeros`."""
        norms = [(x.new_zeros(x.shape[-1]), self._module._modules[name].eps) for name in self.norms]
        return _vectors(norms, x.new_zeros((1, 4, x.shape[-1])))


def _vectors(norms: list[tuple], modulation: torch.Tensor) -> Vectors:
    gates = torch.tanh(modulation[:, 1::2])
    return Vectors(
        Norm(*norms[0], modulation[:, 0]),
        Ending(*norms[1], gates[:, 0]),
        Norm(*norms[2], modulation[:, 2]),
        Ending(*norms[3], gates[:, 1]),
    )
