"""Our backend in a real comfy_kitchen registry: chosen per MODEL, declining with reasons, seen by nobody else."""

import logging
import threading

import pytest
import torch
from native_int8.nodes.int8 import host_backend

pytestmark = pytest.mark.comfy


@pytest.fixture
def registry(comfy):
    from comfy_kitchen.registry import registry

    host_backend.register()
    return registry


@pytest.fixture
def call():
    """A function (**changes) -> keyword arguments of one int8_linear call, as the host makes them."""

    def make(**changes):
        generator = torch.Generator().manual_seed(3)
        arguments = {
            "x": torch.randn(2, 7, 256, generator=generator),
            "weight": torch.randint(-127, 128, (48, 256), generator=generator, dtype=torch.int8),
            "weight_scale": torch.rand(48, 1, generator=generator) * 0.01,
            "bias": torch.randn(48, generator=generator),
            "out_dtype": torch.float32,
            "convrot": False,
            "convrot_groupsize": 256,
            "input_act": None,
        }
        return arguments | changes

    return make


def linears(model):
    return [
        m for m in model.model.diffusion_model.modules() if getattr(m, "layout_type", None) == "TensorWiseINT8Layout"
    ]


def backends_used(caplog):
    return {record.args[0] for record in caplog.records if "int8_linear" in record.args}


def test_registering_twice_leaves_the_priority_list_alone(registry):
    before = list(registry._priority)
    host_backend.register()
    assert registry.is_available("native_int8")
    assert registry._priority == before
    assert "native_int8" not in before


def test_attached_model_runs_every_linear_on_our_kernels(stock_int8_model, sample, caplog, monkeypatch):
    # the general way; test_short_way.py is about the other one
    monkeypatch.setenv("NATIVE_INT8_SHORT_WAY", "0")
    host_backend.attach(stock_int8_model)
    with caplog.at_level(logging.DEBUG, "comfy_kitchen.dispatch"):
        sample(stock_int8_model, steps=1)
    counts = host_backend.record_of(stock_int8_model).snapshot()
    assert backends_used(caplog) == {"native_int8"}
    assert len(linears(stock_int8_model)) > 0
    assert sum(counts["calls"].values()) % len(linears(stock_int8_model)) == 0
    assert sum(counts["calls"].values()) >= len(linears(stock_int8_model))
    assert counts["declined"] == {}


def test_attached_model_is_close_to_the_hosts_own_int8(stock_int8_model, sample, cosine):
    own = sample(stock_int8_model)
    ours = stock_int8_model.clone()
    host_backend.attach(ours)
    # single codes may round to the other side, and the steps enlarge that; a wrong layer is far below
    assert cosine(sample(ours), own) > 0.999
    assert torch.equal(sample(stock_int8_model), own)


def test_only_the_attached_clone_uses_it(stock_int8_model, sample, caplog):
    ours = stock_int8_model.clone()
    host_backend.attach(ours)
    with caplog.at_level(logging.DEBUG, "comfy_kitchen.dispatch"):
        sample(stock_int8_model, steps=1)
    assert "native_int8" not in backends_used(caplog)
    assert backends_used(caplog)
    assert host_backend.record_of(ours).snapshot()["calls"] == {}
    assert not host_backend.is_attached(stock_int8_model)
    assert host_backend.record_of(stock_int8_model) is None


def test_clones_of_clones_keep_one_wrapper_and_one_record(stock_int8_model, sample):
    from comfy.patcher_extension import WrappersMP

    host_backend.attach(stock_int8_model)
    twice = stock_int8_model.clone().clone()
    host_backend.attach(twice)
    assert len(twice.get_wrappers(WrappersMP.APPLY_MODEL, "native_int8")) == 1
    sample(twice, steps=1)
    assert host_backend.record_of(twice) is host_backend.record_of(stock_int8_model)
    host_backend.record_of(twice).reset()
    host_backend.detach(twice)
    sample(twice, steps=1)
    assert host_backend.record_of(stock_int8_model).snapshot()["calls"] == {}


def test_other_threads_keep_their_own_choice(registry, call):
    chosen = []
    with registry.use_backend("native_int8"):
        thread = threading.Thread(target=lambda: chosen.append(registry.get_capable_backend("int8_linear", call())))
        thread.start()
        thread.join()
        chosen.append(registry.get_capable_backend("int8_linear", call()))
    assert chosen[0] != "native_int8"
    assert chosen[1] == "native_int8"


