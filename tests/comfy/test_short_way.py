"""The short way in the host's own Linears: equal to the general way bit for bit, and aside whenever the host is needed."""

import functools
import threading

import pytest
import torch
from native_int8.nodes.int8 import host_backend, short_way
from packtest.short_runs import K, N, build_pair, call, half_scale, instance_attributes

pytestmark = pytest.mark.comfy


@pytest.fixture
def build(comfy):
    """A function (seed) -> a new pair of Linears whose weights depend on the seed."""
    return functools.partial(build_pair, comfy)


@pytest.fixture
def model(build):
    return build()


@pytest.fixture
def x():
    return torch.randn((2, 7, K), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(K,), (1, K), (0, K), (2, 7, K), (2, 1, 3, 1, K)], ids=str)
def test_equals_the_general_way(model, shape, dtype):
    x = torch.randn(shape).to(dtype)
    expected, _ = call(model.first, x, short=False)
    for _ in range(2):
        got, run = call(model.first, x)
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
        assert run.ways == {"resident": 1}


def test_counts_linears_and_leaves_nothing_behind(model, x):
    before = instance_attributes(model)
    expected, _ = call(model, x, short=False)
    got, run = call(model, x)
    assert torch.equal(got, expected)
    assert run.ways == {"resident": 2}
    assert sum(run.calls.values()) == 2
    assert run.reasons == {}
    assert instance_attributes(model) == before


def test_strided_rows(model):
    wide = torch.randn((5, 2 * K))
    for x in (wide[:, :K], wide[:, ::2], wide.t()[:K].t()):
        assert torch.equal(call(model.first, x)[0], call(model.first, x, short=False)[0])


def force_cast(layer):
    layer.comfy_force_cast_weights = True


def full_precision(layer):
    layer._full_precision_mm = True


def dynamic_slot(layer):
    layer._v = object()


def weight_function(layer):
    layer.weight_function = [lambda weight: weight * 2]


def bias_function(layer):
    layer.bias_function = [lambda bias: bias + 1]


def sliced_bias(layer):
    layer.bias = torch.nn.Parameter(torch.randn(2 * N)[::2], requires_grad=False)


