"""Weights that change while sampling or by merging: hook LoRAs and ModelMerge on INT8 MODELs."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend, lora_branch, patcher
from packtest.loras import add_lora, int8_linears, lora_file
from safetensors import safe_open

from .conftest import LATENT, PROMPTS_FILE

pytestmark = pytest.mark.comfy


@pytest.fixture
def hooked(comfy):
    """A function (MODEL, hooks of the positive prompt, hooks of the negative one) -> latent after two steps."""

    def run(model, positive=None, negative=None):
        with safe_open(PROMPTS_FILE, "pt") as file:
            states = file.get_tensor("penguin").float().unsqueeze(0)[:, :64]
        sides = []
        for hooks, text in ((positive, states), (negative, torch.zeros_like(states))):
            side = [[text, {}]]
            sides.append(comfy.hooks.set_hooks_for_conditioning(side, hooks) if hooks else side)
        noise = comfy.sample.prepare_noise(torch.zeros(LATENT), 0)
        latent = torch.zeros(LATENT)
        return comfy.sample.sample(
            model, noise, 2, 3.0, "euler", "simple", *sides, latent, disable_pbar=True, seed=0
        )  # fmt: skip

    return run


def hook_lora(comfy, file, strength=1.0):
    return comfy.hooks.create_hook_lora(dict(file), strength, 0.0)


def test_a_hook_lora_on_both_prompts_is_the_lora(comfy, model, hooked):
    plain, file = hooked(model), lora_file(model, size=0.5)
    expected = hooked(add_lora(model, file, 0.8))
    hooks = hook_lora(comfy, file, 0.8)
    assert not torch.equal(expected, plain)
    for _ in range(2):
        assert torch.allclose(hooked(model, hooks, hooks), expected, atol=1e-4)
        assert torch.equal(hooked(model), plain)


def test_hook_loras_add_to_loaded_ones_and_keep_int8(comfy, model, hooked):
    one, two = lora_file(model, seed=1), lora_file(model, seed=2)
    loaded = add_lora(model, one)
    expected = hooked(add_lora(loaded, two))
    hooks = hook_lora(comfy, two)
    host_backend.record_of(model).reset()
    assert torch.allclose(hooked(loaded, hooks, hooks), expected, atol=1e-4)
    calls = host_backend.record_of(model).snapshot()
    assert sum(calls["calls"].values()) % len(int8_linears(model)) == 0 and not calls["declined"]
    # on one prompt only, and then on none
    half = hooked(loaded, hooks)
    assert not torch.allclose(half, expected, atol=1e-3)
    assert torch.equal(hooked(loaded, hooks), half)
    assert not torch.allclose(hooked(loaded), half, atol=1e-3)


def test_two_prompts_with_their_own_hooks_keep_their_stacks(comfy, model, hooked, monkeypatch):
    one, two = (hook_lora(comfy, lora_file(model, seed=seed)) for seed in (1, 2))
    made = []
    original = lora_branch.stack
    monkeypatch.setattr(lora_branch, "stack", lambda *a: (made.append(a[0]), original(*a))[1])
    first = hooked(model, one, two)
    # two steps, two groups of hooks: each stack is made once
    assert len(made) == 2 * len(int8_linears(model))
    assert torch.equal(hooked(model, one, two), first)
    assert not torch.allclose(hooked(model, two, one), first, atol=1e-3)


def test_hooks_with_other_patches_are_refused_in_words(comfy, model, hooked):
    plain = hooked(model)
    hooks = hook_lora(comfy, lora_file(model, "loha"))
    with pytest.raises(RuntimeError, match="two small matrices is needed"):
        hooked(model, hooks, hooks)
    assert torch.equal(hooked(model), plain)


@pytest.mark.parametrize("ratio", [0.25, 1.0])
def test_models_merge(ratio, comfy, stock_int8_model, model, hooked, cosine):
    """What ModelMergeSimple does, with the second MODEL's LoRA."""
    other = add_lora(patcher.patch_model(stock_int8_model)[0], lora_file(model, "lokr", size=0.5))
    merged = model.clone()
    patches = other.get_key_patches("diffusion_model.")
    assert not any(key.endswith((".weight_scale", ".comfy_quant")) for key in patches)
    for key in patches:
        merged.add_patches({key: patches[key]}, 1.0 - ratio, ratio)
    got, plain = hooked(merged), hooked(model)
    if ratio == 1.0:
        assert cosine(got, plain) > 0.999
    else:
        assert cosine(got, hooked(other)) > cosine(got, plain)
