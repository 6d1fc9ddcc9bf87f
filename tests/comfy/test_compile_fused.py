"""Fused blocks inside compiled graphs, equal to the eager ones in every bit."""

import pytest
import torch
from native_int8.kernels import LowRank, quantize_rows
from native_int8.nodes.int8 import host_backend, short_way, traced
from native_int8.nodes.int8.fusion import registry
from packtest.host_parts import fill, turns
from packtest.short_runs import fused_call as call
from torch._dynamo.testing import EagerAndRecordGraphs
from torch._dynamo.utils import counters

from .test_compile_blocks import attention_of_a_gpu, fresh, graphs, prompts
from .test_fusion import DIM, LAYERS, model
from .test_fusion_blocks import DIM as BLOCK_DIM
from .test_fusion_blocks import Blocks

pytestmark = pytest.mark.comfy
__all__ = ["attention_of_a_gpu", "fresh", "model"]

CASES = [(11, 6), (21, 8), (37, 12)]
PASSES = {"residual_norm": 3, "swiglu_of_rows": 1, "linear_of_rows": 3, "quantize_rows": 2}


@pytest.fixture(autouse=True)
def traced_blocks(monkeypatch):
    assert registry.is_traced()
    # what is left of quantising is one op, to be counted
    monkeypatch.setenv(traced.SWITCH, traced.OPAQUE)


def compile_layers(layers, backend="eager"):
    for i, layer in enumerate(list(layers)):
        layers[i] = torch.compile(layer, backend=backend, dynamic=True)


def passes(recorder):
    names = [str(node.target) for graph in recorder.graphs for node in graph.graph.nodes]
    return {name: sum(name in found for found in names) for name in PASSES}


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "blocks"])
def test_one_graph_for_every_size_and_prompt_and_the_same_bits(model, whole):
    cases = [prompts(*case) for case in CASES]
    expected = [call(model, *case)[0] for case in cases]
    recorder = EagerAndRecordGraphs()
    if not whole:
        compile_layers(model.layers, recorder)
    twin = torch.compile(model, backend=recorder, dynamic=True) if whole else model
    for case, output in zip(cases, expected, strict=True):
        assert torch.equal(call(twin, *case)[0], output)
    assert graphs() == 1
    blocks = LAYERS if whole else 1
    assert passes(recorder) == {name: count * blocks for name, count in PASSES.items()}


def test_inductor_keeps_the_bits(model):
    case = prompts(*CASES[0])
    expected, _ = call(model, *case)
    compile_layers(model.layers, "inductor")
    got, _ = call(model, *case)
    # tanh of the gates is inductor's
    assert (got - expected).abs().max() <= 0.01 * expected.abs().max()
    assert graphs() == 1


def test_blocks_of_z_image(comfy):
    host_backend.register()
    blocks = Blocks(comfy.ops.mixed_precision_ops({}, torch.bfloat16), True)
    fill(blocks, 64, {})
    g = torch.Generator().manual_seed(2)
    conditions = torch.randn((1, BLOCK_DIM), generator=g).bfloat16()
    cases = [
        (torch.randn((1, rows, BLOCK_DIM), generator=g).bfloat16(), None, turns(rows).transpose(1, 2), conditions)
        for rows in (12, 22, 34)
    ]
    expected = [call(blocks, *case)[0] for case in cases]
    recorder = EagerAndRecordGraphs()
    compile_layers(blocks.layers, recorder)
    assert all(torch.equal(call(blocks, *case)[0], output) for case, output in zip(cases, expected, strict=True))
    # a block of the refiner has no modulation
    assert passes(recorder)["residual_norm"] == 3
    assert sum(counters["graph_break"].values()) == 0


def test_a_foreign_hook_is_seen_after_compiling(model):
    case = prompts(*CASES[0])
    compile_layers(model.layers)
    plain, _ = call(model, *case)
    hook = model.layers[1]._orig_mod.ffn_norm1.register_forward_hook(lambda module, args, y: y * 2)
    assert not torch.equal(call(model, *case)[0], plain)
    hook.remove()
    assert torch.equal(call(model, *case)[0], plain)


def test_the_hosts_block_is_traced_on_request(model, monkeypatch):
    monkeypatch.setenv(registry.COMPILED_SWITCH, "0")
    recorder = EagerAndRecordGraphs()
    compile_layers(model.layers, recorder)
    case = prompts(*CASES[0])
    call(model, *case)
    assert not any(passes(recorder).values())
    monkeypatch.setenv(registry.COMPILED_SWITCH, "1")
    call(model, *case)
    assert passes(recorder) == PASSES
    # ours without fused blocks, of the same modules
    call(model, *case, fused=False)
    assert passes(recorder) == PASSES


def test_a_lora_is_added(model):
    g = torch.Generator().manual_seed(4)
    for name in ("qkv", "o"):
        linear = getattr(model.layers[0].attention, name)
        factors = torch.randn((32, DIM), generator=g), torch.randn((linear.out_features, 32), generator=g)
        linear.__dict__[short_way.BRANCH] = LowRank(*(factor.bfloat16() * DIM**-0.5 for factor in factors))
    case = prompts(*CASES[0])
    expected, run = call(model, *case)
    assert run.fused
    compile_layers(model.layers)
    got, _ = call(model, *case)
    # a graph rounds what a LoRA adds before it is added
    assert (got - expected).norm() <= 0.03 * expected.norm()
    assert sum(counters["graph_break"].values()) == 0


def test_b135_the_ops_say_what_they_return(comfy):
    from native_int8.kernels import graph_ops

    device = "cuda" if torch.cuda.is_available() else "cpu"

    def normal(*shape):
        return torch.randn(shape, generator=g).bfloat16().to(device)

    g = torch.Generator().manual_seed(5)
    x, y, vector, weight = normal(1, 6, 64), normal(1, 6, 64), normal(1, 64), normal(64)
    codes, scale = quantize_rows(normal(32, 64))
    rows = quantize_rows(x.view(6, 64))
    ops, none = torch.ops.native_int8, [None] * 4
    assert graph_ops
    calls = [
        (
            ops.residual_norm,
            (x, y, weight, vector, weight, None, vector, vector, [1e-5, 1e-6], [False, True, False, False], 0),
        ),
        (ops.residual_norm, (x, y, None, vector, *none, [0.0, 0.0], [True, False, False, False], 0)),
        (
            ops.residual_norm,
            (x, None, None, None, None, None, vector, vector, [0.0, 1e-6], [False, True, True, True], 16),
        ),
        (ops.quantize_activation, (x, y, None, 16)),
        (ops.quantize_activation, (x, None, y, 0)),
        (ops.swiglu_of_rows, (x, rows[0], rows[1].view(-1), codes, scale, None, codes, scale, None)),
        (ops.quantize_rows, (x, 16)),
        (ops.matmul_of_rows, (*rows, codes, scale, None, torch.bfloat16)),
    ]
    for op, arguments in calls:
        torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"))
        made = op(*arguments)
        tensors = [*([made] if isinstance(made, torch.Tensor) else made), *arguments]
        memory = [t.untyped_storage().data_ptr() for t in tensors if isinstance(t, torch.Tensor)]
        count = len(tensors) - len(arguments)
        assert len(set(memory[:count])) == count and not set(memory[:count]) & set(memory[count:]), op
