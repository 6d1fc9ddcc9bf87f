"""CUDA graphs of whole MODELs while they sample, and on a GPU: the same bits as without."""

import gc
import weakref

import pytest
import torch
from native_int8.kernels import LowRank
from native_int8.nodes.int8 import cuda_graphs, host_backend, short_way, speeds, status
from native_int8.nodes.int8.model_graphs import FIRST, RECORDED, REPLAYED
from packtest import tiny, whole_classes
from packtest.loras import add_lora, lora_file
from packtest.pretend_graphs import Called, PretendRecorder, Simple, lora, nothing, plain, simple

pytestmark = pytest.mark.comfy
call = whole_classes.ideogram4_call


@pytest.fixture
def graphed(comfy):
    """A MODEL with this speed, recording in pretence, and what its node was told."""
    made, said = tiny.int8_model(comfy), []
    host_backend.set_speed(made, speeds.GRAPHED, said.append)
    host_backend._wrapper_of(made).graphs = cuda_graphs.Graphs(said.append, PretendRecorder)
    return made, said


@pytest.fixture
def sample(comfy):
    return lambda model, steps: tiny.sample(comfy, model, size=(4, 4), words=8, steps=steps)


def as_usual(model):
    usual = model.clone()
    host_backend.set_speed(usual, speeds.FUSED)
    return usual


def test_sampling_gives_the_same_bits(graphed, sample):
    model, said = graphed
    usual = as_usual(model)
    assert [host_backend.speed_of(m) for m in (model, usual)] == [speeds.GRAPHED, speeds.FUSED]
    # on a GPU torch's attention gives other bits at the first call of a process
    sample(usual, steps=1)
    host_backend.record_of(usual).reset()
    expected = sample(usual, steps=4)
    record = host_backend.record_of(model)
    assert torch.equal(sample(model, steps=4), expected)
    assert record.by_graph() == {"graphed": {FIRST: 1, RECORDED: 1, REPLAYED: 2}, "ungraphed": {}}
    assert record.snapshot() == host_backend.record_of(usual).snapshot()
    assert "CUDA graphs: 1 first of its kind, 1 recorded, 2 replayed" in record.sentence()
    assert len(said) == 1 and said[0].startswith("CUDA graph recorded for input 1x128x4x4; 1 of up to 4 kept, ")
    # the next prompt begins with a replay
    record.reset()
    assert torch.equal(sample(model.clone(), steps=4), expected)
    assert record.by_graph() == {"graphed": {REPLAYED: 4}, "ungraphed": {}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="is for machines without CUDA")
def test_without_cuda_the_user_is_told(comfy, sample):
    model, said = tiny.int8_model(comfy), []
    host_backend.set_speed(model, speeds.GRAPHED, said.append)
    sample(model, steps=2)
    reason = "the MODEL runs on cpu, and only CUDA has graphs"
    assert said == [f"CUDA graph not used: {reason}."]
    record = host_backend.record_of(model)
    assert record.by_graph() == {"graphed": {}, "ungraphed": {reason: 2}}
    assert f"without CUDA graph: 2 {reason}" in record.sentence()


def test_the_node_s_line_gets_the_sentence_behind_it(monkeypatch):
    shown = []
    monkeypatch.setattr(status, "show", lambda *line: shown.append(line))
    line = status.Line("7")
    line.show("204 layers INT8")
    line.add("CUDA graph recorded.")
    line.add("CUDA graph not used.")
    whole = ["204 layers INT8", "204 layers INT8. CUDA graph recorded.", "204 layers INT8. CUDA graph not used."]
    assert shown == [(text, "7") for text in whole]


def model_graphs(model):
    wrapper = host_backend._wrapper_of(model)
    return wrapper.graphs.of(model.model.diffusion_model)


def test_a_lora_of_another_strength_is_seen(graphed, sample):
    model, _ = graphed
    file = lora_file(model)
    for strength in (0.0, 0.5, 1.0):
        changed = add_lora(model, file, strength)
        expected = sample(as_usual(changed), steps=3)
        assert torch.equal(sample(changed, steps=3), expected)
        assert host_backend.record_of(model).by_graph()["graphed"][REPLAYED] > 0
        host_backend.record_of(model).reset()


