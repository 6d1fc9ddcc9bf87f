"""The life of a LoRA on an INT8 MODEL: added, changed, removed, cloned, repeated, and gone without a trace."""

import gc
import weakref

import pytest
import torch
from native_int8.nodes.int8 import host_backend, patcher, short_way
from packtest.loras import add_lora, int8_linears, lora_file

pytestmark = pytest.mark.comfy


def tensors_alive():
    # by type: isinstance would wake up lazy modules of torch
    return sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())


def test_b34_removed_and_disabled_loras_leave_no_bit(model, sample):
    plain = sample(model)
    file = lora_file(model)
    weak, strong = add_lora(model, file, 0.2), add_lora(model, file, 1.0)
    first = sample(strong)
    assert torch.equal(sample(add_lora(model, file, 0.0)), plain)
    assert not torch.equal(sample(weak), plain)
    assert torch.equal(sample(model), plain)
    assert torch.equal(sample(strong), first)
    assert torch.equal(sample(model), plain)


def test_b35_b36_ten_runs_change_no_weight_and_keep_no_memory(model, sample):
    patched = add_lora(model, lora_file(model))
    expected = sample(patched)
    codes = {name: module.weight._qdata.clone() for name, module in int8_linears(model).items()}
    gc.collect()
    before = tensors_alive()
    for _ in range(10):
        assert torch.equal(sample(patched, steps=2), expected)
    gc.collect()
    assert tensors_alive() <= before
    assert all(torch.equal(module.weight._qdata, codes[name]) for name, module in int8_linears(model).items())


def test_other_strengths_and_more_loras_reload_nothing(comfy, model, sample, monkeypatch):
    sample(model)
    patchers = {type(model), *type(model).__mro__}
    loads = []
    for kind in patchers:
        if "patch_weight_to_device" in vars(kind):
            monkeypatch.setattr(kind, "patch_weight_to_device", lambda *a, **k: loads.append(a[1]))
        if "load" in vars(kind) and kind is not type(model):
            original = vars(kind)["load"]
            monkeypatch.setattr(kind, "load", lambda *a, _f=original, **k: (loads.append("load"), _f(*a, **k)))
    pointers = {name: module.weight._qdata.data_ptr() for name, module in int8_linears(model).items()}
    patched = model
    for strength in (1.0, 0.3):
        patched = add_lora(patched, lora_file(model), strength)
        sample(patched)
    sample(model)
    assert loads == []
    assert {name: module.weight._qdata.data_ptr() for name, module in int8_linears(model).items()} == pointers


def test_clones_are_independent(model, sample):
    plain = sample(model)
    with_lora = add_lora(model, lora_file(model, seed=1))
    twice = with_lora.clone().clone()
    expected = sample(twice)
    other = add_lora(twice, lora_file(model, seed=2))
    assert not torch.equal(sample(other), expected)
    for _ in range(2):
        assert torch.equal(sample(with_lora), expected)
        assert torch.equal(sample(model), plain)
        assert torch.equal(sample(twice), expected)


def test_b31_another_model_in_between_changes_nothing(stock_int8_model, float_model, model, sample):
    one, other = add_lora(model, lora_file(model)), patcher.patch_model(float_model)[0]
    expected, alone = sample(one), sample(other)
    for _ in range(2):
        assert torch.equal(sample(other), alone)
        assert torch.equal(sample(one), expected)


def test_b37_nothing_is_patched_for_others(comfy, stock_int8_model, model, sample):
    host = comfy.model_patcher.ModelPatcher
    before = {name: id(value) for name, value in vars(host).items()}
    functional = {name: id(value) for name, value in vars(torch.nn.functional).items()}
    own = sample(stock_int8_model)
    sample(add_lora(model, lora_file(model)))
    assert {name: id(value) for name, value in vars(host).items()} == before
    assert {name: id(value) for name, value in vars(torch.nn.functional).items()} == functional
    assert type(stock_int8_model) is host and isinstance(model, host)
    assert torch.equal(sample(stock_int8_model), own)


def test_an_error_in_the_model_leaves_no_stack_behind(model, inside):
    patched = add_lora(model, lora_file(model))
    module = next(iter(int8_linears(model).values()))

    def fail():
        assert short_way.BRANCH in vars(module)
        inside(patched, lambda: None)
        assert short_way.BRANCH in vars(module)
        raise ZeroDivisionError

    inside(patched, lambda: None)
    before = set(vars(module))
    with pytest.raises(ZeroDivisionError):
        inside(patched, fail)
    assert set(vars(module)) == before


def test_the_hosts_own_clone_of_the_same_weights_bakes_as_ever(stock_int8_model, model, sample):
    file = lora_file(model)
    own = add_lora(stock_int8_model, file)
    baked, beside = sample(own), sample(add_lora(model, file))
    ours = patcher.patch_model(own)[0]
    for _ in range(2):
        assert torch.equal(sample(ours), beside)
        assert torch.equal(sample(own), baked)
    host_backend.detach(ours)
    assert torch.equal(sample(ours), baked)


def test_nothing_outlives_the_model(model, sample):
    file = lora_file(model)
    patched = add_lora(model, file)
    sample(patched)
    branch = weakref.ref(patched.native_int8_branch)
    stacks = [weakref.ref(low_rank.up) for _, low_rank in branch()._made[1]]
    assert stacks
    adapter = weakref.ref(next(iter(patched.patches.values()))[0][1])
    attributes = {name: set(vars(module)) for name, module in int8_linears(model).items()}
    assert not any(short_way.BRANCH in names for names in attributes.values())
    sample(model)
    assert all(stack() is None for stack in stacks)
    del patched, file
    gc.collect()
    assert branch() is None and adapter() is None
