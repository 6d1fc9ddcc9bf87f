"""INT8 Patch Model in a real ComfyUI: what the twin keeps, and that the incoming MODEL stays as it was."""

import gc
import types
import weakref

import pytest
import torch
from native_int8.nodes.int8 import host_backend, loader, patcher
from native_int8.nodes.int8.report import REPORT_KEY
from safetensors.torch import load_file, save_file

from .conftest import MODEL_FILE

pytestmark = pytest.mark.comfy

# INT8 with rotation, two steps, against float; the demo holds a whole image to 0.995
CLOSE = 0.995


@pytest.fixture
def lora_file(tmp_path):
    """A rank-4 LoRA for every block Linear, strong enough to see."""
    generator = torch.Generator().manual_seed(11)
    state = {}
    for key, weight in load_file(MODEL_FILE).items():
        if key.endswith(".weight") and "_blocks." in key and weight.ndim == 2 and "norm" not in key:
            name = "diffusion_model." + key.removesuffix(".weight")
            n, k = weight.shape
            size = weight.float().std().item()
            state[f"{name}.lora_A.weight"] = torch.randn(4, k, generator=generator) * size
            state[f"{name}.lora_B.weight"] = torch.randn(n, 4, generator=generator) * 0.3
    path = tmp_path / "lora.safetensors"
    save_file(state, path)
    return str(path)


@pytest.fixture
def with_lora(comfy, lora_file):
    """A function (model, strength=1.0) -> model with the LoRA, by the stock loader's own function."""

    def load(model, strength=1.0):
        weights = comfy.utils.load_torch_file(lora_file)
        return comfy.sd.load_lora_for_models(model, None, weights, strength, 0)[0]

    return load


def fingerprint(model):
    """What must not change on a MODEL: its parts by identity, its weights by value."""
    return {
        "patches": {key: len(patches) for key, patches in model.patches.items()},
        "uuid": model.patches_uuid,
        "objects": dict(model.object_patches),
        "wrappers": {kind: dict(entries) for kind, entries in model.wrappers.items()},
        "injections": dict(model.injections),
        "attachments": dict(model.attachments),
        "options": repr(model.model_options),
        "init": model.cached_patcher_init,
        "model": id(model.model),
        "modules": [id(module) for module in model.model.modules()],
        "weights": {key: value.double().sum().item() for key, value in model.model_state_dict().items()},
    }


def calls(model):
    return sum(host_backend.record_of(model).snapshot()["calls"].values())


def test_float_model_becomes_int8_and_stays_close(float_model, sample, cosine):
    twin, report = patcher.patch_model(float_model)
    assert patcher.is_int8(twin)
    assert not patcher.is_int8(float_model)
    assert report.int8_layers > 0
    assert report.block_coverage >= 0.95
    assert twin.get_attachment(REPORT_KEY) is report
    assert twin.model is not float_model.model
    assert cosine(sample(twin), sample(float_model)) > CLOSE
    assert calls(twin) % report.int8_layers == 0
    assert calls(twin) > 0


def test_int8_twin_is_half_the_size_by_the_hosts_count(float_model):
    twin, _ = patcher.patch_model(float_model)
    assert twin.model_size() == sum(v.numel() * v.element_size() for v in twin.model_state_dict().values())
    assert twin.model_size() < 0.62 * float_model.model_size()


@pytest.mark.fault("B37")
def test_incoming_model_is_untouched_and_bypass_is_bit_equal(float_model, sample, with_lora):
    before_picture = sample(float_model)
    patched_input = with_lora(float_model)
    before = fingerprint(float_model), fingerprint(patched_input)
    twin, _ = patcher.patch_model(patched_input)
    sample(twin, steps=1)
    assert (fingerprint(float_model), fingerprint(patched_input)) == before
    assert torch.equal(sample(float_model), before_picture)


def test_two_models_in_one_process_do_not_meet(comfy, float_model, sample):
    first, _ = patcher.patch_model(float_model)
    alone = sample(first)
    other_float = comfy.sd.load_diffusion_model(str(MODEL_FILE))
    second, _ = patcher.patch_model(other_float, loader.LoadOptions(rotation=False))
    float_picture, second_picture = sample(float_model), sample(second)
    counted = calls(first)
    assert torch.equal(sample(first), alone)
    assert calls(first) == counted + calls(second)
    assert torch.equal(sample(second), second_picture)
    assert torch.equal(sample(float_model), float_picture)
    assert not torch.equal(alone, second_picture)


