"""How far a block that inductor compiled is from the eager one, and why.

Inductor computes in fp32 from one opaque call to the next, where eager PyTorch rounds to bfloat16 after each operation. A
float block differs by that, too. In an INT8 block a value that was rounded another way may get another code, so that it
differs about twice as much; nothing else makes a difference.
"""

import pytest
import torch
from native_int8.nodes.int8 import traced
from packtest.short_runs import call

from .test_compile_blocks import attention_of_a_gpu, fresh
from .test_fusion import DIM, SIZES, model, turns_of

pytestmark = pytest.mark.comfy
__all__ = ["attention_of_a_gpu", "fresh", "model"]

ROWS = 40


def arguments():
    g = torch.Generator().manual_seed(3)
    x, condition = (
        torch.randn(shape, generator=g).bfloat16() for shape in ((1, ROWS, DIM), (1, 1, SIZES["adaln_dim"]))
    )
    return x, None, turns_of(ROWS), condition


def make_float(block):
    """Give a block's INT8 Linears what their codes stand for, in bfloat16."""
    from comfy.quant_ops import QuantizedTensor

    for module in block.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            module.weight = torch.nn.Parameter(weight.dequantize().bfloat16(), requires_grad=False)
            module.layout_type = None
    return block


class Inside(torch.nn.Module):
    """A MODEL of one block, which is called compiled or not."""

    def __init__(self, block, compiled=None):
        super().__init__()
        self.block, self._called = block, [block if compiled is None else compiled]

    def forward(self, *given):
        return self._called[0](*given)


def differences(block, given):
    """The norm of what compiling changes in the output, over the norm of what the block adds to its input."""
    torch._dynamo.reset()
    eager, _ = call(Inside(block), *given)
    compiled, _ = call(Inside(block, torch.compile(block, backend="inductor")), *given)
    return float((compiled - eager).float().norm() / (eager - given[0]).float().norm())


@pytest.mark.parametrize("model", [0], indirect=True, ids=["plain"])
@pytest.mark.parametrize("choice", traced.CHOICES)
def test_an_int8_block_differs_by_what_inductor_does_not_round(model, monkeypatch, choice):
    monkeypatch.setenv(traced.SWITCH, choice)
    given, block = arguments(), model.layers[0]
    found = []
    for kind in (lambda block: block, make_float):
        block = kind(block)
        with torch._inductor.config.patch(emulate_precision_casts=True):
            emulated = differences(block, given)
        found.append((emulated, differences(block, given)))
    int8, floating = found
    assert 0 < floating[1] <= 0.02
    assert int8[1] <= 3 * floating[1]
    # some versions of inductor do not emulate eager rounding on a CPU, not even of a float block
    assert int8[0] <= (1e-3 if floating[0] <= 1e-3 else 3 * floating[0])
