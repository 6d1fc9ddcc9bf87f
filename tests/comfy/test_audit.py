"""The audit names what ran, of our MODELs, of the host's and of other packs'."""

import pytest
import torch
from native_int8.nodes.int8 import audit, host_backend, loader
from packtest import tiny
from packtest.loras import add_lora, int8_linears, lora_file

pytestmark = pytest.mark.comfy


def look(model):
    latent, text = {"samples": torch.zeros((1, tiny.CHANNELS, 6, 6))}, [[tiny.conditioning(512), {}]]
    return audit.audit(model, latent, text)


def by_name(found):
    return {layer.name: layer for layer in found.layers}


@pytest.fixture
def model(comfy):
    return tiny.int8_model(comfy)


@pytest.fixture
def stock(comfy):
    """The same weights on the host's own kernels."""
    return loader.load_state_dict(tiny.state(comfy))[0]


def test_our_model(model):
    found = look(model)
    names = {name.removeprefix("diffusion_model.") for name in int8_linears(model)}
    for name, layer in by_name(found).items():
        assert (layer.verdict == audit.INT8) == (name in names), layer
        assert layer.rows > 0 and layer.ms > 0
    assert found.count(audit.INT8) == len(names) and found.count(audit.FAKE) == 0
    assert {layer.kernel for layer in found.layers if layer.verdict == audit.INT8} == {"native_int8 torch"}
    kept = by_name(found)["img_in"]
    assert kept.verdict == audit.FLOAT and kept.reason
    assert 0 < sum(layer.ms for layer in found.layers) < found.step_ms
    assert f"{len(names)} of {len(names)} INT8 layers multiply in INT8" in found.summary()
    assert all(name in found.table() for name in names)
    assert found.notes == ()
    # nothing stays behind
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.model.modules())


def test_a_lora_beside_is_no_float_layer(model):
    found = look(add_lora(model, lora_file(model)))
    assert found.count(audit.FAKE) == 0
    assert found.count(audit.INT8) == len(int8_linears(model))


def test_the_hosts_own_int8(stock):
    found = look(stock)
    kernels = {layer.kernel for layer in found.layers if layer.verdict == audit.INT8}
    assert kernels == {"comfy_kitchen::int8_linear"}
    assert found.count(audit.INT8) == len(int8_linears(stock))
    assert "INT8 Patch Model" in found.notes[0]


def test_b19_b144_fake_int8_is_found_with_its_reason(stock, model):
    for one in (stock, model):
        # the host expands such a weight at every call, as it does with a LoRA on an offloaded layer
        twin = one.clone()
        twin.add_weight_wrapper("diffusion_model.single_blocks.0.linear2.weight", lambda weight: weight)
        found = look(twin)
        fake = [layer for layer in found.layers if layer.verdict == audit.FAKE]
        assert [layer.name for layer in fake] == ["single_blocks.0.linear2"]
        assert fake[0].kernel.startswith("aten::")
        assert "LoRA on an offloaded layer" in fake[0].reason
        assert "1 fake INT8" in found.summary()


class Pack(torch.nn.Module):
    """A Linear of another pack: int8 codes that it expands, or really multiplies."""

    def __init__(self, linear, really):
        super().__init__()
        self.in_features, self.out_features, self.really = linear.in_features, linear.out_features, really
        weight = linear.weight.detach().float()
        self.register_buffer("scale", weight.abs().amax(1) / 127)
        self.register_buffer("codes", (weight / self.scale[:, None]).round().to(torch.int8))

    def forward(self, x):
        if not self.really:
            return torch.nn.functional.linear(x, self.codes.to(x.dtype) * self.scale[:, None].to(x.dtype))
        rows = x.reshape(-1, x.shape[-1]).float()
        scale = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
        sums = torch._int_mm((rows / scale).round().to(torch.int8), self.codes.t())
        return (sums * scale * self.scale).to(x.dtype).reshape(*x.shape[:-1], -1)


def test_other_packs(comfy):
    model = tiny.float_model(comfy)
    block = model.model.diffusion_model.single_blocks[0]
    block.linear1, block.linear2 = Pack(block.linear1, True), Pack(block.linear2, False)
    found = by_name(look(model))
    assert found["single_blocks.0.linear1"].verdict == audit.INT8
    assert found["single_blocks.0.linear1"].kernel == "aten::_int_mm"
    assert found["single_blocks.0.linear2"].verdict == audit.FAKE
    assert found["single_blocks.1.linear1"].verdict == audit.FLOAT
    assert not host_backend.is_attached(model)
