"""Feed-forwards of the host that multiply without calling their last Linear: it gets its LoRA, and can be looked at."""

import inspect

import pytest
import torch
from native_int8.kernels import add_low_rank
from native_int8.nodes.int8 import (
    audit,
    benchmark,
    direct_linears,
    host_backend,
    loader,
    lora_branch,
    short_way,
    speeds,
    tuned_tiles,
)
from packtest.host_parts import fill, host_class
from packtest.loras import add_lora, int8_linears, lora_file, low_rank
from packtest.short_runs import call

pytestmark = pytest.mark.comfy
DIM, HIDDEN, TEXT = 64, 128, 4096

ARGUMENTS = {
    "ldm.lightricks.model.FeedForward": lambda kind, operations, **static: kind(
        DIM, DIM, mult=HIDDEN / DIM, glu=True, operations=operations, **static
    ),
    "ldm.minimax.model.MLP": lambda kind, operations, **static: kind(DIM, HIDDEN, operations=operations, **static),
    "ldm.wan.model.WanFeedForward": lambda kind, operations, **static: kind(
        operations.Linear(DIM, HIDDEN, **static),
        torch.nn.GELU(approximate="tanh"),
        operations.Linear(HIDDEN, DIM, **static),
    ),
}


class Model(torch.nn.Module):
    """A diffusion model of one feed-forward."""

    def __init__(self, feed):
        super().__init__()
        self.feed = feed

    def forward(self, x):
        return self.feed(x)


@pytest.fixture(params=ARGUMENTS)
def model(comfy, request):
    host_backend.register()
    try:
        kind = host_class(request.param)
    except AttributeError:
        pytest.skip("this ComfyUI has no such class")
    if "linear_input_act" not in kind.forward.__code__.co_names:
        pytest.skip("in this ComfyUI the class calls its Linears")
    operations = comfy.ops.mixed_precision_ops({}, torch.bfloat16)
    made = Model(ARGUMENTS[request.param](kind, operations, device=None, dtype=torch.bfloat16))
    fill(made, 64, {})
    return made


@pytest.fixture
def direct(model):
    return direct_linears.direct_of(model.feed)


def inputs():
    return torch.randn((2, 9, DIM), generator=torch.Generator().manual_seed(1)).bfloat16()


def activated(direct, hidden):
    if direct.act == direct_linears.GELU:
        return torch.nn.functional.gelu(hidden, approximate="tanh")
    gate, up = hidden.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


def test_table_and_tests_name_the_same():
    assert set(ARGUMENTS) == set(direct_linears.TABLE)


def test_the_class_is_known(direct):
    assert direct is not None
    assert {direct.first.in_features, direct.last.out_features} == {DIM}


def test_without_a_lora_it_is_the_class(model, direct):
    plain, _ = call(model, inputs())
    seen = []
    direct.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with direct_linears.seated(model) as passed_over:
        again, _ = call(model, inputs())
    assert torch.equal(again, plain) and not seen and not passed_over


@pytest.mark.parametrize("short", [True, False], ids=["short way", "host's way"])
def test_the_last_linear_gets_its_lora(model, direct, short):
    hidden, _ = call(direct.first, inputs())
    expected = call(model, inputs(), short=False)[0].float()
    for seed, layer in enumerate((direct.first, direct.last)):
        setattr(layer, short_way.BRANCH, low_rank(layer, seed, size=0.1))
    with short_way.seated(model), direct_linears.seated(model):
        got, _ = call(model, inputs(), short=short)
    add = direct.last.__dict__[short_way.BRANCH]
    hidden = add_low_rank(hidden.clone(), inputs(), direct.first.__dict__[short_way.BRANCH])
    del direct.first.__dict__[short_way.BRANCH], direct.last.__dict__[short_way.BRANCH]
    v = activated(direct, hidden)
    expected, _ = call(direct.last, v)
    expected = expected.float() + v.float() @ add.down.float().T @ add.up.float().T
    assert float((got.float() - expected).norm() / expected.norm()) < 0.01


def test_it_can_be_looked_at(model, direct):
    seen = []
    direct.last.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    plain, _ = call(model, inputs())
    assert not seen
    with direct_linears.called(model):
        got, _ = call(model, inputs())
    assert torch.equal(seen[0], activated(direct, call(direct.first, inputs())[0]))
    # the activation is rounded once more on this way
    assert float((got.float() - plain.float()).norm() / plain.float().norm()) < 0.01
    call(model, inputs())
    assert len(seen) == 1 and direct_linears.FORWARD not in vars(model.feed)


@pytest.mark.parametrize("on", ["module", "class"])
def test_another_pack_s_forward_stays_and_is_told(model, direct, on, monkeypatch):
    expected, kind = call(model, inputs())[0] * 2, type(model.feed)
    of_class = kind.forward
    with direct_linears.seated(model) as passed_over:
        assert not passed_over
    if on == "module":
        model.feed.forward = lambda x: of_class(model.feed, x) * 2
    else:
        monkeypatch.setattr(kind, "forward", lambda self, x: of_class(self, x) * 2)
    assert not direct_linears.is_ready(model.feed)
    with direct_linears.called(model), direct_linears.seated(model) as passed_over:
        assert passed_over == {direct.last}
        got, _ = call(model, inputs())
    assert torch.equal(got, expected)


def test_loras_are_baked_where_the_host_s_code_is_another(model, direct, monkeypatch):
    path = next(name for name, module in model.named_modules() if module is direct.last)
    assert lora_branch.why_not_beside(model, path, direct.last) is None
    kind = type(model.feed)

    def forward(self, x):
        return linear_input_act(direct.last, x, "")  # noqa: F821

    monkeypatch.setattr(kind, "forward", forward)
    assert direct_linears.direct_of(model.feed) is None
    assert "hands weights to the kernel" in lora_branch.why_not_beside(model, path, direct.last)