@pytest.mark.parametrize("how", ["unloaded", "partly unloaded", "dropped"])
def test_graphs_go_with_the_model(graphed, sample, how):
    model, _ = graphed
    used = model.clone()
    sample(used, steps=3)
    graphs = weakref.ref(model_graphs(used))
    assert len(graphs().graphs) == 1
    gc.disable()
    try:
        # the pretended graph holds the function that it calls, which a real one does not
        graphs().graphs.clear()
        if how == "unloaded":
            used.detach()
        elif how == "partly unloaded":
            used.partially_unload(torch.device("cpu"), 1)
        else:
            host_backend.detach(model)
            host_backend.detach(used)
        assert graphs() is None
    finally:
        gc.enable()


# on a GPU

gpu = pytest.mark.gpu


@pytest.fixture
def on_gpu(comfy):
    def make(name, group=64):
        module = getattr(whole_classes, name)(comfy, group).to("cuda")
        return Called(module, cuda_graphs.Recorder)

    return make


def moved(arguments):
    def move(value):
        return value.cuda() if isinstance(value, torch.Tensor) else value

    args, kwargs = arguments
    return tuple(map(move, args)), {name: move(value) for name, value in kwargs.items()}


@gpu
@pytest.mark.parametrize("name", ["ideogram4", "z_image"])
def test_a_graph_equals_the_plain_call_bit_for_bit(on_gpu, name):
    model = on_gpu(name)
    make = getattr(whole_classes, f"{name}_call")
    for number in range(6):
        arguments = moved(make(seed=number, side=8, time=0.9 - number / 10))
        expected = plain(model, arguments)
        got = model(arguments)
        assert not model.run.ungraphed, model.run.ungraphed
        assert torch.equal(got, expected), number
    assert model.run.graphed == {REPLAYED: 1}


@gpu
def test_two_branches_and_masks_take_turns_on_a_gpu(on_gpu):
    model = on_gpu("ideogram4")
    full, half = torch.ones((1, 5), dtype=torch.long), torch.tensor([[1, 1, 1, 0, 0]])
    for number in range(4):
        for more in ({"mask": full}, {"mask": half}, {"context": False}):
            arguments = moved(call(side=8, seed=number, **more))
            expected = plain(model, arguments)
            assert torch.equal(model(arguments), expected), (number, more)
            assert not model.run.ungraphed, model.run.ungraphed
    assert model.run.graphed == {REPLAYED: 1} and len(model.kept) == 3


@gpu
def test_a_lora_changes_between_replays_on_a_gpu(on_gpu):
    model = on_gpu("ideogram4")
    for seed in (1, 2, 1):
        lora(seed)(model.module)
        for layer in model.module.layers:
            stack = getattr(layer.attention.qkv, short_way.BRANCH)
            setattr(layer.attention.qkv, short_way.BRANCH, LowRank(stack.down.cuda(), stack.up.cuda()))
        expected = plain(model, moved(call(side=8)))
        for _ in range(4):
            assert torch.equal(model(moved(call(side=8))), expected)
        assert model.run.graphed == {REPLAYED: 1}


@gpu
def test_memory_is_flat_and_comes_back_on_a_gpu(on_gpu):
    model = on_gpu("ideogram4")
    arguments = moved(call(side=16))
    for _ in range(3):
        model(arguments)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(50):
        model(arguments)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before
    assert model.graphs.of(model.module).held_bytes > 0
    model.graphs.drop(model.module)
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() < before[1]


@gpu
def test_what_cannot_be_recorded_leaves_the_gpu_usable(on_gpu, monkeypatch):
    model = Called(Simple().to("cuda"), cuda_graphs.Recorder)
    arguments = moved(simple())
    model(arguments)
    model.module.more = lambda x, _: x.sum().item()
    stream = torch.cuda.current_stream()
    for _ in range(2):
        assert model(arguments).tolist() == [0, 1, 2, 3]
        (reason,) = model.run.ungraphed
        assert reason.startswith("recording failed: ")
    assert torch.cuda.current_stream() == stream
    model.module.more = nothing
    for _ in range(3):
        assert model(moved(simple(2.0))).tolist() == [0, 2, 4, 6]
    assert model.run.graphed == {REPLAYED: 1}
