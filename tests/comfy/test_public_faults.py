"""Faults that users reported of other packs, named by their number in tests/FAULTS.md, where no other file tests them."""

import pytest
import torch
from native_int8.nodes.int8 import patcher, short_way
from packtest import tiny
from packtest.loras import _lora, add_lora, int8_linears, lora_file
from packtest.short_runs import K, N, build_pair, call

pytestmark = pytest.mark.comfy

RUN = {"size": (6, 6), "steps": 2, "cfg": 3.0}


@pytest.fixture
def model(comfy):
    return tiny.int8_model(comfy)


def tensors_of(module):
    """Each tensor that can be reached from an INT8 Linear, by name."""
    found = {name: value for name, value in vars(module).items() if isinstance(value, torch.Tensor)}
    found |= dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    weight = found.pop("weight")
    found |= {"codes": weight._qdata}
    found |= {name: value for name, value in vars(weight._params).items() if isinstance(value, torch.Tensor)}
    return found


@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_b05_a_lora_reaches_int8_and_float_layers_of_one_model(comfy, model, cosine, kind):
    float_model = tiny.float_model(comfy)
    file = lora_file(model, kind, size=0.5)
    generator = torch.Generator().manual_seed(9)
    for name, n, k in (("txt_in", 256, 384), ("single_stream_modulation.lin", 768, 256)):
        file |= _lora(f"diffusion_model.{name}", n, k, 0.5, generator)
    only_float = {key: value for key, value in file.items() if "txt_in" in key or "modulation" in key}
    plain, partly = tiny.sample(comfy, model, **RUN), tiny.sample(comfy, add_lora(model, only_float), **RUN)
    got, expected = (tiny.sample(comfy, add_lora(one, file), **RUN) for one in (model, float_model))
    assert not torch.equal(plain, partly) and not torch.equal(partly, got)
    assert cosine(got, expected) > 0.99
    assert cosine(got - plain, expected - tiny.sample(comfy, float_model, **RUN)) > 0.95


@pytest.mark.parametrize("per_row", [True, False], ids=["row scales", "one scale"])
def test_b25_b54_every_part_of_a_layer_moves_with_it(model, per_row):
    import dataclasses

    module = next(iter(int8_linears(model).values()))
    if not per_row:
        weight = module.weight
        params = dataclasses.replace(weight._params, scale=weight._params.scale.flatten()[0])
        module.weight = torch.nn.Parameter(type(weight)(weight._qdata, short_way.LAYOUT, params), requires_grad=False)
    before = tensors_of(module)
    assert {"codes", "scale"} <= before.keys() and before["scale"].numel() == (module.out_features if per_row else 1)
    named = module.state_dict()
    assert {"weight", "weight_scale"} <= named.keys()
    module.to("meta")
    after = tensors_of(module)
    assert after.keys() == before.keys()
    assert {value.device.type for value in after.values()} == {"meta"}
    assert after["codes"].dtype == torch.int8 and after["scale"].shape == before["scale"].shape


def test_b27_no_float_copy_of_a_weight_stays_anywhere(comfy, model):
    patched = add_lora(add_lora(model, lora_file(model)), lora_file(model, "lokr", seed=2))
    for share in (0.5, 1.0):
        patched.detach()
        patched.partially_load(patched.load_device, share * patched.model_size() if share < 1 else 1e32)
        budget = patched.loaded_size()
        options = {"wrappers": comfy.patcher_extension.copy_nested_dicts(patched.wrappers)}
        text, image = tiny.conditioning(512), torch.zeros((1, tiny.CHANNELS, 6, 6))
        patched.model.apply_model(image, torch.tensor([0.7]), c_crossattn=text, transformer_options=options)
        assert patched.loaded_size() == budget <= share * patched.model_size() + 1
        for module in int8_linears(model).values():
            size = module.in_features * module.out_features
            assert [n for n, v in tensors_of(module).items() if v.is_floating_point() and v.numel() >= size] == []


def test_b29_a_move_to_where_it_is_copies_nothing(model):
    module = next(iter(int8_linears(model).values()))
    before = tensors_of(module)["codes"].data_ptr()
    model.model.to(model.load_device)
    module.to(model.load_device)
    # the host makes a new tensor of the few scales
    assert tensors_of(module)["codes"].data_ptr() == before


def test_b72_an_int8_linear_works_outside_of_a_run(comfy, model):
    """Some models call a part of themselves while they prepare the conditioning, before they are loaded."""
    model.detach()
    module = next(iter(int8_linears(model).values()))
    x = torch.randn((1, 5, module.in_features))
    expected = x @ module.weight.dequantize().float().t()
    for one in (x, x.half(), x.bfloat16()):
        got = module(one)
        assert got.dtype == one.dtype
        assert (got.float() - expected).norm() < 0.05 * expected.norm()
    tiny.sample(comfy, model, **RUN)
    assert torch.equal(module(x), module(x))


def test_b87_latents_with_any_strides(comfy, model):
    text, image = tiny.conditioning(512), torch.randn((2, tiny.CHANNELS, 6, 8))
    comfy.model_management.load_models_gpu([model])
    options = {"wrappers": comfy.patcher_extension.copy_nested_dicts(model.wrappers)}

    def run(x):
        return model.model.apply_model(
            x, torch.tensor([0.7, 0.7]), c_crossattn=text.repeat(2, 1, 1), transformer_options=options
        )

    expected = run(image)
    wide = torch.randn((2, tiny.CHANNELS, 6, 16))
    wide[..., ::2] = image
    turned = image.transpose(2, 3).contiguous().transpose(2, 3)
    for view in (image.to(memory_format=torch.channels_last), wide[..., ::2], turned):
        assert not view.is_contiguous() and torch.equal(view, image)
        assert torch.equal(run(view), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_b100_b104_int8_and_kept_layers_compute_in_one_type(comfy, cosine, dtype):
    """A file of bf16 with some layers in other types, computed in each type that a card may want."""
    state = {key: value.to(torch.float32 if "norm" in key else value.dtype) for key, value in tiny.state(comfy).items()}
    state["txt_in.weight"] = state["txt_in.weight"].half()
    plain = comfy.sd.load_diffusion_model_state_dict(dict(state))
    expected = tiny.sample(comfy, plain, **RUN)
    chosen = patcher.patch_model(plain)[0]
    chosen.set_model_compute_dtype(dtype)
    got = tiny.sample(comfy, chosen, **RUN)
    assert torch.isfinite(got).all() and cosine(got, expected) > 0.99


def test_b102_a_block_that_casts_to_the_type_of_a_weight(comfy):
    """Models do x.to(self.proj.weight.dtype); in int8 that would be zeros."""
    pair, x = build_pair(comfy), torch.randn((3, K)) * 0.01
    assert pair.first.weight.dtype.is_floating_point
    got, _ = call(pair.first, x.to(pair.first.weight.dtype))
    expected, _ = call(pair.first, x)
    assert torch.equal(got, expected) and got.shape == (3, N)
