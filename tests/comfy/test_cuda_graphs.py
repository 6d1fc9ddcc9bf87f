"""CUDA graphs of a diffusion model: which calls share one, how many are kept, and when they go."""

import gc
import weakref

import pytest
import torch
from native_int8.nodes.int8 import graph_facts
from native_int8.nodes.int8.model_graphs import FIRST, KEPT, MAX_NEW, RECORDED, REPLAYED
from packtest import whole_classes
from packtest.pretend_graphs import HELD, Called, PretendRecorder, Simple, lora, plain, simple, twice

pytestmark = pytest.mark.comfy
call = whole_classes.ideogram4_call


@pytest.fixture
def model(comfy):
    return Called(whole_classes.ideogram4(comfy))


@pytest.mark.parametrize("name", ["ideogram4", "z_image"])
def test_the_first_call_runs_the_second_is_recorded_and_the_others_replayed(comfy, name):
    model = Called(getattr(whole_classes, name)(comfy))
    make = getattr(whole_classes, f"{name}_call")
    for number, how in enumerate([FIRST, RECORDED, REPLAYED, REPLAYED]):
        # other values in each call
        arguments = make(seed=number, time=0.9 - number / 10)
        expected = plain(model, arguments)
        got = model(arguments)
        assert model.run.graphed == {how: 1} and not model.run.ungraphed
        assert torch.equal(got, expected)
    assert model.recorders[0].recorded == 1
    assert model.said == ["CUDA graph recorded for input 1x16x4x4; 1 of up to 4 kept, 3 MiB of GPU memory."]


def test_a_replay_counts_what_it_stands_for(model):
    counted = []
    for _ in range(3):
        model(call(mask=torch.ones((1, 5), dtype=torch.long)))
        run = model.run
        counted.append((run.calls, run.ways, run.fused, run.reasons, run.shared.spared))
    assert counted[0][0] and counted[0] == counted[1] == counted[2]


def test_the_output_is_the_caller_s(model):
    outputs = [model(call(seed=seed)) for seed in range(4)]
    assert not torch.equal(outputs[2], outputs[3])
    assert len({output.data_ptr() for output in outputs}) == 4


def test_both_branches_have_their_graph(model):
    for _ in range(3):
        for context in (True, False):
            expected = plain(model, call(context=context))
            assert torch.equal(model(call(context=context)), expected)
    assert model.run.graphed == {REPLAYED: 1} and len(model.kept) == 2


def test_whether_the_mask_hides_something_is_asked_before(model):
    full, half = torch.ones((1, 5), dtype=torch.long), torch.tensor([[1, 1, 1, 0, 0]])
    other = torch.tensor([[1, 0, 1, 0, 1]])
    for mask in (full, full, half, half, full, half, other):
        expected = plain(model, call(mask=mask))
        assert torch.equal(model(call(mask=mask)), expected)
        assert not model.run.ungraphed
    assert model.run.graphed == {REPLAYED: 1} and len(model.kept) == 2


@pytest.mark.parametrize(
    "second",
    [
        {"batch": 2},
        {"side": 6},
        {"context": False},
    ],
    ids=str,
)
def test_other_shapes_are_of_another_kind(model, second):
    for arguments in (call(), call(), call(**second)):
        model(arguments)
    assert model.run.graphed == {FIRST: 1}


def test_other_values_of_python_are_of_another_kind(model):
    def with_options(**options):
        args, kwargs = call()
        return args, kwargs | {"transformer_options": options}

    for options in ({}, {}, {"sigmas": torch.ones(1), "uuids": ["a"]}, {"rope_options": {"scale_x": 2.0}}):
        model(with_options(**options))
    assert model.run.graphed == {FIRST: 1}
    assert len(model.kept) == 1
    # True is not 1
    assert graph_facts.signature(True, []) != graph_facts.signature(1, [])


def test_values_that_change_each_time_are_given_up(comfy):
    model = Called(Simple())
    for number in range(MAX_NEW + 2):
        model(simple(scale=float(number)))
    assert model.run.ungraphed == {"the model is called with other values each time": 1}
    # one that comes again all the same is recorded in the end
    for _ in range(3):
        model(simple(scale=0.5))
    assert model.run.graphed == {RECORDED: 1}


def test_no_more_than_four_are_kept_and_the_least_used_goes(comfy):
    model = Called(Simple())

    def use(scale):
        y = model(simple(scale))
        assert torch.equal(y, torch.arange(4.0) * scale)
        return next(iter(model.run.graphed))

    for scale in range(KEPT):
        assert [use(float(scale)) for _ in range(2)] == [FIRST, RECORDED]
    assert use(0.0) == REPLAYED
    assert [use(9.0) for _ in range(2)] == [FIRST, RECORDED]
    assert len(model.kept) == KEPT
    assert [use(float(scale)) for scale in (0, 2, 3)] == [REPLAYED] * 3
    assert use(1.0) == RECORDED
    assert model.graphs.of(model.module).held_bytes == KEPT * (HELD + 16)