@pytest.mark.parametrize(
    ("change", "way", "words"),
    [
        (full_precision, "fetched", "full precision"),
        (dynamic_slot, "fetched", "dynamic VRAM"),
        (weight_function, "general", "changes the weight"),
        (bias_function, "fetched", "changes the bias"),
        (half_scale, "general", "float16"),
        (sliced_bias, "general", "not contiguous"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_leaves_to_the_host_what_the_host_has_to_do(model, x, change, way, words, monkeypatch):
    layer = model.first
    plain, run = call(layer, x)
    assert run.ways == {"resident": 1}
    if change is dynamic_slot:
        # the host casts a CPU model's slot away; on a GPU it would fetch from it
        from comfy import model_management

        monkeypatch.setattr(model_management, "is_device_cpu", lambda device: False)
    change(layer)
    expected, _ = call(layer, x, short=False)
    got, run = call(layer, x)
    assert torch.equal(got, expected)
    assert run.ways == {way: 1}
    assert any(words in reason for reason in run.reasons), run.reasons
    if change in (weight_function, bias_function):
        assert not torch.equal(got, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_type_to_compute_in_keeps_int8(model, x, dtype):
    layer, x = model.first, x.to(dtype)
    expected, _ = call(layer, x)
    layer.comfy_force_cast_weights = True
    got, run = call(layer, x)
    assert run.ways == {"resident": 1} and run.reasons == {}
    assert got.dtype == dtype and torch.equal(got, expected)
    layer._v = object()
    assert short_way._is_only_forced(layer, layer.weight)
    layer.weight_function = [lambda weight: weight * 2]
    assert not short_way._is_only_forced(layer, layer.weight)


def test_a_weight_on_another_device_is_fetched_by_the_host(model):
    call(model.first, torch.randn(2, K))
    reason = short_way._prepared(model.first.weight, torch.randn((2, K), device="meta"))
    assert reason == "the weight is on cpu and the input on meta"


def test_a_wrong_width_is_the_hosts_error(model):
    call(model.first, torch.randn(2, K))
    with pytest.raises((RuntimeError, ValueError)):
        call(model.first, torch.randn(2, K + 1))
    assert "_forward" not in vars(model.first)


def test_a_new_weight_is_seen_at_once_and_the_old_one_is_let_go(model, x, comfy):
    import weakref

    layer = model.first
    before, _ = call(layer, x)
    old = weakref.ref(layer.weight._qdata)
    layer.set_weight(layer.weight.dequantize() * 1.5, seed=1)
    got, run = call(layer, x)
    assert old() is None
    assert run.ways == {"resident": 1}
    assert not torch.equal(got, before)
    assert torch.equal(got, call(layer, x, short=False)[0])


def test_moved_weights_are_checked_again(model, x):
    layer = model.first
    call(layer, x)
    known = short_way.seats_of(layer)
    layer.to(torch.float32)
    got, run = call(layer, x)
    assert run.ways == {"resident": 1}
    assert torch.equal(got, call(layer, x, short=False)[0])
    assert short_way.seats_of(layer) is known


@pytest.mark.parametrize("when", ["before", "inside"])
def test_a_foreign_forward_keeps_its_say(model, x, when):
    layer = model.first
    own = layer.forward

    def doubled(input):
        return own(input) * 2

    expected = call(layer, x)[0] * 2
    if when == "before":
        layer.forward = doubled
        got, run = call(layer, x)
    else:
        runs = []
        with short_way.inside(layer, runs.append):
            layer.forward = doubled
            got = layer(x)
        run = runs[0]
    assert torch.equal(got, expected)
    assert run.ways == {"resident": 1}
    assert layer.forward is doubled
    # what a host or a pack leaves behind when it puts the bound method back
    layer.forward = own
    assert torch.equal(call(layer, x)[0] * 2, expected)


@pytest.mark.parametrize("name", [short_way.UPPER, short_way.LOWER])
def test_a_foreign_method_where_ours_would_sit_stays(model, x, name):
    layer = model.first
    own = getattr(layer, name)
    foreign = layer.__dict__[name] = lambda *args, **kwargs: own(*args, **kwargs) * 2
    expected, _ = call(layer, x, short=False)
    got, run = call(layer, x)
    assert torch.equal(got, expected)
    assert run.ways["resident"] == 0
    assert run.reasons == {f"another pack replaced {name}": 1}
    assert vars(layer)[name] is foreign


def test_a_method_kept_by_mistake_does_nothing(model, x):
    layer = model.first
    expected, _ = call(layer, x, short=False)
    with short_way.inside(layer, lambda run: None):
        kept = layer.__dict__[short_way.UPPER]
    layer.__dict__[short_way.UPPER] = kept
    got, run = call(layer, x, short=False)
    assert run is None
    assert torch.equal(got, expected)


def test_an_error_inside_ends_it(model, x):
    before, runs = instance_attributes(model), []
    with pytest.raises(ZeroDivisionError), short_way.inside(model, runs.append):
        model.first(x)
        raise ZeroDivisionError
    assert runs[0].ways == {"resident": 1}
    assert instance_attributes(model) == before
    assert short_way._thread.run is None


def test_a_gradient_goes_to_the_host(model):
    with torch.inference_mode(False):
        x = torch.randn((2, K), requires_grad=True)
        with torch.no_grad():
            _, run = call(model.first, x)
    assert run.ways == {"general": 1}
    assert "the input requires a gradient" in run.reasons


def test_torch_compile_traces_the_general_way_in_one_graph(model, x):
    from comfy_kitchen.registry import registry

    torch._dynamo.reset()
    expected, _ = call(model, x, short=False)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    runs = []
    with registry.use_backend("native_int8"):
        for _ in range(2):
            with short_way.inside(compiled, runs.append), torch._dynamo.config.patch(error_on_recompile=True):
                got = compiled(x)
    assert torch.equal(got, expected)
    assert all(run.ways == {} for run in runs)


def test_a_model_is_not_kept_alive(build, x):
    import gc
    import weakref

    made = build()
    call(made, x)
    alive = weakref.ref(made)
    del made
    gc.collect()
    assert alive() is None


def test_another_thread_on_the_same_model_keeps_the_general_way(model, x):
    from comfy_kitchen.registry import registry

    with registry.use_backend("eager"):
        hosts_own = model(x)
    results, entered, done = [], threading.Event(), threading.Event()

    def other():
        entered.wait(10)
        with torch.inference_mode(), registry.use_backend("eager"):
            results.append(model(x))
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    runs = []
    with short_way.inside(model, runs.append):
        entered.set()
        assert done.wait(10)
        ours = model(x)
    thread.join()
    assert torch.equal(results[0], hosts_own)
    assert runs[0].ways == {"resident": 2}
    assert not torch.equal(ours, hosts_own)


def test_two_threads_share_the_seats_until_the_last_leaves(model, x):
    before, expected = instance_attributes(model), call(model, x)[0]
    runs, results = [], []

    def work():
        with torch.inference_mode():
            for _ in range(20):
                with short_way.inside(model, runs.append):
                    results.append(model(x))

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 60
    assert all(torch.equal(result, expected) for result in results)
    assert all(run.ways == {"resident": 2} for run in runs)
    assert instance_attributes(model) == before


def test_copies_on_two_threads_share_the_wrapper_and_the_record(build, model, x):
    from types import SimpleNamespace

    from comfy.patcher_extension import WrapperExecutor

    # as the host's multi-GPU does: another model, the same wrapper, a thread each
    other = build(seed=5)
    expected = [call(model, x)[0], call(other, x)[0]]
    wrapper, results = host_backend._UseNativeInt8(), [[], []]

    def work(index):
        base = SimpleNamespace(diffusion_model=(model, other)[index])
        for _ in range(20):
            executor = WrapperExecutor.new_class_executor(base.diffusion_model, base, [wrapper])
            with torch.inference_mode():
                results[index].append(executor.execute(x))

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not torch.equal(*expected)
    for got, wanted in zip(results, expected, strict=True):
        assert len(got) == 20
        assert all(torch.equal(one, wanted) for one in got)
    assert wrapper.record.ways_taken() == {"ways": {"resident": 80}, "reasons": {}}