def test_a_compiler_sees_the_lora(model, direct):
    x = inputs()
    compiled = torch.compile(model, backend="eager")
    with short_way.seated(model), direct_linears.seated(model):
        plain, _ = call(compiled, x, short=False)
        assert torch.equal(plain, call(model, x, short=False)[0])
        setattr(direct.last, short_way.BRANCH, low_rank(direct.last, size=0.1))
        got, _ = call(compiled, x, short=False)
        assert not torch.equal(got, plain)
        expected, _ = call(model, x, short=False)
        assert float((got.float() - expected.float()).norm() / expected.float().norm()) < 0.01


def test_all_such_classes_of_diffusion_models_are_known(comfy):
    """A class that is new here has the LoRAs of its Linears baked in until it is listed; see direct_linears.TABLE."""
    import sys

    import comfy.model_base  # noqa: F401

    found = {
        f"{kind.__module__}.{kind.__qualname__}".removeprefix("comfy.")
        for name, module in list(sys.modules.items())
        if name.startswith("comfy.ldm.") and module is not None
        for kind in vars(module).values()
        if inspect.isclass(kind) and issubclass(kind, torch.nn.Module) and lora_branch._takes_weights(kind)
    }
    # the language model of MiniMax Music is loaded as a text encoder
    text_encoders = {name for name in found if name.startswith("ldm.minimax_music.ar.")}
    assert found - text_encoders <= set(direct_linears.TABLE)


@pytest.fixture
def wan(comfy):
    """A small Wan 2.1 as the host's float MODEL and as our INT8 MODEL."""
    from comfy.ldm.wan.model import WanModel

    host_backend.register()
    operations = comfy.ops.disable_weight_init
    made = WanModel(dim=256, ffn_dim=768, num_heads=2, num_layers=2, text_dim=TEXT, operations=operations)
    state, g = {}, torch.Generator().manual_seed(0)
    for name, value in made.state_dict().items():
        random = torch.randn(value.shape, generator=g)
        state[name] = 1 + random * 0.1 if "norm" in name else random * value.shape[-1] ** -0.5
    in_int8, _ = loader.load_state_dict(dict(state), None)
    host_backend.attach(in_int8)
    return comfy.sd.load_diffusion_model_state_dict(dict(state)), in_int8


def denoised(comfy, model):
    """One forward of a MODEL as the sampler makes it."""
    g = torch.Generator().manual_seed(2)
    text = torch.randn((1, 8, TEXT), generator=g)
    latent, noise = torch.zeros((1, 16, 1, 8, 8)), torch.randn((1, 16, 1, 8, 8), generator=g)
    condition = [[text, {}]]
    return comfy.sample.sample(
        model, noise, 1, 1.0, "euler", "simple", condition, condition, latent, disable_pbar=True, seed=0
    )


@pytest.mark.parametrize("speed", [speeds.FUSED, speeds.LINEAR_ONLY])
def test_every_lora_of_a_wan_runs_beside_and_counts(comfy, wan, cosine, speed):
    in_float, in_int8 = wan
    host_backend.set_speed(in_int8, speed)
    file = lora_file(in_int8, size=0.5)
    patched = add_lora(in_int8, file)
    plan = patched.native_int8_plan()
    assert len(plan.beside) == len(int8_linears(in_int8)) and not plan.baked
    change = denoised(comfy, patched) - denoised(comfy, in_int8)
    expected = denoised(comfy, add_lora(in_float, file)) - denoised(comfy, in_float)
    assert cosine(change, expected) > 0.995


@pytest.mark.parametrize("speed", [speeds.FUSED, speeds.LINEAR_ONLY])
def test_another_type_to_compute_in_leaves_every_linear_of_a_wan_in_int8(comfy, wan, cosine, speed):
    in_int8 = wan[1].clone()
    host_backend.set_speed(in_int8, speed)
    expected = denoised(comfy, in_int8)
    in_int8.set_model_compute_dtype(torch.bfloat16)
    record = host_backend.record_of(in_int8)
    record.reset()
    got = denoised(comfy, in_int8)
    assert sum(record.snapshot()["calls"].values()) == len(int8_linears(in_int8)) and not record.snapshot()["declined"]
    assert cosine(got, expected) > 0.999


def test_the_audit_sees_every_linear_of_a_wan(wan):
    _, in_int8 = wan
    text = torch.randn((1, 8, TEXT), generator=torch.Generator().manual_seed(2))
    found = audit.audit(in_int8, {"samples": torch.zeros((1, 16, 1, 8, 8))}, [[text, {}]])
    assert found.count(audit.INT8) == len(int8_linears(in_int8)) and found.count(audit.IDLE) == 0


def test_the_kernel_with_the_activation_is_compiled_ahead(wan):
    _, in_int8 = wan
    feed = in_int8.model.diffusion_model.blocks[0].ffn
    kinds = [kind for kind in tuned_tiles.linears_of(in_int8) if kind.in_features == feed[2].in_features]
    folded = [direct_linears.GELU] if direct_linears.direct_of(feed) else []
    assert [kind.input_act for kind in kinds] == [None, *folded]


def test_the_benchmark_sees_every_linear_of_a_wan(wan):
    _, in_int8 = wan
    names = {name.removeprefix("diffusion_model.") for name in int8_linears(in_int8)}
    text = torch.randn((1, 8, TEXT), generator=torch.Generator().manual_seed(2))
    latent = {"samples": torch.zeros((1, 16, 1, 8, 8))}
    seen, _ = benchmark.timed_forward(in_int8, names, [[text, {}]], latent, lambda done: None)
    assert set(seen) == names