def new_weight(module):
    layer = module.layers[0].attention.qkv
    layer.set_weight(layer.weight.dequantize() * 1.5, seed=1)


def new_norm(module):
    module.layers[1].ffn_norm1.weight.data = module.layers[1].ffn_norm1.weight * 2


def new_block(module):
    module.layers[0], module.layers[1] = module.layers[1], module.layers[0]


CHANGES = {
    "a new weight": new_weight,
    "a new norm": new_norm,
    "moved": lambda module: module._apply(torch.clone),
    "another block": new_block,
    "a LoRA": lora(1),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_the_weights_drops_the_graphs(model, change):
    for _ in range(3):
        before = model(call())
    CHANGES[change](model.module)
    expected = plain(model, call())
    assert torch.equal(expected, before) == (change == "moved")
    for how in (FIRST, RECORDED, REPLAYED):
        assert torch.equal(model(call()), expected)
        assert model.run.graphed == {how: 1}
    assert len(model.kept) == 1


def test_another_strength_of_a_lora_is_another_stack(model):
    for seed in (1, 2, 2, 1):
        lora(seed)(model.module)
        expected = plain(model, call())
        for how in (FIRST, RECORDED, REPLAYED):
            assert torch.equal(model(call()), expected)
            assert model.run.graphed == {how: 1}


def test_a_failure_to_record_runs_as_without_and_is_not_tried_again(model, monkeypatch):
    expected = plain(model, call())
    model(call())
    monkeypatch.setattr(PretendRecorder, "failure", RuntimeError("CUDA error: not permitted\nmore"))
    for number in range(3):
        assert torch.equal(model(call()), expected)
        assert model.run.ungraphed == {"recording failed: CUDA error: not permitted": 1}
        monkeypatch.setattr(PretendRecorder, "failure", None)
        assert model.recorders[0].freed == 1, number
    assert not model.kept


def test_no_memory_for_a_graph_frees_the_others(model, monkeypatch):
    for _ in range(2):
        model(call())
        model(call(side=6))
    assert len(model.kept) == 2
    monkeypatch.setattr(PretendRecorder, "failure", torch.cuda.OutOfMemoryError("out of memory"))
    for _ in range(2):
        model(call(side=8))
    assert model.run.ungraphed == {"recording failed: out of memory": 1}
    assert not model.kept


def test_no_memory_for_a_call_frees_the_graphs_and_tries_again(comfy):
    class Short(Simple):
        memory = 0

        def forward(self, x, transformer_options=None, scale=1.0):
            if scale == 2.0 and len(x) and self.short():
                raise torch.cuda.OutOfMemoryError("out of memory")
            return super().forward(x, transformer_options, scale)

    short = [True]
    module = Short()
    module.short = lambda: short and short.pop()
    model = Called(module)
    for _ in range(2):
        model(simple())
    assert len(model.kept) == 1
    assert model(simple(2.0)).tolist() == [0, 2, 4, 6]
    assert model.run.ungraphed == {"the GPU ran out of memory, and the graphs were freed": 1}
    assert not model.kept
    # and without graphs there is nothing to free
    short.append(True)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        model(simple(2.0))


@pytest.mark.parametrize("at", ["first", "record", "replay"])
def test_an_interrupt_leaves_the_model_usable(comfy, model, at, monkeypatch):
    management = comfy.model_management
    expected = plain(model, call())
    for _ in range({"first": 0, "record": 1, "replay": 2}[at]):
        model(call())
    management.interrupt_current_processing(True)
    with pytest.raises(management.InterruptProcessingException):
        model(call())
    management.interrupt_current_processing(False)
    for _ in range(3):
        assert torch.equal(model(call()), expected)
    assert model.run.graphed == {REPLAYED: 1}


def test_a_second_thread_runs_without(model):
    import threading

    for _ in range(2):
        model(call())
    other = Called(model.module)
    other.graphs = model.graphs

    def elsewhere():
        with torch.inference_mode():
            other(call())

    lock = model.graphs.of(model.module)._lock
    with lock:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    assert other.run.ungraphed == {"another thread runs the MODEL at the same time": 1}


def test_a_foreign_forward_of_the_model_keeps_its_place(model):
    twice(model.module)
    foreign = model.module.forward
    assert model.said_of(call()) == "another pack replaced forward"
    assert model.module.forward is foreign


def test_nothing_stays_on_the_model_and_it_is_not_kept_alive(comfy):
    model = Called(whole_classes.ideogram4(comfy))
    for _ in range(3):
        model(call(mask=torch.ones((1, 5), dtype=torch.long)))
    assert "forward" not in vars(model.module)
    graphs, module = weakref.ref(model.graphs.of(model.module)), weakref.ref(model.module)
    gc.disable()
    try:
        # the pretended graph holds the function that it calls, which a real one does not
        model.kept.clear()
        model.module = None
        assert module() is None and graphs() is None
    finally:
        gc.enable()
