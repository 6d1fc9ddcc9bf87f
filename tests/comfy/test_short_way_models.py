"""The short way under whole models: clones, twins, LoRAs in the weights and bypass LoRAs."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend, short_way
from packtest.short_runs import instance_attributes

pytestmark = pytest.mark.comfy


def test_whole_model_with_clone_twin_and_lora(comfy, stock_int8_model, sample, monkeypatch):
    from comfy.weight_adapter import LoRAAdapter

    ours = stock_int8_model.clone()
    host_backend.attach(ours)
    record = host_backend.record_of(ours)
    before = instance_attributes(stock_int8_model.model)
    got = sample(ours.clone(), steps=1)
    ways = record.ways_taken()
    assert ways["ways"]["resident"] > 0
    assert set(ways["ways"]) == {"resident"}
    assert record.snapshot()["calls"] == {"torch": ways["ways"]["resident"]}
    monkeypatch.setenv(short_way.SWITCH, "0")
    record.reset()
    assert torch.equal(sample(ours, steps=1), got)
    assert record.ways_taken() == {"ways": {}, "reasons": {}}
    assert record.snapshot()["calls"] == {"torch": ways["ways"]["resident"]}
    monkeypatch.delenv(short_way.SWITCH)

    key = next(k for k in ours.model_state_dict() if k.endswith(".weight") and "_blocks." in k and "norm" not in k)
    n, k = comfy.utils.get_attr(ours.model, key).shape
    patched = ours.clone()
    adapter = LoRAAdapter(set(), (torch.randn(n, 4), torch.randn(4, k), None, None, None, None))
    assert patched.add_patches({key: adapter}, 0.02)
    record.reset()
    with_lora = sample(patched, steps=1)
    assert not torch.equal(with_lora, got)
    assert set(record.ways_taken()["ways"]) == {"resident"}
    monkeypatch.setenv(short_way.SWITCH, "0")
    assert torch.equal(sample(patched, steps=1), with_lora)
    monkeypatch.delenv(short_way.SWITCH)
    record.reset()
    sample(stock_int8_model, steps=1)
    assert record.ways_taken()["ways"] == {}
    after = instance_attributes(stock_int8_model.model)
    assert {name for names in after.values() for name in names} - {n for names in before.values() for n in names} <= {
        "comfy_patched_weights", "comfy_force_cast_weights", "weight_function", "bias_function", "current_patcher"
    }  # fmt: skip


def test_bypass_lora_around_the_short_way(comfy, stock_int8_model, sample, monkeypatch):
    from comfy.weight_adapter import LoRAAdapter
    from comfy.weight_adapter.bypass import BypassInjectionManager

    ours = stock_int8_model.clone()
    host_backend.attach(ours)
    plain = sample(ours, steps=1)
    key = next(k for k in ours.model_state_dict() if k.endswith(".weight") and "_blocks." in k and "norm" not in k)
    n, k = comfy.utils.get_attr(ours.model, key).shape
    manager = BypassInjectionManager()
    manager.add_adapter(
        key, LoRAAdapter(set(), (torch.randn(n, 4), torch.randn(4, k) * 0.05, None, None, None, None)), strength=1.0
    )
    bypass = ours.clone()
    bypass.set_injections("bypass", manager.create_injections(bypass.model))
    record = host_backend.record_of(ours)
    record.reset()
    got = sample(bypass, steps=1)
    assert not torch.equal(got, plain)
    assert set(record.ways_taken()["ways"]) == {"resident"}
    monkeypatch.setenv(short_way.SWITCH, "0")
    assert torch.equal(sample(bypass, steps=1), got)
    monkeypatch.delenv(short_way.SWITCH)
    assert torch.equal(sample(ours, steps=1), plain)
    layer = comfy.utils.get_attr(ours.model, key.removesuffix(".weight"))
    assert short_way.UPPER not in vars(layer)
    assert short_way.LOWER not in vars(layer)
