"""Linears that read one tensor quantise it once: in the host's own classes, equal bit for bit, and nowhere else."""

import threading
import weakref

import pytest
import torch
from native_int8.kernels import prepared_linear
from native_int8.nodes.int8 import host_backend, shared_rows, short_way
from native_int8.nodes.int8.call_record import CallRecord
from packtest import host_parts
from packtest.host_parts import DIM, arguments, build, rows
from packtest.short_runs import call, half_scale

pytestmark = pytest.mark.comfy

FEED_FORWARD = "ldm.lumina.model.FeedForward"
ATTENTION = "ldm.lightricks.model.CrossAttention"


@pytest.fixture
def quantised(monkeypatch):
    """The inputs that the short way quantised, in order."""
    real, seen = prepared_linear.quantize_2d, []

    def quantize_2d(x, *rest):
        seen.append(tuple(x.shape))
        return real(x, *rest)

    monkeypatch.setattr(prepared_linear, "quantize_2d", quantize_2d)
    return seen


@pytest.fixture(autouse=True)
def registered(comfy, monkeypatch):
    host_backend.register()
    real = short_way._check_resident

    def check_resident(weight, input):
        return "it lies elsewhere" if hasattr(weight, "lies_elsewhere") else real(weight, input)

    monkeypatch.setattr(short_way, "_check_resident", check_resident)


def assert_equal(got, expected):
    pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
    assert all(one is other or torch.equal(one, other) for one, other in pairs)


def linears(module):
    return sum(hasattr(part, "in_features") for part in module.modules())


def fetched(part):
    """Let the host fetch the weight, as it does for a layer that is offloaded."""
    part.weight.lies_elsewhere = True


@pytest.mark.parametrize("way", ["resident", "fetched"])
@pytest.mark.parametrize("group", [0, 16], ids=["plain", "rotated"])
@pytest.mark.parametrize("name", shared_rows.TABLE)
def test_equals_the_general_way_and_quantises_once(comfy, quantised, name, group, way):
    module = build(comfy, name, group)
    if way == "fetched":
        for part in module.modules():
            if hasattr(part, "in_features"):
                fetched(part)
    inputs = arguments(name)
    expected, _ = call(module, *inputs, short=False)
    for _ in range(2):
        quantised.clear()
        got, run = call(module, *inputs)
        assert_equal(got, expected)
        # in the cross-attentions among them q reads another tensor, which its group does not list
        spared = sum(len(names) - 1 for names in shared_rows.TABLE[name][1])
        assert run.ways == {way: linears(module)}
        assert (run.shared.spared, len(quantised)) == (spared, linears(module) - spared)
        assert run.shared.not_shared == {}


@pytest.mark.parametrize("name", shared_rows.TABLE)
def test_the_host_has_the_listed_classes_as_they_were_read(comfy, name):
    module = build(comfy, name)
    method, groups = shared_rows.TABLE[name]
    for names in groups:
        assert [child for child in names if not hasattr(module._modules.get(child), "in_features")] == []
        assert shared_rows.why_unknown(type(module), method, names) is None
    assert len({child for names in groups for child in names}) == sum(map(len, groups))


def test_a_context_of_its_own_is_shared_by_k_and_v_only(comfy, quantised):
    attention = build(comfy, ATTENTION)
    inputs = rows(), rows(5, seed=2)
    expected, _ = call(attention, *inputs, short=False)
    got, run = call(attention, *inputs)
    assert_equal(got, expected)
    assert run.shared.spared == 1
    assert quantised == [(24, DIM), (10, DIM), (24, DIM)]


def test_a_member_of_another_rotation_quantises_for_itself(comfy, quantised):
    attention = build(comfy, ATTENTION, 16, {"to_k": 64})
    expected, _ = call(attention, rows(), short=False)
    got, run = call(attention, rows())
    assert_equal(got, expected)
    assert (run.shared.spared, len(quantised)) == (0, 4)


def lora(layer):
    layer.weight_function = [lambda weight: weight * 2]


@pytest.mark.parametrize("change", [lora, half_scale, fetched])
@pytest.mark.parametrize("member", ["to_q", "to_k", "to_v"])
def test_what_the_host_does_to_one_member_is_its_own_affair(comfy, change, member):
    attention = build(comfy, ATTENTION, 16)
    change(getattr(attention, member))
    expected, _ = call(attention, rows(), short=False)
    got, run = call(attention, rows())
    assert_equal(got, expected)
    # a weight that the host fetches is still INT8 and takes the rows
    assert run.shared.spared == (2 if change is fetched else 1)