def test_int8_model_only_gets_the_kernels(stock_int8_model, sample):
    twin, report = patcher.patch_model(stock_int8_model)
    assert twin.model is stock_int8_model.model
    assert host_backend.is_attached(twin)
    assert not host_backend.is_attached(stock_int8_model)
    again, _ = patcher.patch_model(twin)
    sample(again, steps=1)
    assert report.int8_layers > 0
    assert calls(again) % report.int8_layers == 0


def test_clone_twice_keeps_everything(float_model, sample):
    twin, report = patcher.patch_model(float_model)
    picture = sample(twin)
    copy = twin.clone().clone()
    assert copy.get_attachment(REPORT_KEY) is report
    assert host_backend.is_attached(copy)
    assert torch.equal(sample(copy), picture)


@pytest.mark.fault("B10")
def test_lora_before_and_after_give_the_same(float_model, sample, cosine, with_lora):
    plain = sample(float_model)
    with_float = sample(with_lora(float_model))
    assert cosine(plain, with_float) < 0.98
    before, _ = patcher.patch_model(with_lora(float_model))
    after = with_lora(patcher.patch_model(float_model)[0])
    assert before.patches.keys() == after.patches.keys()
    assert torch.equal(sample(before), sample(after))
    assert cosine(sample(after), with_float) > CLOSE
    assert sum(host_backend.record_of(after).declined.values()) == 0
    # taken off again, the weights are what they were
    twin, _ = patcher.patch_model(float_model)
    bare = sample(twin)
    strong = with_lora(twin)
    pictures = [sample(strong), sample(twin), sample(strong), sample(twin)]
    assert torch.equal(pictures[0], pictures[2])
    assert torch.equal(pictures[1], bare)
    assert torch.equal(pictures[3], bare)


def test_a_lora_that_is_baked_in_when_the_node_runs_counts_once(comfy, float_model, sample, with_lora):
    reference = sample(patcher.patch_model(with_lora(float_model))[0])
    busy = with_lora(float_model)
    # leaves the LoRA in the float weights, as after a queue that ran
    sample(busy, steps=1)
    assert busy.backup
    busy.cached_patcher_init = None
    assert torch.equal(sample(patcher.patch_model(busy)[0]), reference)


def test_model_sampling_patch_is_kept(float_model, sample, cosine):
    from comfy_extras.nodes_model_advanced import ModelSamplingFlux

    node = ModelSamplingFlux()
    shifted = node.patch(float_model, max_shift=4.0, base_shift=3.0, width=128, height=128)[0]
    twin, report = patcher.patch_model(shifted)
    assert twin.get_model_object("model_sampling") is shifted.get_model_object("model_sampling")
    assert report.notes == ()
    expected = sample(shifted)
    assert cosine(sample(twin), expected) > CLOSE
    assert cosine(sample(float_model), expected) < 0.99
    after = node.patch(patcher.patch_model(float_model)[0], max_shift=4.0, base_shift=3.0, width=128, height=128)[0]
    assert torch.equal(sample(after), sample(twin))


def test_options_wrappers_callbacks_and_attachments_are_kept(float_model, sample):
    seen = []
    model = float_model.clone()
    model.set_model_sampler_post_cfg_function(lambda args: seen.append("post_cfg") or args["denoised"])

    def wrap(executor, *args, **kwargs):
        seen.append("wrapper")
        return executor(*args, **kwargs)

    model.add_wrapper_with_key("diffusion_model", "mine", wrap)
    model.add_callback_with_key("on_pre_run", "mine", lambda patcher: seen.append(id(patcher.model)))
    model.set_attachments("mine", {"a": 1})
    twin, report = patcher.patch_model(model)
    assert twin.get_attachment("mine") == {"a": 1}
    assert report.notes == ()
    sample(twin, steps=1)
    assert {"post_cfg", "wrapper", id(twin.model)} <= set(seen)
    assert id(model.model) not in seen


def test_a_bound_forward_patch_moves_to_the_twins_module(float_model, sample):
    seen = []
    layer = "single_blocks.0.linear2"
    model = float_model.clone()
    original = type(model.model.diffusion_model.get_submodule(layer)).forward

    def forward(self, *args, **kwargs):
        seen.append(self)
        return type(self).forward(self, *args, **kwargs)

    module = model.model.diffusion_model.get_submodule(layer)
    model.add_object_patch(f"diffusion_model.{layer}.forward", types.MethodType(forward, module))
    twin, report = patcher.patch_model(model)
    sample(twin, steps=1)
    assert report.notes == ()
    assert {id(module) for module in seen} == {id(twin.model.diffusion_model.get_submodule(layer))}
    assert type(module).forward is original


