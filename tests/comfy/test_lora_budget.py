"""Patches on INT8 weights x how much of the model is on the device: outputs, codes, flags and memory counts."""

import inspect
import logging

import pytest
import torch
from native_int8.nodes.int8 import host_backend, loader, save
from packtest.loras import add_lora, int8_linears, lora_file
from torch.utils._python_dispatch import TorchDispatchMode

from .conftest import LATENT, MODEL_FILE

pytestmark = pytest.mark.comfy

KINDS = ["lora", "lokr", "loha", "dora", "diff"]
BUDGETS = [0.0, 0.25, 0.5, 1.0]


@pytest.fixture
def output(comfy):
    """A function (MODEL) -> one output of its apply_model, with its weights wherever they are."""

    def run(model):
        options = {"wrappers": comfy.patcher_extension.copy_nested_dicts(model.wrappers)}
        generator = torch.Generator().manual_seed(7)
        image = torch.randn(LATENT, generator=generator)
        text = torch.randn((1, 64, 384), generator=generator)
        return model.model.apply_model(image, torch.tensor([0.7]), c_crossattn=text, transformer_options=options)

    return run


def load(model, share: float):
    """Load `share` of the bytes of `model`, as ComfyUI does when memory is short; everything before it is unloaded."""
    model.detach()
    if share == 1.0:
        model.partially_load(model.load_device, 1e32)
    else:
        model.partially_load(model.load_device, max(share * model.model_size(), 1))


def int8_calls(model, run):
    """What `run` returns, and how many INT8 products it took, by kernel and way."""
    record = host_backend.record_of(model)
    record.reset()
    y = run(model)
    return y, record.snapshot()["calls"]


@pytest.mark.parametrize("kind", KINDS)
def test_b17_b18_outputs_do_not_depend_on_the_budget(kind, model, output, caplog):
    patched = add_lora(model, lora_file(model, kind))
    load(model, 1.0)
    plain, calls = int8_calls(model, output)
    load(patched, 1.0)
    expected = output(patched)
    assert not torch.equal(expected, plain)
    for share in BUDGETS:
        load(patched, share)
        y, found = int8_calls(patched, output)
        assert torch.equal(y, expected), share
        # B19: an offloaded layer with a patch is multiplied in INT8, too
        assert found == calls
    assert "ERROR" not in caplog.text


@pytest.mark.parametrize("kind", KINDS)
def test_b02_b14_b15_b16_unload_and_reload_between_prompts(kind, model, output):
    patched = add_lora(model, lora_file(model, kind))
    load(patched, 1.0)
    expected = output(patched)
    size, shapes = model.model_size(), scale_shapes(model)
    for share in (0.25, 0.5, 0.9, 1.0):
        patched.partially_unload(patched.offload_device, share * size)
        assert weight_functions(patched) == 0
        assert torch.equal(output(patched), expected)
        patched.partially_load(patched.load_device, share * size / 2)
        assert torch.equal(output(patched), expected)
        assert scale_shapes(model) == shapes
        patched.partially_load(patched.load_device, 1e32)
        assert torch.equal(output(patched), expected)
        assert 0 <= patched.loaded_size() <= size
    load(model, 1.0)
    plain = output(model)
    assert not torch.equal(plain, expected)
    load(patched, 0.5)
    load(model, 0.5)
    assert torch.equal(output(model), plain)


def scale_shapes(model):
    return {name: tuple(module.weight._params.scale.shape) for name, module in int8_linears(model).items()}


def weight_functions(model):
    return sum(len(module.weight_function) for module in int8_linears(model).values())


