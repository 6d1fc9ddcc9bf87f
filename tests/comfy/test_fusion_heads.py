"""Norm and rope of q and k straight into what Flux and Qwen-Image attend with: equal to the host's way, and modest."""

import pytest
import torch
from native_int8.nodes.int8 import graph_facts
from native_int8.nodes.int8.fusion import guards, heads
from packtest.short_runs import fused_call

from .test_fusion_streams import IMAGE, TEXT, Flux, make, other_forward, q_and_v, qwen_inputs

pytestmark = pytest.mark.comfy
# calls of the kernel: one for each stream of each block
CALLS = {"flux 1": 2 * 2 + 2, "flux 2": 2 * 2 + 2, "qwen": 2 * 2}


@pytest.fixture
def calls(comfy, monkeypatch):
    """What the kernel was called with; it is chosen as on a card with Triton, and PyTorch computes."""
    made = []
    real = heads.rms_rope
    monkeypatch.setattr(heads, "choose", lambda *_, **__: type("Choice", (), {"implementation": "triton"}))
    monkeypatch.setattr(heads, "rms_rope", lambda *args, **kwargs: (made.append(args), real(*args, **kwargs))[1])
    as_if_available(monkeypatch)
    return made


def as_if_available(monkeypatch, *backends):
    from comfy_kitchen.registry import registry

    monkeypatch.setattr(registry, "is_available", lambda name: name in (*backends, "native_int8", "eager"))


def compared(model, inputs):
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert not run.unfused
    assert torch.equal(got, expected)
    return got


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", CALLS)
def test_equals_the_host_s_way(comfy, calls, name, batch):
    model, inputs, _ = make(comfy, name, batch)
    compared(model, inputs)
    assert len(calls) == CALLS[name]
    lengths = {q.shape[1] for q, *_ in calls}
    assert lengths == ({TEXT, IMAGE, TEXT + IMAGE} if name != "qwen" else {TEXT, IMAGE})


def other_eps(model):
    model.blocks[0].attn.norm_k.eps = 1e-5


# name of a model, what is done to it -> calls that are left
MODEST = {
    "hooked norm": ("flux 1", lambda m: m.doubles[0].txt_attn.norm.register_forward_hook(lambda *a: a[-1]), 4),
    "wrapped norm of k": ("flux 1", lambda m: other_forward(m.singles[1].norm.key_norm), 5),
    "wrapped norm of text": ("qwen", lambda m: other_forward(m.blocks[1].attn.norm_added_q), 2),
    "another eps": ("qwen", other_eps, 2),
}  # fmt: skip


@pytest.mark.parametrize("how", MODEST)
def test_patched_norms_are_the_host_s(comfy, calls, how):
    name, change, left = MODEST[how]
    model, inputs, _ = make(comfy, name)
    change(model)
    compared(model, inputs)
    assert len(calls) == left


def test_replaced_functions_of_the_host_are_called(comfy, calls, monkeypatch):
    from comfy.ldm.flux import layers, math
    from comfy.ldm.qwen_image import model as host

    for name, module, function in (
        ("flux 1", layers, "attention"), ("flux 1", math, "apply_rope"), ("qwen", host, "apply_rope1"),
    ):  # fmt: skip
        model, inputs, _ = make(comfy, name)
        plain = compared(model, inputs)
        calls.clear()
        with monkeypatch.context() as patch:
            real = getattr(module, function)
            patch.setattr(module, function, lambda q, *args, real=real, **kwargs: real(q * 0.5, *args, **kwargs))
            assert not torch.equal(compared(model, inputs), plain)
        assert not calls


def test_attention_patches_get_what_is_not_rotated(comfy, calls):
    options = {"patches": {"attn1_patch": [q_and_v]}, "block_index": 0}
    for name in ("flux 1", "qwen"):
        model, inputs, _ = make(comfy, name)
        inputs = (*inputs[:4], options) if name == "flux 1" else (*inputs, None, options)
        compared(model, inputs)
    assert not calls


def test_a_rotation_that_cannot_be_repeated_is_the_host_s(comfy, calls, monkeypatch):
    model = Flux(comfy, "flux 1", 0)
    _, inputs, _ = make(comfy, "flux 1")
    # no rope; matrices of heads
    pe = inputs[3]
    for turns in (None, pe.expand(-1, 4, -1, -1, -1, -1).contiguous()):
        compared(model, (*inputs[:3], turns, *inputs[4:]))
    assert not calls
    # whose products are rounded in an order that is not known
    as_if_available(monkeypatch, "triton")
    compared(make(comfy, "qwen")[0], qwen_inputs())
    assert not calls
    compared(model, inputs)
    assert len(calls) == CALLS["flux 1"]


def test_the_order_of_additions_is_the_one_of_the_host_s_backend(monkeypatch, calls):
    like, turns = torch.zeros((1, 3, 2, 8)), torch.zeros((1, 1, 3, 4, 2, 2))
    found = []
    for backends in ((), ("cuda", "triton"), ("triton",)):
        as_if_available(monkeypatch, *backends)
        found.append((heads._order(like, turns, 3), heads._order(like.bfloat16(), turns.bfloat16(), 3)))
    assert found == [(False, False), (True, True), (True, None)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_eps_that_is_not_given(dtype):
    eps = heads._default_eps(dtype, torch.device("cpu"))
    x = torch.randn((5, 64), generator=torch.Generator().manual_seed(0)).to(dtype) * 0.01
    expected = torch.nn.functional.rms_norm(x, (64,))
    assert torch.equal(torch.nn.functional.rms_norm(x, (64,), None, eps), expected)


def test_a_watched_forward_does_not_see_the_question_for_it():
    with graph_facts.WatchedOperators("cpu") as operators:
        heads._default_eps.__wrapped__(torch.bfloat16, torch.device("cpu"))
        assert operators.reason is None
        # the watch itself works
        torch.equal(torch.ones(1), torch.ones(1))
    assert operators.reason == "the model waits for values from the GPU (equal)"


@pytest.mark.gpu
def test_norms_that_the_host_fetches_keep_their_values(comfy):
    """The host casts what lies in host memory into two buffers by turns; a block needs more norms at once."""
    like = torch.empty((1,), device="cuda", dtype=torch.bfloat16)
    norms = [comfy.ops.manual_cast.RMSNorm(64, eps=1e-6, dtype=torch.bfloat16, device="cpu") for _ in range(6)]
    for number, norm in enumerate(norms):
        norm.weight = torch.nn.Parameter(torch.full((64,), float(number), dtype=torch.bfloat16), False)
    found = [guards.affine(norm, like) for norm in norms]
    assert [weight.float().unique().tolist() for weight, _ in found] == [[float(n)] for n in range(len(norms))]
    for _, loan in found:
        guards.release(loan)