def test_float_members_are_no_members(comfy):
    attention = build(comfy, ATTENTION)
    attention.to_v = torch.nn.Linear(DIM, DIM, dtype=torch.bfloat16)
    assert call(attention, rows())[1].shared.spared == 1
    attention.to_k = torch.nn.Linear(DIM, DIM, dtype=torch.bfloat16)
    short_way.seats_of.forget(attention)
    assert call(attention, rows())[1].shared.spared == 0


@pytest.mark.parametrize("on", ["module", "class"])
def test_a_foreign_forward_of_the_parent_ends_sharing(comfy, monkeypatch, on):
    part = build(comfy, FEED_FORWARD)
    call(part, rows())

    def forward(x):
        gate = part.w1(x)
        x += 1
        return part.w2(part._forward_silu_gating(gate, part.w3(x)))

    if on == "module":
        part.forward = forward
    else:
        monkeypatch.setattr(type(part), "forward", lambda self, x: forward(x))
    expected, _ = call(part, rows(), short=False)
    got, run = call(part, rows())
    assert_equal(got, expected)
    assert run.shared.spared == 0


def test_a_class_that_another_pack_changed_before_is_said(comfy, monkeypatch):
    part = build(comfy, FEED_FORWARD)
    own = type(part).forward
    monkeypatch.setattr(type(part), "forward", lambda self, x: own(self, x))
    _, run = call(part, rows())
    assert run.shared.spared == 0
    assert run.shared.not_shared == {f"comfy.{FEED_FORWARD} is not known here: another pack replaced its forward": 2}


def add(self, x):
    gate = self.w1(x)
    x += 1
    return gate * self.w3(x)


def by_method(self, x):
    gate = self.w1(x)
    x.mul_(2)
    return gate * self.w3(x)


def by_a_view(self, x):
    half = x[:, :1]
    gate = self.w1(x)
    half.squeeze(1).mul_(2)
    return gate * self.w3(x)


def by_item(self, x):
    gate = self.w1(x)
    x[:, 0] = 2
    return gate * self.w3(x)


def by_function(self, x):
    gate = self.w1(x)
    torch.relu_(x)
    return gate * self.w3(x)


def by_flag(self, x):
    return self.w1(x) * torch.nn.functional.silu(x, inplace=True).sum() * self.w3(x)


def by_out(self, x):
    gate = self.w1(x)
    torch.add(x[:1], 1, out=x[:1])
    return gate * self.w3(x)


def by_what_is_not_seen(self, x):
    gate = self.w1(x)
    self.norm(x)
    return gate * self.w3(x)


def in_another_order(self, x):
    return self.w3(x) * self.w1(x)


def in_a_branch(self, x):
    return self.w1(x) * self.w3(x) if x.dim() else self.w3(x)


def of_something_else(self, x):
    return self.w1(x) * self.w3(x + 1)


CHANGES = [add, by_method, by_a_view, by_item, by_function, by_flag, by_out, by_what_is_not_seen, in_another_order,
           in_a_branch, of_something_else]  # fmt: skip


class Gated(torch.nn.Module):
    """A SwiGLU that the table does not know."""

    norm = staticmethod(lambda x: x.mul_(2))

    def __init__(self, like):
        super().__init__()
        self.w1, self.w3 = like.w1, like.w3


@pytest.mark.parametrize("forward", CHANGES)
def test_a_change_between_members_is_never_shared(comfy, monkeypatch, forward):
    made = type("Gated", (Gated,), {"forward": forward})
    gated = made(build(comfy, FEED_FORWARD, 16))
    expected, _ = call(gated, rows(), short=False)
    got, run = call(gated, rows())
    assert_equal(got, expected)
    assert (run.shared.spared, run.shared.not_shared) == (0, {})
    # nor when a later host changed a listed class in such a way
    made.__module__, made.__qualname__, name = "comfy.ldm.made.up", "Gated", "ldm.made.up.Gated"
    monkeypatch.setattr(forward, "__module__", made.__module__)
    monkeypatch.setitem(shared_rows.TABLE, name, ("forward", (("w1", "w3"),)))
    short_way.seats_of.forget(gated)
    got, run = call(gated, rows())
    assert_equal(got, expected)
    assert run.shared.spared == 0
    assert [reason for reason in run.shared.not_shared if f"comfy.{name} is not known here: " in reason]