def test_an_error_inside_the_model_still_ends_the_choice(registry, stock_int8_model, sample):
    host_backend.attach(stock_int8_model)

    def fail(executor, *args, **kwargs):
        raise ZeroDivisionError

    broken = stock_int8_model.clone()
    broken.add_wrapper_with_key("apply_model", "broken", fail)
    with pytest.raises(ZeroDivisionError):
        sample(broken, steps=1)
    assert getattr(registry._thread_local, "backend_override", None) is None


@pytest.mark.parametrize("act", [None, "none", "gelu_tanh", "swiglu"])
@pytest.mark.parametrize("convrot", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("scale", ["row", "scalar"])
def test_result_equals_the_hosts_within_a_quantisation_step(registry, call, cosine, act, convrot, scale):
    arguments = call(input_act=act, convrot=convrot)
    if act == "swiglu":
        arguments["x"] = torch.cat([arguments["x"], arguments["x"].flip(0)], dim=-1)
    if scale == "scalar":
        arguments["weight_scale"] = torch.tensor(0.005)
    expected = registry.get_implementation("int8_linear", "eager", arguments)(**arguments)
    got = registry.get_implementation("int8_linear", "native_int8", arguments)(**arguments)
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert cosine(got, expected) > 0.9999


@pytest.mark.parametrize("shape", [(256,), (1, 256), (0, 256), (3, 1, 256), (2, 1, 2, 3, 256)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.fault("B86", "B99")
def test_all_ranks_and_float_types(registry, call, shape, dtype):
    arguments = call(x=torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype), out_dtype=dtype)
    got = registry.get_implementation("int8_linear", "native_int8", arguments)(**arguments)
    assert got.shape == (*shape[:-1], 48)
    assert got.dtype == dtype


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_act": "situ"}, "input activation situ"),
        ({"input_act": "rms_norm", "input_act_weight": torch.ones(255)}, "must hold 256 values"),
        ({"input_act": "rms_norm"}, "must hold 256 values"),
        ({"input_act_weight": torch.ones(256)}, "only known for an RMSNorm"),
        ({"residual_scale": torch.ones(48)}, "without a residual"),
        ({"x": torch.zeros(2, 7, 256), "residual": torch.zeros(2, 7, 47)}, "(2, 7, 48) are needed"),
        ({"x": torch.zeros(2, 7, 256), "residual": torch.zeros(2, 7, 48, dtype=torch.int32)}, "floats"),
        (
            {"x": torch.zeros(2, 7, 256), "residual": torch.zeros(2, 7, 48).half(), "out_dtype": torch.bfloat16},
            "where the output is",
        ),
        (
            {
                "x": torch.zeros(2, 7, 256),
                "residual": torch.zeros(2, 7, 48),
                "residual_scale": torch.ones(3),
                "out_dtype": None,
            },
            "residual_scale holds 3 values",
        ),
        ({"a_new_argument": 1}, "a_new_argument is not known"),
        ({"x": torch.zeros(2, 256, dtype=torch.float64)}, "float16, bfloat16 or float32"),
        ({"x": torch.zeros(2, 256, dtype=torch.int8)}, "float16, bfloat16 or float32"),
        ({"x": torch.zeros(1, 1, 1, 1, 2, 256)}, "6 dimensions"),
        ({"x": torch.zeros(2, 255)}, "255 features"),
        ({"x": torch.zeros(2, 256), "input_act": "swiglu"}, "needs 512"),
        ({"weight": torch.zeros(48, 256)}, "int8 [N, K] is needed"),
        ({"weight": torch.zeros(48, 2, 128, dtype=torch.int8)}, "int8 [N, K] is needed"),
        ({"weight_scale": torch.ones(47)}, "1 or 48 floats"),
        ({"weight_scale": torch.ones(48, dtype=torch.int32)}, "1 or 48 floats"),
        ({"out_dtype": torch.float8_e4m3fn}, "output type"),
        ({"convrot": True, "convrot_groupsize": 128}, "rotation group 128"),
        ({"weight": torch.zeros(48, 256, dtype=torch.int8, device="meta")}, "on meta"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_declines_with_a_sentence(registry, call, changes, words):
    answer = registry.validate_backend_for_call("native_int8", "int8_linear", call(**changes))
    assert not answer.success
    assert words in answer.failure_reason


def test_declines_where_a_gradient_is_needed(registry, call):
    with torch.inference_mode(False), torch.enable_grad():
        arguments = call(x=torch.zeros(2, 256, requires_grad=True))
        answer = registry.validate_backend_for_call("native_int8", "int8_linear", arguments)
    assert "needs a gradient" in answer.failure_reason


def test_neutral_arguments_of_newer_hosts_are_taken(registry, call):
    extra = {"input_act_weight": None, "input_act_eps": 1e-6, "residual": None, "residual_scale": None}
    arguments = call(**extra)
    got = registry.get_implementation("int8_linear", "native_int8", arguments)(**arguments)
    expected = registry.get_implementation("int8_linear", "native_int8", call())(**call())
    assert torch.equal(got, expected)


def test_a_declined_call_runs_on_the_host_and_is_counted(registry, call):
    record = host_backend.CallRecord()
    host_backend._running.record = record
    try:
        with registry.use_backend("native_int8"):
            # 6 dimensions: the host takes any number
            arguments = call(x=torch.zeros(1, 1, 1, 1, 2, 256))
            assert registry.get_capable_backend("int8_linear", arguments) == "eager"
    finally:
        host_backend._running.record = None
    assert record.snapshot() == {"calls": {}, "declined": {"x has 6 dimensions; 1 to 5 are supported": 1}}


def test_a_norm_in_front_and_a_residual_behind_are_part_of_the_linear(registry, call, cosine):
    generator = torch.Generator().manual_seed(6)
    weight, gate = torch.rand(256, generator=generator), torch.rand(48, generator=generator)
    run = registry.get_implementation("int8_linear", "native_int8", call())
    plain = call(input_act=None)
    x, out = plain["x"], run(**plain)
    normed = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
    arguments = plain | {"input_act": "rms_norm", "input_act_weight": weight, "input_act_eps": 1e-6}
    assert registry.validate_backend_for_call("native_int8", "int8_linear", arguments).success
    assert cosine(run(**arguments), run(**(plain | {"x": normed}))) > 0.9999
    residual = torch.randn(out.shape, generator=generator).to(out.dtype)
    arguments = plain | {"residual": residual, "residual_scale": gate}
    assert registry.validate_backend_for_call("native_int8", "int8_linear", arguments).success
    assert cosine(run(**arguments), residual.float() + gate * out.float()) > 0.9999
    with registry.use_backend("native_int8"):
        assert registry.get_capable_backend("int8_linear", arguments) == "native_int8"


@pytest.mark.parametrize("function", ["int8_linear_modulated", "int8_linear_rms_modulated"])
def test_modulated_linears_are_the_composition(registry, call, cosine, function):
    arguments = call()
    del arguments["input_act"]
    generator = torch.Generator().manual_seed(5)
    scale, weight = torch.randn(1, 1, 256, generator=generator), torch.rand(256, generator=generator)
    x = arguments["x"]
    extra = {"modulation_scale": scale}
    if function == "int8_linear_rms_modulated":
        extra |= {"norm_weight": weight, "norm_eps": 1e-6}
        x = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
    got = registry.get_implementation(function, "native_int8", arguments | extra)(**arguments, **extra)
    composed = arguments | {"x": x * (1 + scale)}
    expected = registry.get_implementation("int8_linear", "native_int8", composed)(**composed)
    # the fused norm stays in fp32, where the composition rounds it to the dtype of x
    assert cosine(got, expected) > 0.9999
    wrong = registry.validate_backend_for_call(
        "native_int8", function, arguments | extra | {"modulation_scale": weight[1:]}
    )
    assert "one row of 256" in wrong.failure_reason


@pytest.mark.fault("B37")
def test_nothing_of_the_host_is_replaced(comfy, stock_int8_model, sample):
    watched = [torch.nn.functional, comfy.ops, comfy.quant_ops, comfy.model_patcher.ModelPatcher, comfy.sd]
    before = [dict(vars(place)) for place in watched]
    host_backend.attach(stock_int8_model)
    sample(stock_int8_model, steps=1)
    assert [dict(vars(place)) for place in watched] == before