def test_a_patch_that_holds_float_modules_is_left_out_and_said(float_model, sample):
    model = float_model.clone()
    block = model.model.diffusion_model.single_blocks[0]
    model.add_object_patch("diffusion_model.single_blocks.0", torch.nn.Sequential(block))
    twin, report = patcher.patch_model(model)
    assert len(report.notes) == 1
    assert "diffusion_model.single_blocks.0" in report.notes[0]
    assert "diffusion_model.single_blocks.0" not in twin.object_patches


def test_a_wrapper_that_reaches_into_the_float_model_is_said(float_model):
    block = float_model.model.diffusion_model.single_blocks[0]

    def wrap(executor, *args, **kwargs):
        return executor(*args, **kwargs) if block.training is not None else None

    model = float_model.clone()
    model.add_wrapper_with_key("diffusion_model", "reaching", wrap)
    notes = patcher.patch_model(model)[1].notes
    assert len(notes) == 1
    assert "wrapper reaching" in notes[0]


def test_bypass_lora_moves_to_the_twin(comfy, float_model, sample, cosine, lora_file):
    weights = comfy.utils.load_torch_file(lora_file)
    bypass = comfy.sd.load_bypass_lora_for_models(float_model, None, weights, 1.0, 0)[0]
    expected = sample(bypass)
    twin, report = patcher.patch_model(bypass)
    assert report.notes == ()
    assert cosine(sample(twin), expected) > CLOSE
    assert cosine(sample(patcher.patch_model(float_model)[0]), expected) < 0.98
    assert torch.equal(sample(bypass), expected)


def test_the_host_can_load_the_twin_again(float_model, sample):
    twin, _ = patcher.patch_model(float_model)
    picture = sample(twin)
    deep = twin.clone(force_deepcopy=True)
    assert deep.model is not twin.model
    assert patcher.is_int8(deep)
    assert torch.equal(sample(deep), picture)


@pytest.mark.parametrize("origin", ["other loader", "no loader"])
def test_without_a_file_the_weights_in_memory_are_used(comfy, float_model, sample, origin):
    from_file = sample(patcher.patch_model(float_model)[0])
    state = comfy.utils.load_torch_file(str(MODEL_FILE))
    model = comfy.sd.load_diffusion_model_state_dict(dict(state))
    if origin == "other loader":
        model.cached_patcher_init = (load_again, (str(MODEL_FILE),))
    before = fingerprint(model)
    twin, _ = patcher.patch_model(model)
    assert torch.equal(sample(twin), from_file)
    assert fingerprint(model) == before
    deep = twin.clone(force_deepcopy=True)
    assert deep.model is not twin.model
    assert torch.equal(sample(deep), from_file)


def load_again(path, disable_dynamic=False):
    import comfy.sd
    import comfy.utils

    return comfy.sd.load_diffusion_model_state_dict(comfy.utils.load_torch_file(path), disable_dynamic=disable_dynamic)


def test_packed_weights_are_refused(float_model):
    class Packed(torch.Tensor):
        pass

    float_model.cached_patcher_init = None
    module = float_model.model.diffusion_model.single_blocks[0].linear2
    weight = torch.Tensor._make_subclass(Packed, module.weight.detach())
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(patcher.PatchError, match=r"linear2\.weight is packed in a .*Packed"):
        patcher.patch_model(float_model)


@pytest.mark.fault("B102", "B103")
def test_model_types_stay_float(float_model):
    twin, _ = patcher.patch_model(float_model)
    assert twin.model_dtype().is_floating_point
    assert twin.model.get_dtype_inference().is_floating_point
    assert twin.model.diffusion_model.dtype.is_floating_point
    for module in twin.model.diffusion_model.modules():
        if getattr(module, "layout_type", None):
            assert module.weight.dtype.is_floating_point


def test_a_dead_twin_frees_its_weights(comfy, float_model, sample):
    twin, _ = patcher.patch_model(float_model)
    sample(twin, steps=1)
    model = weakref.ref(twin.model)
    del twin
    comfy.model_management.unload_all_models()
    gc.collect()
    assert model() is None


@pytest.mark.parametrize("order", ["before", "after"])
def test_torch_compile_before_and_after_compiles_the_twin(comfy, float_model, sample, order):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    plain, report = patcher.patch_model(float_model)
    expected = sample(plain, steps=1)
    layers, per_step = report.int8_layers, calls(plain)
    model = float_model.clone() if order == "before" else patcher.patch_model(float_model)[0]
    set_torch_compile_wrapper(model, backend="eager")
    twin = patcher.patch_model(model)[0] if order == "before" else model
    got = sample(twin, steps=1)
    assert torch.allclose(got, expected, atol=1e-4)
    assert calls(twin) == per_step
    assert per_step % layers == 0
