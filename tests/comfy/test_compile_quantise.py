"""NATIVE_INT8_COMPILED_QUANTISE=visible: the quantisation inside a compiled graph, where inductor can fuse it."""

import pytest
import torch
from native_int8.kernels import LowRank, quantize_rows
from native_int8.nodes.int8 import host_backend, short_way, traced
from packtest.short_runs import K, build_pair, call
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from .test_compile_blocks import attention_of_a_gpu, graphs, prompts
from .test_fusion import LAYERS, model

pytestmark = pytest.mark.comfy
__all__ = ["attention_of_a_gpu", "model"]

CASES = [(11, 6), (21, 8), (37, 12)]


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setenv(traced.SWITCH, traced.VISIBLE)
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def rows(dtype=torch.bfloat16):
    x = torch.randn((40, K), generator=torch.Generator().manual_seed(1)) * 3
    x[1], x[2] = 0, 1e-36
    x[3, 5], x[4, 6], x[5, 7] = float("nan"), float("inf"), -float("inf")
    x[6] = torch.arange(K) - 0.5
    x[7, 0] = 60000
    return x.to(dtype)


def same(got, expected):
    return torch.equal(got[0], expected[0]) and torch.equal(got[1].nan_to_num(7), expected[1].nan_to_num(7))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_the_visible_quantisation_is_the_kernels(comfy, dtype):
    x = rows(dtype)
    assert same(traced.quantise(x), quantize_rows(x))
    assert same(traced.quantise(x.view(5, 8, K)), quantize_rows(x.view(5, 8, K)))


def test_inductor_flips_few_codes_by_one(comfy):
    x = torch.cat([rows(), torch.randn((300, K), generator=torch.Generator().manual_seed(2)).bfloat16()])
    codes, scale = torch.compile(traced.quantise, dynamic=True)(x)
    expected_codes, expected_scale = quantize_rows(x)
    different = codes.int() - expected_codes.int()
    assert different.abs().max() <= 1
    assert (different != 0).float().mean() < 1e-3
    assert torch.allclose(scale, expected_scale, rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_one_graph_for_every_size_and_prompt_and_the_same_bits(model, whole):
    cases = [prompts(*case) for case in CASES]
    expected = [call(model, *case)[0] for case in cases]
    if whole:
        twin = torch.compile(model, backend="eager", dynamic=True)
    else:
        twin = model
        for i, layer in enumerate(list(model.layers)):
            model.layers[i] = torch.compile(layer, backend="eager", dynamic=True)
    for case, output in zip(cases, expected, strict=True):
        assert torch.equal(call(twin, *case)[0], output)
    assert graphs() == 1


def test_linears_that_read_the_same_tensor_share_its_rows(model):
    recorder = EagerAndRecordGraphs()
    call(torch.compile(model, backend=recorder, dynamic=True), *prompts(11, 6))
    (graph,) = recorder.graphs
    names = [str(node.target) for node in graph.graph.nodes]
    rotated = sum("quantize_rows" in name for name in names)
    # qkv, o, w1 with w3, w2
    assert (rotated or names.count("amax")) == 4 * LAYERS
    assert sum("linear_of_rows" in name for name in names) == 5 * LAYERS


class Normed(torch.nn.Module):
    """What stands before a Linear in a transformer block."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x, weight, scale):
        return self.linear(torch.nn.functional.rms_norm(x, (K,), weight, 1e-5) * (1 + scale))


def test_inductor_writes_nothing_but_codes_and_scales(comfy, monkeypatch):
    linear = build_pair(comfy).first
    plain = linear.weight
    params = type(plain._params)(**{**vars(plain._params), "convrot": False})
    linear.weight = torch.nn.Parameter(type(plain)(plain._qdata, short_way.LAYOUT, params), requires_grad=False)
    block = Normed(linear)
    g = torch.Generator().manual_seed(3)
    x, weight, scale = (torch.randn(shape, generator=g).bfloat16() for shape in ((2, 7, K), (K,), (1, 1, K)))
    expected, _ = call(block, x, weight, scale)
    written = {}
    for choice in traced.CHOICES:
        monkeypatch.setenv(traced.SWITCH, choice)
        torch._dynamo.reset()
        twin = torch.compile(block)
        (got, _), code = run_and_get_code(call, twin, x, weight, scale)
        # inductor rounds once where separate operations round three times
        assert (got - expected).abs().max() <= 0.03 * expected.abs().max()
        lines = [line for line in "".join(code).splitlines() if "= empty_strided" in line and str(K) in line]
        written[choice] = {kind for kind in ("bfloat16", "int8", "float32") if any(kind in line for line in lines)}
    assert written == {traced.OPAQUE: {"bfloat16"}, traced.VISIBLE: {"int8"}}


def test_what_runs_is_counted(comfy):
    pair, x = build_pair(comfy), torch.randn((5, K))
    wrapper = host_backend._UseNativeInt8()
    twin = torch.compile(pair, backend="eager", dynamic=True)
    for _ in range(2):
        with wrapper.running(pair):
            twin(x)
    assert wrapper.record.calls == {"torch": 4}
    assert not wrapper.record.declined


def test_a_lora_is_added(comfy):
    pair = build_pair(comfy)
    g = torch.Generator().manual_seed(4)
    low_rank = LowRank(torch.randn((32, K), generator=g), torch.randn((48, 32), generator=g))
    pair.first.__dict__[short_way.BRANCH] = low_rank
    x = torch.randn((5, K), generator=g)
    expected, _ = call(pair, x)
    got, _ = call(torch.compile(pair, backend="eager", dynamic=True), x)
    assert torch.allclose(got, expected, rtol=1e-5, atol=1e-3)
    assert graphs() == 1


def test_the_graph_belongs_to_our_models_and_to_the_setting(comfy, monkeypatch):
    pair, x = build_pair(comfy), torch.randn((5, K))
    recorder = EagerAndRecordGraphs()
    twin = torch.compile(pair, backend=recorder, dynamic=True)

    def ours():
        return ["linear_of_rows" in str(graph.graph) for graph in recorder.graphs]

    call(twin, x)
    assert ours() == [True]
    # the host's MODEL of the same modules
    call(twin, x, short=False)
    assert ours() == [True, False]
    monkeypatch.setenv(traced.SWITCH, traced.OPAQUE)
    call(twin, x)
    assert ours() == [True, False, False]
    monkeypatch.setenv(traced.SWITCH, traced.VISIBLE)
    call(twin, x)
    call(twin, x, short=False)
    assert len(recorder.graphs) == 3


def test_an_unknown_setting_says_what_is_needed(comfy, monkeypatch):
    monkeypatch.setenv(traced.SWITCH, "maybe")
    with pytest.raises(ValueError, match=r"'maybe'. Needed: one of \('opaque', 'visible'\)"):
        call(build_pair(comfy), torch.randn((5, K)))
