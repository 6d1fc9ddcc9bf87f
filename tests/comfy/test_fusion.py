"""Fused blocks in the host's own model class: equal to the unfused ones bit for bit, and aside whenever they cannot be."""

import contextlib

import pytest
import torch
from native_int8.nodes.int8 import host_backend, short_way
from native_int8.nodes.int8.fusion import registry
from packtest.host_parts import fill

pytestmark = pytest.mark.comfy
LAYERS, DIM, TEXT = 2, 128, 5
SIZES = {
    "num_layers": LAYERS, "num_attention_heads": 2, "attention_head_dim": 64, "intermediate_size": 256, "adaln_dim": 32,
    "llm_features_dim": 48, "in_channels": 16, "mrope_section": (6, 5, 5),
}  # fmt: skip
BLOCK = "Ideogram 4"


@pytest.fixture(params=[0, 64], ids=["plain", "rotated"])
def model(comfy, request):
    """A small Ideogram 4 with INT8 block Linears, as on a card that computes in bfloat16."""
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    host_backend.register()
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    made = Ideogram4Transformer2DModel(dtype=torch.bfloat16, operations=operations, **SIZES)
    generator = torch.Generator().manual_seed(0)
    floats = Ideogram4Transformer2DModel(dtype=torch.bfloat16, operations=comfy.ops.manual_cast, **SIZES).state_dict()
    state = {}
    for name, value in floats.items():
        random = torch.randn(value.shape, generator=generator)
        state[name] = (random * value.shape[-1] ** -0.5 if value.dim() > 1 else 1 + random * 0.1).bfloat16()
    made.load_state_dict(state)
    for layer in made.layers:
        for part in (layer.attention, layer.feed_forward):
            fill(part, request.param, {})
    return made


def inputs(batch=1, side=4, mask=None, context=True):
    g = torch.Generator().manual_seed(1)
    x = torch.randn((batch, SIZES["in_channels"], side, side), generator=g).bfloat16()
    text = torch.randn((batch, TEXT, SIZES["llm_features_dim"]), generator=g).bfloat16() if context else None
    return x, torch.full((batch,), 0.7), text, mask


def call(model, *arguments, fused=True):
    """The output, and what the run says it did."""
    from comfy_kitchen.registry import registry as kitchen

    runs = []
    with (
        kitchen.use_backend("native_int8"),
        short_way.inside(model, runs.append),
        registry.inside(model) if fused else contextlib.nullcontext(),
    ):
        y = model(*arguments)
    return y, runs[0]


@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_unfused_blocks(model, batch):
    expected, run = call(model, *inputs(batch), fused=False)
    assert not run.fused and not run.unfused
    got, run = call(model, *inputs(batch))
    assert run.fused == {BLOCK: LAYERS} and not run.unfused
    assert torch.equal(got, expected)