@pytest.mark.parametrize("kind", KINDS)
def test_b20_patches_are_baked_once_and_not_per_step(kind, comfy, model, output, monkeypatch):
    patched = add_lora(model, lora_file(model, kind))
    baked = []
    original = comfy.lora.calculate_weight
    monkeypatch.setattr(comfy.lora, "calculate_weight", lambda *a, **k: (baked.append(a[2]), original(*a, **k))[1])
    load(patched, 0.5)
    for _ in range(8):
        output(patched)
    patched.partially_unload(patched.offload_device, model.model_size() // 4)
    patched.partially_load(patched.load_device, 1e32)
    output(patched)
    assert sorted(baked) == ([] if kind == "lora" else sorted(f"{name}.weight" for name in int8_linears(model)))


@pytest.mark.parametrize("kind", KINDS[1:])
def test_b02_baked_codes_are_the_hosts(kind, stock_int8_model, model):
    file = lora_file(model, kind)
    own = add_lora(stock_int8_model, file)
    load(own, 1.0)
    expected = codes(own)
    ours = add_lora(model, file)
    own.detach()
    for share in (1.0, 0.25):
        load(ours, share)
        for name, (q, scale) in codes(ours).items():
            assert torch.equal(q, expected[name][0]) and torch.equal(scale, expected[name][1]), name


def codes(model):
    # wherever they lie
    return {
        name: tuple(part.cpu().clone() for part in (m.weight._qdata, m.weight._params.scale))
        for name, m in int8_linears(model).items()
    }


def test_mixed_kinds_on_one_layer_and_on_different_layers(model, output):
    layers = list(int8_linears(model))
    lora, lokr = lora_file(model), lora_file(model, "lokr", seed=1)
    half = {name: value for name, value in lokr.items() if any(name.startswith(f"{layer}.") for layer in layers[::2])}
    assert 0 < len(half) < len(lokr)
    patched = add_lora(add_lora(model, lora), half)
    plan = patched.native_int8_plan()
    assert set(plan.baked) == {f"{layer}.weight" for layer in layers[::2]}
    assert set(plan.beside) == {f"{layer}.weight" for layer in layers[1::2]}
    load(patched, 1.0)
    expected = output(patched)
    load(patched, 0.3)
    assert torch.equal(output(patched), expected)


def test_b04_b13_lora_on_a_float_layer_is_the_hosts(model, output, caplog):
    layer = "diffusion_model.img_in"
    module = model.model.diffusion_model.img_in
    file = {
        f"{layer}.lora_up.weight": torch.randn(module.out_features, 4) * 0.1,
        f"{layer}.lora_down.weight": torch.randn(4, module.in_features) * 0.1,
    }
    load(model, 1.0)
    plain = output(model)
    patched = add_lora(model, file)
    assert patched.native_int8_plan().beside == {}
    load(patched, 1.0)
    expected = output(patched)
    assert not torch.equal(expected, plain)
    for share in BUDGETS[:-1]:
        load(patched, share)
        if model.model.get_dtype_inference() == torch.float32:
            assert torch.allclose(output(patched), expected, rtol=1e-4, atol=1e-4)
        else:
            # the host adds the patch in the type of the run when it casts the layer, and in float32 when it loads it
            assert error(output(patched), expected) <= 3e-2
    assert "ERROR" not in caplog.text


class Products(TorchDispatchMode):
    """Remembers the operand types of every product of matrices, however it is written."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        if name in ("mm", "addmm", "bmm", "baddbmm", "linear", "mul", "einsum"):
            self.seen.append((name, {t.dtype for t in args if isinstance(t, torch.Tensor)}))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_b01_codes_never_meet_a_lora_product(kind, model, output):
    patched = add_lora(model, lora_file(model, kind))
    with Products() as products:
        load(patched, 0.25)
        output(patched)
    assert any(name in ("mm", "addmm", "bmm") for name, _ in products.seen)
    assert [found for found in products.seen if torch.int8 in found[1]] == []


def test_b33_patches_change_nothing_for_other_packs(comfy, model):
    from comfy.patcher_extension import CallbacksMP

    patched = add_lora(model, lora_file(model))
    before = {key: list(patches) for key, patches in patched.patches.items()}
    seen = []
    patched.add_callback(CallbacksMP.ON_LOAD, lambda patcher, *_: seen.append(set(patcher.patches)))
    load(patched, 0.5)
    patched.partially_unload(patched.offload_device, 1e9)
    assert {key: list(patches) for key, patches in patched.patches.items()} == before
    assert seen == [set(before)]


@pytest.mark.parametrize("share", BUDGETS)
@pytest.mark.parametrize("kind", ["lora", "lokr"])
def test_b145_saved_with_the_lora_baked_in_once(kind, share, comfy, model, output, tmp_path, cosine):
    patched = add_lora(model, lora_file(model, kind, size=0.5))
    load(patched, share)
    expected = output(patched)
    path = tmp_path / "ours.safetensors"
    assert save.save_model(patched, str(path)) == len(int8_linears(model))
    hosts = tmp_path / "hosts.safetensors"
    # the stock ModelSave's own function, from the state that the MODEL is in and from the one it asks for
    comfy.utils.save_torch_file(patched.state_dict_for_saving(), str(hosts))
    nodes = tmp_path / "nodes.safetensors"
    comfy.sd.save_checkpoint(str(nodes), patched)
    load(model, 1.0)
    plain = output(model)
    for file in (path, hosts, nodes):
        again = loader.load_model(str(file))
        load(again, 1.0)
        assert error(output(again), expected) < 0.05 < error(plain, expected)
    load(patched, share)
    assert torch.equal(output(patched), expected)


def error(got, expected):
    return float((got - expected).norm() / expected.norm())


def test_b40_the_stacks_are_part_of_what_a_run_needs(model, output):
    patched = add_lora(model, lora_file(model))
    shape = [1, 128, 64, 64]
    stacks = patched.memory_required(shape) - model.memory_required(shape)
    load(patched, 1.0)
    assert patched.memory_required(shape) == model.memory_required(shape) + stacks
    size = model.model.get_dtype_inference().itemsize
    assert stacks == sum(32 * (m.in_features + m.out_features) * size for m in int8_linears(model).values())
    output(patched)
    assert patched.memory_required(shape) == model.memory_required(shape)
    assert patched.model_size() == model.model_size()
    patched.detach()
    assert patched.memory_required(shape) == model.memory_required(shape) + stacks


def test_an_interrupted_load_leaves_the_model_usable(model, output, monkeypatch):
    load(model, 1.0)
    plain = output(model)
    patched = add_lora(model, lora_file(model, "lokr"))
    load(patched, 1.0)
    expected = output(patched)
    original, left = type(patched).patch_weight_to_device, [5]

    def fail(self, *args, **kwargs):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return original(self, *args, **kwargs)

    patched.detach()
    monkeypatch.setattr(type(patched), "patch_weight_to_device", fail)
    with pytest.raises(KeyboardInterrupt):
        load(patched, 1.0)
    monkeypatch.undo()
    for tried, wanted in ((model, plain), (patched, expected)):
        load(tried, 1.0)
        assert torch.equal(output(tried), wanted)


def test_b15_every_way_to_load_is_covered(comfy):
    """A way of the host that is new and takes force_patch_weights must be looked at before it is listed here."""
    from native_int8.nodes.int8 import lora_patcher

    host = comfy.model_patcher.ModelPatcher
    ways = {
        name
        for name, function in inspect.getmembers(host, inspect.isfunction)
        if "force_patch_weights" in inspect.signature(function).parameters
    }
    # patch_model loads through load
    assert ways == {"load", "partially_load", "partially_unload", "patch_model"}
    assert ways - {"patch_model"} <= vars(lora_patcher._Loading).keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="test_start_options.py runs the real patcher on a GPU")
def test_dynamic_vram_sees_what_it_bakes_itself_and_no_low_rank_patch(comfy, model, monkeypatch):
    """The dynamic patcher needs a GPU to load; here its methods only record what they are given."""
    from native_int8.nodes.int8 import lora_patcher

    dynamic, seen = comfy.model_patcher.ModelPatcherDynamic, []
    monkeypatch.setattr(dynamic, "load", lambda self, *_, **more: seen.append((set(self.patches), more)))
    monkeypatch.setattr(dynamic, "__del__", lambda self: None)
    layers = [f"{name}.weight" for name in int8_linears(model)]
    lora = {key: value for key, value in lora_file(model).items() if not key.startswith(layers[0][:-7] + ".")}
    lokr = {key: value for key, value in lora_file(model, "lokr").items() if key.startswith(layers[0][:-7] + ".")}
    patched = add_lora(add_lora(model, lora), lokr)
    patched.__class__ = lora_patcher._subclass(dynamic)
    patched.load(patched.load_device, dirty=True)
    assert seen == [({layers[0]}, {"dirty": True})]
    assert set(patched.patches) == set(layers) and patched.backup == {}
    branch = patched.native_int8_branch
    assert len(branch.modules) == len(layers) - 1
    # on a CPU the host's clone leaves the dynamic class; ours stays
    assert type(patched.clone()) is type(model)
    patched.__class__ = type(model)


def test_the_loaders_own_model_takes_loras(comfy, output, caplog):
    with caplog.at_level(logging.INFO, "native_int8.lora"):
        model = loader.load_model(str(MODEL_FILE))
        patched = add_lora(model, lora_file(model))
        load(patched, 1.0)
    assert f"{len(int8_linears(model))} run it beside the product, 0 have it in the weight" in caplog.text
    load(model, 1.0)
    plain = output(model)
    load(patched, 1.0)
    assert not torch.equal(output(patched), plain)
