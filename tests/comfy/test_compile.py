"""torch.compile on INT8 MODELs, through the host's wrapper: as many graphs as the float MODEL, and no more for anything of ours.

The whole model and single blocks, as the stock node and KJNodes' compile. The host's attention for a CPU asks for free
memory, which no graph can hold; these tests take the one that it uses on a GPU.
"""

import pytest
import torch
from native_int8.nodes.int8 import host_backend, patcher
from packtest import tiny
from packtest.loras import add_lora, lora_file
from packtest.short_runs import K, build_pair, call, int8_state
from torch._dynamo.utils import counters

pytestmark = pytest.mark.comfy

# no number of tokens here equals another size of the model, which dynamic shapes would take for a rule
SIZES = ((10, 10), (8, 12), (16, 9), (9, 8), (12, 14), (6, 20))
WORDS = (530, 560, 600)
KINDS = ("double_blocks", "single_blocks")


@pytest.fixture(autouse=True)
def fresh(comfy, monkeypatch):
    from comfy.ldm.flux import math
    from comfy.ldm.modules.attention import attention_pytorch

    monkeypatch.setattr(math, "optimized_attention", attention_pytorch)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def model(comfy):
    return tiny.int8_model(comfy)


def compiled(model, whole=False, backend="eager", dynamic=True):
    """A clone of `model` that compiles its blocks, or all of it."""
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    twin = model.clone()
    diffusion_model = twin.model.diffusion_model
    blocks = [f"diffusion_model.{kind}.{i}" for kind in KINDS for i in range(len(getattr(diffusion_model, kind)))]
    set_torch_compile_wrapper(twin, backend=backend, dynamic=dynamic, keys=[] if whole else blocks)
    return twin


def graphs():
    assert sum(counters["graph_break"].values()) == 0, dict(counters["graph_break"])
    return counters["stats"]["unique_graphs"]


def test_blocks_take_one_graph_a_kind_for_every_size_prompt_and_strength(comfy, model):
    twin, file = compiled(model), lora_file(model)
    for size in SIZES:
        for words in WORDS:
            assert torch.equal(tiny.sample(comfy, twin, size, words), tiny.sample(comfy, model, size, words))
    # one for the double block, one for both single blocks
    assert graphs() == len(KINDS)
    plain = tiny.sample(comfy, model, SIZES[0], WORDS[0])
    for i, strength in enumerate((0.2, 0.5, 0.8, 1.2)):
        got = tiny.sample(comfy, add_lora(twin, file, strength), SIZES[i], WORDS[i % 3])
        assert torch.equal(got, tiny.sample(comfy, add_lora(model, file, strength), SIZES[i], WORDS[i % 3]))
        assert not torch.equal(got, plain)
    # with LoRAs and without are two graphs of a kind
    assert graphs() == 2 * len(KINDS)
    several = twin
    for seed in range(9):
        several = add_lora(several, lora_file(model, seed=seed), 0.1)
        if seed in (1, 5, 8):
            tiny.sample(comfy, several, SIZES[seed % 6], WORDS[0])
    tiny.sample(comfy, twin, SIZES[3], WORDS[1])
    assert graphs() == 2 * len(KINDS)


def test_the_stock_node_compiles_as_often_as_for_the_float_model(comfy, model):
    found = []
    for one in (tiny.float_model(comfy), model):
        torch._dynamo.reset()
        counters.clear()
        twin = compiled(one, whole=True, dynamic=None)
        for size, words in ((SIZES[0], 530), (SIZES[0], 560), (SIZES[1], 560)):
            assert torch.equal(tiny.sample(comfy, twin, size, words), tiny.sample(comfy, one, size, words))
        found.append(graphs())
    # the host's model makes a picture's positions with Python numbers, so that each size has its graph
    assert found[0] == found[1] <= 3


def test_the_stock_node_takes_our_model(comfy, model):
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    out = TorchCompileModel.execute(model, "inductor").result[0]
    assert host_backend.is_attached(out)
    wrappers = list(out.wrappers["apply_model"])
    assert wrappers == ["native_int8", "torch.compile"]


@pytest.mark.parametrize("whole", [False, True], ids=["blocks", "whole"])
def test_the_order_of_nodes_does_not_matter(comfy, whole):
    expected = tiny.sample(comfy, patcher.patch_model(tiny.float_model(comfy))[0])
    before = patcher.patch_model(compiled(tiny.float_model(comfy), whole))[0]
    after = compiled(patcher.patch_model(tiny.float_model(comfy))[0], whole)
    for twin in (before, after):
        counters.clear()
        assert torch.equal(tiny.sample(comfy, twin), expected)
        assert graphs() == (1 if whole else len(KINDS))
        assert sum(host_backend.record_of(twin).calls.values()) > 0


