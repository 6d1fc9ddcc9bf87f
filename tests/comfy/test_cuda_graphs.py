"""CUDA graphs of a MODEL: which calls share one, what refuses them, when they go. On a GPU, what they give is compared."""

import gc
import weakref

import pytest
import torch
from native_int8.kernels import LowRank
from native_int8.nodes.int8 import cuda_graphs, graph_facts, host_backend, short_way, speeds, status
from native_int8.nodes.int8.fusion import registry as fusion
from native_int8.nodes.int8.model_graphs import FIRST, KEPT, MAX_NEW, RECORDED, REPLAYED
from packtest import tiny, whole_classes
from packtest.loras import add_lora, lora_file
from packtest.pretend_graphs import HELD, PretendRecorder
from packtest.short_runs import fused_call

pytestmark = pytest.mark.comfy


class Called:
    """A diffusion model with graphs: `model(...)` calls it as the wrapper does; `run` says what the last call did."""

    def __init__(self, module, make_recorder=PretendRecorder):
        self.module, self.said = module, []
        self.recorders = []
        self.graphs = cuda_graphs.Graphs(
            self.said.append, lambda: self.recorders.append(make_recorder()) or self.recorders[-1]
        )

    def __call__(self, arguments):
        from comfy_kitchen.registry import registry

        runs = []
        args, kwargs = arguments
        with (
            registry.use_backend("native_int8"),
            short_way.inside(self.module, runs.append),
            fusion.inside(self.module),
            self.graphs.inside(self.module),
        ):
            y = self.module(*args, **kwargs)
        self.run = runs[0]
        return y

    @property
    def kept(self):
        return self.graphs.of(self.module).graphs

    def said_of(self, arguments):
        """Why a second call, too, has no graph."""
        for _ in range(2):
            self(arguments)
            assert not self.run.graphed
        (reason,) = self.run.ungraphed
        assert f"CUDA graph not used: {reason}." in self.said
        return reason


def plain(model, arguments):
    return (
        fused_call(model.module, *arguments[0], fused=True)[0] if not arguments[1] else _plain(model.module, arguments)
    )


def _plain(module, arguments):
    from comfy_kitchen.registry import registry

    args, kwargs = arguments
    with registry.use_backend("native_int8"), short_way.inside(module, lambda run: None), fusion.inside(module):
        return module(*args, **kwargs)


@pytest.fixture
def model(comfy):
    return Called(whole_classes.ideogram4(comfy))


call = whole_classes.ideogram4_call


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


def nothing(*_, **__):
    return None


OPTIONS = {
    "another node put wrappers on the MODEL (cache)": {"wrappers": {"diffusion_model": {"cache": [nothing]}}},
    "another node put callbacks on the MODEL (None)": {"callbacks": {"on_pre_run": {None: [nothing]}}},
    "the MODEL is compiled with torch.compile": {"wrappers": {"apply_model": {"torch.compile": [nothing]}}},
    "another node patches the model (attn1_output_patch)": {"patches": {"attn1_output_patch": [lambda x, _: x]}},
    "another node patches the model (dit)": {"patches_replace": {"dit": {("double_block", 0): nothing}}},
    "another node replaced attention": {"optimized_attention_override": lambda attend, *a, **k: attend(*a, **k)},
    "a node put holder into the model's options": {"holder": object()},
    "a node put audio into the model's options": {"audio": torch.ones(1)},
}


@pytest.mark.parametrize("reason", OPTIONS, ids=lambda reason: reason[-30:])
def test_what_other_nodes_do_to_the_options_refuses(model, reason):
    args, kwargs = call()
    options = OPTIONS[reason]
    assert graph_facts.why_not_options(options) in (reason, None)
    with pytest.raises(graph_facts.Refused) as refused:
        graph_facts.options_signature(options)
    assert str(refused.value) == reason
    if "wrappers" not in options:
        assert model.said_of((args, kwargs | {"transformer_options": options})) == reason


def test_empty_and_own_entries_refuse_nothing(model):
    args, kwargs = call()
    options = {
        "wrappers": {"apply_model": {"native_int8": [nothing], "other": []}}, "patches": {"attn1_patch": []},
        "patches_replace": {}, "callbacks": {"on_clone": {"native_int8": [nothing]}},
        "sigmas": torch.ones(1), "sample_sigmas": torch.ones(3), "cond_or_uncond": [0, 1], "uuids": [object()],
        "prefetch_dynamic_vbars": False,
    }  # fmt: skip
    for _ in range(2):
        model((args, kwargs | {"transformer_options": options}))
    assert model.run.graphed == {RECORDED: 1}


def test_a_controlnet_refuses(model):
    args, kwargs = call()
    assert model.said_of((args, kwargs | {"control": {"middle": []}})) == "a ControlNet takes part"


def test_an_argument_that_is_no_plain_value_refuses(model):
    args, kwargs = call()
    assert model.said_of((args, kwargs | {"more": object()})) == "the model is called with a object"


def test_training_refuses(model, monkeypatch, comfy):
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    assert model.said_of(call()) == "the MODEL is in training"


def test_without_cuda_the_real_recorder_refuses(comfy):
    model = Called(whole_classes.ideogram4(comfy), cuda_graphs.Recorder)
    assert model.said_of(call()) == "the MODEL runs on cpu, and only CUDA has graphs"