def test_a_host_with_other_children_or_methods_is_not_known_here(comfy, monkeypatch):
    part = build(comfy, FEED_FORWARD)
    wrong = {("w1", "w3", "w4"): "other names", ("w1", "w2"): "more than one variable"}
    for names, words in wrong.items():
        monkeypatch.setitem(shared_rows.TABLE, FEED_FORWARD, ("forward", (names,)))
        _, reasons = shared_rows.find(part, lambda child: True)
        assert [words in reason for reason in reasons] == [True], reasons
    monkeypatch.setitem(shared_rows.TABLE, FEED_FORWARD, ("forwards", (("w1", "w3"),)))
    _, reasons = shared_rows.find(part, lambda child: True)
    assert reasons == {f"comfy.{FEED_FORWARD} is not known here: it has no method forwards": 2}
    record = CallRecord()
    call_with(record, part)
    assert "no rows shared between Linears; each for itself: 2 comfy.ldm." in record.sentence()


def call_with(record, model):
    with short_way.inside(model, record.add_run):
        return model(rows())


def test_a_member_that_runs_again_starts_anew(comfy):
    part, x = build(comfy, FEED_FORWARD), rows()
    runs = []
    with short_way.inside(part, runs.append):
        part.w1(x)
        x += 1
        again = part.w1(x)
        up = part.w3(x)
    assert_equal(again, call(part.w1, x, short=False)[0])
    assert_equal(up, call(part.w3, x, short=False)[0])
    assert runs[0].shared.spared == 1


def test_nothing_is_kept_longer_than_the_group(comfy):
    part, runs = build(comfy, FEED_FORWARD), []

    def alive_after(*layers):
        x = rows()
        for layer in layers:
            layer(x)
        alive = weakref.ref(x)
        del x
        return alive() is not None

    other = build(comfy, "ldm.lens.model.GateMLP")
    model = torch.nn.ModuleList([part, other])
    w2 = lambda x: part.w2(torch.ones((1, host_parts.HIDDEN), dtype=torch.bfloat16))  # noqa: E731
    general = lambda x: part.w2(torch.ones((1, host_parts.HIDDEN), dtype=torch.float64).bfloat16().requires_grad_())  # noqa: E731
    with short_way.inside(model, runs.append):
        assert not alive_after(part)
        assert not alive_after(part.w1, part.w3)
        assert not alive_after(part.w3)
        # a Linear outside the group, and another group
        assert not alive_after(part.w1, w2)
        with torch.inference_mode(False), torch.no_grad():
            assert not alive_after(part.w1, general)
        assert not alive_after(part.w1, other.w3)
        assert alive_after(part.w1)
        x = rows()
        part.w1(x)
        alive = weakref.ref(x)
        del x
        assert alive() is not None
    assert alive() is None
    assert runs[0].shared.spared == 2


def test_an_error_lets_go_of_what_was_kept(comfy):
    part, runs = build(comfy, FEED_FORWARD), []
    x = rows()
    with pytest.raises(ZeroDivisionError), short_way.inside(part, runs.append):
        part.w1(x)
        raise ZeroDivisionError
    alive = weakref.ref(x)
    del x
    assert alive() is None


def test_threads_share_modules_and_no_rows(comfy):
    part, both, results = build(comfy, FEED_FORWARD, 16), threading.Barrier(2), {}
    inputs = [rows(seed=seed) for seed in range(2)]
    expected = [call(part, x)[0] for x in inputs]

    # both have quantised for w1 before either runs w3
    def wait(*_):
        both.wait(20)

    part.w1.register_forward_hook(wait)

    def work(index):
        with torch.inference_mode():
            results[index] = [call(part, inputs[index]) for _ in range(5)]

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for index, wanted in enumerate(expected):
        for got, run in results[index]:
            assert_equal(got, wanted)
            assert run.shared.spared == 1


def test_torch_compile_traces_no_sharing(comfy):
    part, x, runs = build(comfy, FEED_FORWARD), rows(), []
    expected, _ = call(part, x, short=False)
    torch._dynamo.reset()
    compiled = torch.compile(part, backend="eager")
    from comfy_kitchen.registry import registry

    with registry.use_backend("native_int8"):
        for _ in range(2):
            with short_way.inside(compiled, runs.append):
                assert_equal(compiled(x), expected)
    assert [run.shared.spared for run in runs] == [0, 0]


def test_the_record_counts_and_says_it(comfy):
    record, attention = CallRecord(), build(comfy, ATTENTION)
    for _ in range(2):
        call_with(record, attention)
    assert record.rows_shared() == {"quantised": 4, "spared": 4, "not_shared": {}}
    assert record.sentence() == (
        "INT8 Linears run: 8 torch; way: 8 resident; 4 of 8 quantisations spared, since Linears of one attention or "
        "feed-forward read the same rows."
    )
    record.reset()
    assert record.sentence() == "INT8 Linears run: none; no rows shared between Linears."