def test_what_runs_inside_a_graph_is_counted_and_declined_nowhere(comfy, model):
    twin, record = compiled(model), host_backend.record_of(model)
    tiny.sample(comfy, model)
    expected = record.snapshot()
    record.reset()
    tiny.sample(comfy, twin)
    assert record.snapshot() == expected
    assert expected["declined"] == {}


def test_fake_and_functional_ops_agree_with_the_real_ones(comfy, model):
    twin = compiled(model, backend="aot_eager")
    file = lora_file(model)
    for one, other in ((twin, model), (add_lora(twin, file, 0.7), add_lora(model, file, 0.7))):
        got, expected = tiny.sample(comfy, one), tiny.sample(comfy, other)
        assert (got - expected).abs().max() <= torch.finfo(torch.bfloat16).eps * expected.abs().max()
    assert graphs() == 2 * len(KINDS)


def test_inductor_runs_a_layer_to_the_last_bit(comfy):
    layer, x = build_pair(comfy).first, torch.randn((2, 7, K)).bfloat16()
    expected, _ = call(layer, x)
    got, _ = call(torch.compile(layer, dynamic=True), x)
    assert torch.equal(got, expected)


class Column(torch.nn.Module):
    """Equal layers that are called one after the other, each with a compiled method as a block has."""

    def __init__(self, comfy, count):
        super().__init__()
        operations = comfy.ops.mixed_precision_ops({}, torch.float32)
        host_backend.register()
        self.layers = torch.nn.ModuleList(operations.Linear(K, 48, bias=False) for _ in range(count))
        state = {}
        for i in range(count):
            state |= int8_state(comfy, f"layers.{i}", seed=i)
        self.load_state_dict(state)

    def forward(self, x):
        return torch.stack([layer(x) for layer in self.layers])


def test_b131_thirty_equal_layers_compile_once(comfy):
    column, x = Column(comfy, 30), torch.randn((5, K))
    expected, _ = call(column, x)
    layers = [torch.compile(layer, backend="eager", dynamic=True) for layer in column.layers]
    runs = torch.stack([_called(column, layer, x) for layer in layers])
    assert torch.equal(runs, expected)
    assert graphs() == 1
    assert counters["frames"]["total"] == 1


def _called(column, layer, x):
    """One compiled layer of `column` while all of it is on the short way."""
    from comfy_kitchen.registry import registry
    from native_int8.nodes.int8 import short_way

    with registry.use_backend("native_int8"), short_way.inside(column, lambda run: None):
        return layer(x)


def test_b137_sixty_five_layers_with_a_lora_reach_no_limit(comfy, caplog):
    from native_int8.kernels import LowRank
    from native_int8.nodes.int8 import short_way

    column, x = Column(comfy, 65), torch.randn((5, K))
    for i, layer in enumerate(column.layers):
        low_rank = LowRank(torch.randn((32, K)), torch.randn((48, 32)) * i)
        layer.__dict__[short_way.BRANCH] = low_rank
    expected, _ = call(column, x)
    layers = [torch.compile(layer, backend="eager", dynamic=True) for layer in column.layers]
    got = torch.stack([_called(column, layer, x) for layer in layers])
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-3)
    assert graphs() == 1
    assert "recompile" not in caplog.text


def test_b138_lengths_and_batches_compile_no_more_than_twice(comfy):
    pair = build_pair(comfy)
    twin = torch.compile(pair, backend="eager")
    for batch, length in ((1, 77), (1, 154), (2, 231), (4, 77), (1, 77), (4, 231)):
        x = torch.randn((batch, length, K))
        got, _ = call(twin, x)
        assert torch.equal(got, call(pair, x)[0])
        if (batch, length) == (2, 231):
            second = graphs()
    assert graphs() == second


def test_b134_the_hosts_weights_answer_a_compiler(model):
    weight = model.model.diffusion_model.double_blocks[0].img_attn.proj.weight
    assert weight.is_contiguous(memory_format=torch.contiguous_format)
    assert weight.size() == weight.shape and weight.stride() == (weight.shape[1], 1)
    assert weight.numel() == weight.shape[0] * weight.shape[1]
    for same in (weight.detach(), weight.clone(), weight.to(weight.dtype)):
        assert type(same) is type(weight)
        assert torch.equal(same._qdata, weight._qdata)
    assert weight.view(weight.shape).shape == weight.shape
