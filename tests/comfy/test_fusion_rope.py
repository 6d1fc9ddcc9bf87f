"""Norm and rope of q and k in fused runs: asked for by name, equal to comfy_kitchen's plain PyTorch, and modest."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend
from native_int8.nodes.int8.fusion import rope

pytestmark = pytest.mark.comfy


@pytest.fixture
def arguments(comfy):
    host_backend.register()
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn((2, 5, 3, 32), generator=g).bfloat16() for _ in "qk")
    freqs = torch.randn((1, 5, 1, 16, 2, 2), generator=g)
    weights = [(torch.rand(32, generator=g) + 0.5).bfloat16() for _ in "qk"]
    return {"q": q, "k": k, "freqs_cis": freqs, "q_scale": weights[0], "k_scale": weights[1], "epsilon": 1e-5}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Answer as on a card with Triton; PyTorch computes here."""
    monkeypatch.setattr(rope, "choose", lambda *_, **__: type("Choice", (), {"implementation": "triton"}))


@pytest.mark.parametrize("name", rope.FUNCTIONS)
def test_equals_plain_pytorch(arguments, as_on_a_gpu, name, monkeypatch):
    import comfy_kitchen
    from comfy_kitchen.registry import registry

    calls = []
    real = rope.rms_rope_of
    monkeypatch.setattr(rope, "rms_rope_of", lambda *args, **kwargs: (calls.append(1), real(*args, **kwargs))[1])
    expected = getattr(comfy_kitchen, name)(*arguments.values())
    with registry.use_backend("native_int8"):
        declined = getattr(comfy_kitchen, name)(*arguments.values())
        assert not calls
        with rope.inside():
            got = getattr(comfy_kitchen, name)(*arguments.values())
    assert calls == [1]
    for a, b, c in zip(expected, got, declined, strict=True):
        assert torch.equal(a, c)
        torch.testing.assert_close(a, b, rtol=0.0 if "half" in name else 0.01, atol=0.0 if "half" in name else 1e-3)


def change(**values):
    return lambda arguments: {**arguments, **{key: make(arguments) for key, make in values.items()}}


UNFIT = {
    "plain tensors": change(q=lambda a: a["q"].to("meta")),
    "gradient": change(q=lambda a: a["q"].float().requires_grad_()),
    "q is": change(q=lambda a: a["q"][0]),
    "q is torch": change(q=lambda a: a["q"].half()),
    "norm's weight": change(q_scale=lambda a: a["q_scale"][:8]),
    "frequencies are": change(freqs_cis=lambda a: a["freqs_cis"].transpose(1, 2)),
    "only a part": change(rot_dim=lambda a: 16),
    "not known here": change(residual=lambda a: None),
}


@pytest.mark.parametrize("reason", UNFIT)
def test_declines_what_it_does_not_know(arguments, as_on_a_gpu, reason):
    with rope.inside(), torch.inference_mode(False):
        assert rope.refusal("rms_rope_split_half", arguments) is None
        assert reason in rope.refusal("rms_rope_split_half", UNFIT[reason](arguments))


def test_leaves_it_to_the_host_where_that_is_as_good(arguments):
    assert rope.refusal("rms_rope", arguments) == "the MODEL does not run fused"
    with rope.inside():
        assert rope.refusal("rms_rope", arguments) == "plain PyTorch is as good as the host's own"
