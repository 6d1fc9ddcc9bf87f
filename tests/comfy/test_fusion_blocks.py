"""Fused blocks of further architectures against the host's own, bit for bit; what they share is in test_fusion.py."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend
from native_int8.nodes.int8.fusion import krea2, registry
from packtest.host_parts import fill, turns
from packtest.short_runs import fused_call

pytestmark = pytest.mark.comfy
DIM, TOKENS = 128, 12


class Row(torch.nn.Module):
    """Blocks in a row, each called with the same arguments after the first."""

    def __init__(self, blocks):
        super().__init__()
        self.layers = torch.nn.ModuleList(blocks)

    def forward(self, x, *arguments):
        for layer in self.layers:
            x = layer(x, *arguments)
        return x


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.fixture
def krea_blocks(comfy):
    from comfy.ldm.krea2.model import SingleStreamBlock

    host_backend.register()
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16)

    def make(group):
        made = Row([SingleStreamBlock(DIM, 4, 2, kvheads=2, dtype=torch.bfloat16, operations=operations) for _ in "ab"])
        fill(made, group, {})
        return made

    return make


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("group", [0, 64])
def test_krea_2_equals_the_unfused(krea_blocks, group, batch):
    blocks = krea_blocks(group)
    arguments = (random(batch, TOKENS, DIM, seed=1), random(batch, 1, 6 * DIM, seed=2), turns(TOKENS))
    expected, _ = fused_call(blocks, *arguments, fused=False)
    got, run = fused_call(blocks, *arguments)
    assert run.fused == {"Krea 2": 2} and not run.unfused
    assert torch.equal(got, expected)


def test_krea_2_with_tokens_of_a_reference_runs_unfused(krea_blocks):
    blocks = krea_blocks(0)
    arguments = (random(1, TOKENS, DIM, seed=1), random(2, 1, 6 * DIM, seed=2), turns(TOKENS), None, 5)
    expected, _ = fused_call(blocks, *arguments, fused=False)
    got, run = fused_call(blocks, *arguments)
    assert run.unfused == {"some tokens have another modulation than others": 2}
    assert torch.equal(got, expected)


def test_krea_2_with_an_attention_patch_runs_it(krea_blocks):
    blocks = krea_blocks(0)
    patch = {"patches": {"attn1_output_patch": [lambda out, extra: out * 2]}, "block_index": 0}
    plain = (random(1, TOKENS, DIM, seed=1), random(1, 1, 6 * DIM, seed=2), turns(TOKENS), None, None)
    expected, _ = fused_call(blocks, *plain, patch, fused=False)
    got, run = fused_call(blocks, *plain, patch)
    assert run.fused == {"Krea 2": 2}
    assert torch.equal(got, expected)
    assert not torch.equal(got, fused_call(blocks, *plain)[0])


def test_zeros_for_compiling_are_as_the_real_vectors(krea_blocks):
    block = registry.seats_of(krea_blocks(0)).blocks[0]
    x = random(1, TOKENS, DIM, seed=1)
    real, zeros = block.vectors(x, random(1, 1, 6 * DIM, seed=2), []), block.zeros(x)
    assert isinstance(block, krea2.Block)
    for mine, theirs in zip(zeros, real, strict=True):
        kinds = [[getattr(v, "dtype", v) for v in vectors] for vectors in (mine, theirs)]
        assert kinds[0] == kinds[1]
        assert [getattr(v, "shape", None) for v in mine] == [getattr(v, "shape", None) for v in theirs]


class Blocks(torch.nn.Module):
    """Blocks of Z-Image in a row, the first one of the text refiner."""

    def __init__(self, operations, z_image):
        super().__init__()
        settings = {"operations": operations, "device": None, "dtype": torch.bfloat16}
        sizes = (DIM, 4, 4, 64, 1.0, 1e-5, True)
        self.layers = torch.nn.ModuleList(
            joint_block()(i, *sizes, i > 0, z_image, operation_settings=settings) for i in range(3)
        )

    def forward(self, x, mask, turns, adaln_input, index=None):
        x = self.layers[0](x, mask, turns)
        for layer in self.layers[1:]:
            x = layer(x, mask, turns, adaln_input, index)
        return x


def joint_block():
    from comfy.ldm.lumina.model import JointTransformerBlock

    return JointTransformerBlock


@pytest.mark.parametrize("z_image", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("group", [0, 64])
def test_blocks_of_z_image_equal_the_unfused(comfy, batch, group, z_image):
    host_backend.register()
    blocks = Blocks(comfy.ops.mixed_precision_ops({}, torch.bfloat16), z_image)
    fill(blocks, group, {})
    g = torch.Generator().manual_seed(2)
    x = torch.randn((batch, 12, DIM), generator=g).bfloat16()
    conditions = torch.randn((batch, DIM), generator=g).bfloat16()
    arguments = (x, None, turns(12).transpose(1, 2), conditions)
    expected, _ = fused_call(blocks, *arguments, fused=False)
    got, run = fused_call(blocks, *arguments)
    assert run.fused == {"Z-Image / Lumina 2": 2}
    assert run.unfused == {"a block of the text refiner has no modulation": 1}
    assert torch.equal(got, expected)
    if batch == 2:
        _, run = fused_call(blocks, *arguments, [(0, 3)])
        assert run.unfused["some tokens have another modulation than others"] == 2
