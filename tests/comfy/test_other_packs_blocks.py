"""Packs that put their hands on a block or a Linear of it: that block runs unfused, the others fused, and all as in float."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend, patcher, speeds
from packtest import tiny

pytestmark = pytest.mark.comfy

RUN = {"size": (6, 6), "steps": 3, "cfg": 3.0}
# forwards of a run, in which both branches of the guidance are one batch
FORWARDS = 3
FUSED = {"Flux two-stream": FORWARDS, "Flux one-stream": 2 * FORWARDS}


class Stronger(torch.nn.Module):
    """A module in place of another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs) * 1.5


def object_patch(path, wrap):
    """What packs do with add_object_patch: put something of their own in the place of a method or a module."""

    def patch(model):
        twin = model.clone()
        twin.add_object_patch(f"diffusion_model.{path}", wrap(model.get_model_object(f"diffusion_model.{path}")))
        return twin, lambda: None

    return patch


def hook(path, change):
    """What packs do that keep their hook on the module until they are asked to take it away."""

    def patch(model):
        module = model.get_model_object(f"diffusion_model.{path}")
        return model.clone(), module.register_forward_hook(lambda _module, _args, y: change(y)).remove

    return patch


def scaled(forward):
    return lambda *args, **kwargs: forward(*args, **kwargs) * 1.5


def changed_stream(forward):
    """A block that changes its tokens more than it would."""
    return lambda x, *args, **kwargs: x + 1.5 * (forward(x.clone(), *args, **kwargs) - x)


# what is done -> (how, the kind of block that must not run fused, or None where the block itself is left alone)
PACKS = {
    "forward of a block": (object_patch("single_blocks.0.forward", changed_stream), "Flux one-stream"),
    "forward of a Linear": (object_patch("single_blocks.1.linear2.forward", scaled), "Flux one-stream"),
    "another norm": (object_patch("double_blocks.0.img_norm2", Stronger), "Flux two-stream"),
    "another Linear": (object_patch("double_blocks.0.txt_mlp.0", Stronger), "Flux two-stream"),
    "hook on a Linear": (hook("single_blocks.0.linear1", lambda y: y * 1.2), "Flux one-stream"),
    "hook on attention's Linear": (hook("double_blocks.0.img_attn.qkv", lambda y: y * 1.2), "Flux two-stream"),
    "hook on a block": (hook("double_blocks.0", lambda y: (y[0] * 1.2, y[1])), None),
}


@pytest.fixture(scope="module")
def models(comfy):
    """(float MODEL, INT8 MODEL with fused blocks, the same with INT8 Linears only, outputs of the first two)."""
    with torch.inference_mode():
        float_model = tiny.float_model(comfy)
        model = patcher.patch_model(float_model)[0]
        linear_only = model.clone()
        host_backend.set_speed(linear_only, speeds.LINEAR_ONLY)
        plain = [tiny.sample(comfy, one, **RUN) for one in (float_model, model)]
        assert blocks(model) == {"fused": FUSED, "unfused": {}}
        return float_model, model, linear_only, plain


def blocks(model):
    record = host_backend.record_of(model)
    found = record.blocks_fused()
    record.reset()
    return found


def patched(comfy, patch, model):
    """The latent of the patched MODEL; nothing of the patch stays."""
    twin, undo = patch(model)
    try:
        return tiny.sample(comfy, twin, **RUN)
    finally:
        undo()


@pytest.mark.parametrize("name", PACKS)
def test_a_patched_block_runs_unfused_and_as_in_float(comfy, models, cosine, name):
    float_model, model, linear_only, (float_plain, plain) = models
    patch, kind = PACKS[name]
    expected = patched(comfy, patch, float_model)
    alone = patched(comfy, patch, linear_only)
    blocks(model)
    got = patched(comfy, patch, model)
    found = blocks(model)
    # one block in each forward
    left = {block: count - (FORWARDS if block == kind else 0) for block, count in FUSED.items()}
    assert found["fused"] == {block: count for block, count in left.items() if count}, found
    assert sum(found["unfused"].values()) == (FORWARDS if kind else 0), found
    assert torch.equal(got, alone)
    assert (expected - float_plain).norm() > 0.02 * float_plain.norm()
    assert cosine(got, expected) > 0.99
    assert cosine(got - plain, expected - float_plain) > 0.9
    # and afterwards nothing is left of it
    assert torch.equal(tiny.sample(comfy, model, **RUN), plain)
    assert blocks(model) == {"fused": FUSED, "unfused": {}}
