"""torch.compile on the architectures that have fused blocks: compiled, the host's own forward is traced, without a break."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend
from packtest.host_parts import fill, turns
from torch._dynamo.utils import counters

from .test_fusion import SIZES, call, inputs, model
from .test_fusion_blocks import DIM, Blocks

pytestmark = pytest.mark.comfy
__all__ = ["model"]


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True)
def attention_of_a_gpu(comfy, monkeypatch):
    """The host's attention for a CPU asks for free memory, which no graph can hold."""
    import comfy.ldm.ideogram4.model as one
    import comfy.ldm.lumina.model as other
    from comfy.ldm.modules import attention

    for module in (one, other):
        for name in ("optimized_attention", "optimized_attention_masked"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, attention.attention_pytorch)


def graphs():
    assert sum(counters["graph_break"].values()) == 0, dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def prompts(words, side):
    x, t, _, mask = inputs(side=side)
    text = torch.randn((1, words, SIZES["llm_features_dim"]), generator=torch.Generator().manual_seed(words)).bfloat16()
    return x, t, text, mask


CASES = [(words, side) for side in (6, 8, 10, 12, 14, 18) for words in (11, 21, 37)]


def test_ideogram_4_as_a_whole(model):
    twin = torch.compile(model, backend="eager", dynamic=True)
    for words, side in CASES:
        arguments = prompts(words, side)
        expected, _ = call(model, *arguments)
        got, run = call(twin, *arguments)
        assert torch.equal(got, expected)
        assert not run.fused
    assert graphs() == 1


def test_ideogram_4_by_blocks(model):
    layers = [torch.compile(layer, backend="eager", dynamic=True) for layer in model.layers]
    expected = [call(model, *prompts(*case))[0] for case in CASES]
    for i, layer in enumerate(layers):
        model.layers[i] = layer
    got = [call(model, *prompts(*case))[0] for case in CASES]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert graphs() == 1


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_blocks_of_z_image(comfy, whole):
    host_backend.register()
    blocks = Blocks(comfy.ops.mixed_precision_ops({}, torch.bfloat16), True)
    fill(blocks, 64, {})
    g = torch.Generator().manual_seed(2)
    conditions = torch.randn((1, DIM), generator=g).bfloat16()
    cases = [
        (torch.randn((1, rows, DIM), generator=g).bfloat16(), None, turns(rows).transpose(1, 2), conditions)
        for rows in (12, 22, 34, 46)
    ]
    expected = [call(blocks, *case)[0] for case in cases]
    if not whole:
        for i, layer in enumerate(list(blocks.layers)):
            blocks.layers[i] = torch.compile(layer, backend="eager", dynamic=True)
    twin = torch.compile(blocks, backend="eager", dynamic=True) if whole else blocks
    got = [call(twin, *case)[0] for case in cases]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    # blocks: those with modulation and the one without
    assert graphs() == (1 if whole else 2)
