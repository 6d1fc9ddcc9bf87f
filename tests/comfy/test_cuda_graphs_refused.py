"""What a CUDA graph cannot repeat is refused, with a sentence that the user reads."""

import pytest
import torch
from native_int8.nodes.int8 import cuda_graphs, graph_facts, graph_recorder
from native_int8.nodes.int8.model_graphs import RECORDED, REPLAYED
from packtest import whole_classes
from packtest.pretend_graphs import Called, PretendRecorder, Simple, nothing, simple, twice

pytestmark = pytest.mark.comfy
call = whole_classes.ideogram4_call


@pytest.fixture
def model(comfy):
    return Called(whole_classes.ideogram4(comfy))


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


def test_the_host_s_option_against_graphs_counts_for_ours(comfy, monkeypatch):
    from comfy.cli_args import args

    monkeypatch.setattr(args, "disable_cuda_graphs", True, raising=False)
    reason = graph_recorder.Recorder.why_not(torch.device("cpu"))
    assert reason == "ComfyUI was started with --disable-cuda-graphs"
    monkeypatch.undo()
    assert "runs on cpu" in graph_recorder.Recorder.why_not(torch.device("cpu"))


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