def twice(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


MODULES = {
    "dynamic VRAM": lambda m: setattr(m.layers[1].attention.qkv, "_v", object()),
    "a function changes weights": lambda m: setattr(m.layers[0].attention.qkv, "weight_function", [lambda w: w]),
    "has hooks": lambda m: m.layers[0].register_forward_hook(nothing),
    "compiled with torch.compile": lambda m: setattr(m.layers[0], "_compiled_call_impl", m.layers[0].forward),
    "replaced the forward of a module": lambda m: twice(m.layers[0].attention),
    "not all weights are on the GPU": lambda m: m.register_buffer("table", torch.ones(1, device="meta")),
}


@pytest.mark.parametrize("reason", MODULES)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after recording"])
def test_what_is_done_to_modules_refuses(comfy, model, reason, late):
    if late:
        for _ in range(2):
            model(call())
    MODULES[reason](model.module)
    model_graphs = model.graphs.of(model.module)
    if "_v" in vars(model.module.layers[1].attention.qkv) or "_compiled" in reason:
        # such a module cannot really run here
        with pytest.raises(graph_facts.Refused, match=reason):
            model_graphs._let_go_of_what_no_longer_fits()
        return
    assert reason in model.said_of(call())


def test_hooks_that_go_again_leave_the_graph(model):
    for _ in range(2):
        model(call())
    handle = model.module.layers[0].register_forward_hook(nothing)
    model(call())
    assert model.run.ungraphed and not model.run.graphed
    handle.remove()
    model(call())
    assert model.run.graphed == {REPLAYED: 1}


class Simple(torch.nn.Module):
    """A model whose forward does one thing more."""

    def __init__(self, more=nothing):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.more = more

    def forward(self, x, transformer_options=None, scale=1.0):
        self.more(x, transformer_options)
        return x * self.weight * scale


def simple(scale=1.0, **options):
    return (torch.arange(4.0),), {"transformer_options": options, "scale": scale}


@pytest.mark.parametrize("read", ["sigmas", "sample_sigmas", "cond_or_uncond", "uuids"])
@pytest.mark.parametrize("how", ["get", "item", "copy", "dict", "loop"])
def test_reading_what_changes_with_each_call_refuses(comfy, read, how):
    def more(x, options):
        if how == "get":
            options.get(read)
        elif how == "item":
            options[read]
        elif how == "copy":
            options.copy()[read]
        elif how == "dict":
            dict(options)[read]
        else:
            [name for name in {**options} if name]

    model = Called(Simple(more))
    arguments = simple(**{read: torch.ones(1)})
    assert model.said_of(arguments) == f"the model reads {read}, which change from call to call"


WAITS = {
    "is_nonzero": lambda x, _: bool((x != 0).all()),
    "item": lambda x, _: x[0].item(),
    "nonzero": lambda x, _: torch.nonzero(x),
    "index with a mask": lambda x, _: x[x > 1],
    "repeat_interleave": lambda x, _: torch.repeat_interleave(x, x.long()),
}


@pytest.mark.parametrize("operator", WAITS)
def test_waiting_for_the_gpu_refuses(comfy, operator, monkeypatch):
    monkeypatch.setattr(PretendRecorder, "device_type", "cpu")
    model = Called(Simple(WAITS[operator]))
    assert model.said_of(simple()) == f"the model waits for values from the GPU ({operator})"
    assert not model.kept


def test_values_between_cpu_and_gpu_are_seen():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        on_gpu, host, number = torch.empty(4, device="cuda"), torch.empty(4), torch.tensor(1.0)
        mask = on_gpu > 1

    def refuses(*operator):
        return graph_facts._why_not_operator(*operator, "cuda")

    assert "copy_" in refuses("aten::copy_", (on_gpu, host), {})
    assert "copy_" in refuses("aten::copy_", (on_gpu, number), {})
    assert "_to_copy" in refuses("aten::_to_copy", (host,), {"device": torch.device("cuda", 0)})
    assert "_to_copy" in refuses("aten::_to_copy", (on_gpu,), {"device": torch.device("cpu")})
    assert "(to)" in refuses("aten::to.device", (host, torch.device("cuda", 0), torch.float32), {})
    assert "(tensor)" in refuses("aten::lift_fresh", (on_gpu,), {})
    assert refuses("aten::fill_.Tensor", (on_gpu, number), {}) is None
    assert refuses("aten::_to_copy", (on_gpu,), {"dtype": torch.float16}) is None
    # x[mask] = 5.0
    assert refuses("aten::index_put_", (on_gpu, [mask], number), {}) is None
    assert "with a mask" in refuses("aten::index_put_", (on_gpu, [mask], on_gpu), {})
    assert "with a mask" in refuses("aten::index.Tensor", (on_gpu, [None, mask]), {})
    assert refuses("aten::item", (number,), {}) is None
    assert refuses("other::copy_", (on_gpu, host), {}) is None


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


def lora(seed):
    def hang(module):
        for layer in module.layers:
            qkv = layer.attention.qkv
            g = torch.Generator().manual_seed(seed)
            down, up = torch.randn((32, 128), generator=g) * 0.1, torch.randn((384, 32), generator=g) * 0.1
            setattr(qkv, short_way.BRANCH, LowRank(down.bfloat16(), up.bfloat16()))

    return hang


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


# with a whole MODEL


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
