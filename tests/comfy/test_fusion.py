"""Fused blocks in the host's own model class: equal to the unfused ones bit for bit, and aside whenever they cannot be."""

import threading

import pytest
import torch
from native_int8.nodes.int8 import host_backend, patcher, short_way, speeds
from native_int8.nodes.int8.fusion import guards, registry
from packtest.host_parts import fill
from packtest.loras import low_rank
from packtest.short_runs import fused_call as call
from packtest.short_runs import half_scale, instance_attributes
from packtest.whole_classes import IDEOGRAM_4, ideogram4

pytestmark = pytest.mark.comfy
LAYERS, DIM, TEXT = 2, 128, 5
SIZES = IDEOGRAM_4
BLOCK, DROPPED = "Ideogram 4", "attention mask dropped, since it hides nothing"


@pytest.fixture(params=[0, 64], ids=["plain", "rotated"])
def model(comfy, request):
    """A small Ideogram 4 with INT8 block Linears, as on a card that computes in bfloat16."""
    return ideogram4(comfy, request.param)


def inputs(batch=1, side=4, mask=None, context=True):
    g = torch.Generator().manual_seed(1)
    x = torch.randn((batch, SIZES["in_channels"], side, side), generator=g).bfloat16()
    text = torch.randn((batch, TEXT, SIZES["llm_features_dim"]), generator=g).bfloat16() if context else None
    return x, torch.full((batch,), 0.7), text, mask


@pytest.mark.parametrize("batch", [1, 2])
def test_equals_the_unfused_blocks(model, batch):
    expected, run = call(model, *inputs(batch), fused=False)
    assert not run.fused and not run.unfused
    got, run = call(model, *inputs(batch))
    assert run.fused == {BLOCK: LAYERS} and not run.unfused
    assert torch.equal(got, expected)


def test_an_image_without_text(model):
    expected, _ = call(model, *inputs(context=False), fused=False)
    got, run = call(model, *inputs(context=False))
    assert run.fused == {BLOCK: LAYERS}
    assert torch.equal(got, expected)


def test_a_mask_that_hides_nothing_is_dropped(model):
    expected, _ = call(model, *inputs(2), fused=False)
    got, run = call(model, *inputs(2, mask=torch.ones((2, TEXT), dtype=torch.long)))
    assert run.fused == {BLOCK: LAYERS, DROPPED: 1}
    assert torch.equal(got, expected)


def test_a_mask_that_hides_something_is_kept(model):
    mask = torch.ones((2, TEXT), dtype=torch.long)
    mask[1, 3:] = 0
    expected, _ = call(model, *inputs(2, mask=mask), fused=False)
    got, run = call(model, *inputs(2, mask=mask))
    assert run.fused == {BLOCK: LAYERS}
    assert torch.equal(got, expected)
    assert not torch.equal(got, call(model, *inputs(2))[0])


def test_leaves_nothing_behind(model):
    before = instance_attributes(model)
    call(model, *inputs())
    assert instance_attributes(model) == before
    with pytest.raises(RuntimeError):
        call(model, torch.zeros((1, 3, 4, 4)), *inputs()[1:])
    assert instance_attributes(model) == before


def nothing(*_):
    return None


def twice(module):
    """Replace the module's forward by one that calls it twice, as a pack that wraps a layer might."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


class Doubled(torch.nn.Module):
    """A module in the place of another."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args):
        return self.inner(*args) * 2


def replace_norm(block):
    block.ffn_norm2 = Doubled(block.ffn_norm2)


def float_layer(name):
    def change(block):
        layer = block.get_submodule(name)
        plain = torch.nn.Linear(layer.in_features, layer.out_features, bias=False, dtype=torch.bfloat16)
        parent, _, child = name.rpartition(".")
        setattr(block.get_submodule(parent), child, plain)

    return change


# what is done to the second block -> why it runs unfused
FOREIGN = {
    "hook": (lambda b: b.feed_forward.w1.register_forward_hook(nothing), "has hooks"),
    "pre-hook": (lambda b: b.attention.register_forward_pre_hook(nothing), "has hooks"),
    "wrapped Linear": (lambda b: twice(b.attention.qkv), "another forward"),
    "wrapped attention": (lambda b: twice(b.attention), "another forward"),
    "wrapped norm": (lambda b: twice(b.attention_norm2), "another forward"),
    "replaced norm": (replace_norm, "was replaced"),
    "replaced w2": (float_layer("feed_forward.w2"), "was replaced"),
    "own _forward": (lambda b: setattr(b.feed_forward.w3, "_forward", torch.nn.functional.linear), "multiplies with"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("known_before", [False, True], ids=["new", "known"])
def test_a_patched_block_runs_unfused(model, name, known_before):
    change, reason = FOREIGN[name]
    if known_before:
        call(model, *inputs())
    change(model.layers[1])
    expected, _ = call(model, *inputs(), fused=False)
    got, run = call(model, *inputs())
    assert run.fused == {BLOCK: LAYERS - 1}
    assert sum(run.unfused.values()) == 1
    assert not known_before or reason in next(iter(run.unfused))
    assert torch.equal(got, expected)


def with_branches(block):
    for name in ("attention.qkv", "attention.o", "feed_forward.w1", "feed_forward.w2"):
        layer = block.get_submodule(name)
        setattr(layer, short_way.BRANCH, low_rank(layer))


def norm_patch(block):
    block.attention_norm2.weight_function = [lambda weight: weight * 1.5]


def weight_patch(block):
    block.feed_forward.w1.weight_function = [lambda weight: weight * 1.5]
    block.attention.qkv.weight_function = [lambda weight: weight * 0.5]


def slot(block):
    """As under dynamic VRAM on a CPU, where the host hands over a float weight."""
    for name in ("attention.qkv", "feed_forward.w2", "feed_forward.w3"):
        block.get_submodule(name)._v = object()


def own_scale(block):
    half_scale(block.feed_forward.w2)


def other_rotation(block):
    fill(block.feed_forward, 0, {"w2": 16})


INSIDE = {
    "LoRAs beside Linears": with_branches, "patch on a norm": norm_patch, "patch on weights": weight_patch,
    "weights held elsewhere": slot, "scales of another type": own_scale, "another rotation": other_rotation,
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_what_the_host_does_to_weights_is_done_in_a_fused_block(model, name):
    plain, _ = call(model, *inputs())
    changes = name not in ("weights held elsewhere", "scales of another type")
    INSIDE[name](model.layers[1])
    expected, _ = call(model, *inputs(), fused=False)
    got, run = call(model, *inputs())
    assert run.fused == {BLOCK: LAYERS} and not run.unfused
    assert torch.equal(got, expected)
    assert not changes or not torch.equal(got, plain)


def test_hooks_on_a_block_and_its_output_linear_see_the_real_thing(model):
    seen = []
    block = model.layers[0]
    block.register_forward_hook(lambda module, args, y: seen.append(args[0].clone()))
    block.attention.o.register_forward_hook(lambda module, args, y: seen.append(args[0].clone()))
    call(model, *inputs(), fused=False)
    expected, seen = seen, []
    _, run = call(model, *inputs())
    assert run.fused == {BLOCK: LAYERS}
    assert all(torch.equal(a, b) for a, b in zip(expected, seen, strict=True))


def test_a_replaced_method_of_the_class_is_seen(model, monkeypatch):
    from comfy.ldm.lumina.model import FeedForward

    call(model, *inputs())
    monkeypatch.setattr(FeedForward, "_forward_silu_gating", lambda self, gate, up: gate * up)
    expected, _ = call(model, *inputs(), fused=False)
    got, run = call(model, *inputs())
    assert run.unfused == {"another pack replaced FeedForward._forward_silu_gating": LAYERS}
    assert torch.equal(got, expected)


def test_source_that_is_not_known_runs_unfused(model, monkeypatch):
    from native_int8.nodes.int8.fusion import ideogram4

    monkeypatch.setattr(ideogram4.Block, "known", {("", "forward"): "0"})
    _, run = call(model, *inputs())
    assert not run.fused
    assert "of this ComfyUI is another than the known ones" in next(iter(run.unfused))


def test_fingerprints_see_code_only():
    def one(x):
        # a comment
        return x + 1

    def other(x):
        return x + 2

    first = guards.fingerprint(one)

    def one(x):
        return x + 1  # the same again

    assert guards.fingerprint(one) == first != guards.fingerprint(other)


def test_another_thread_runs_the_host_s_own_block(model):
    seen = []

    def elsewhere():
        with torch.inference_mode():
            seen.append(model(*inputs()))

    def from_a_hook(*_):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()

    handle = model.input_proj.register_forward_hook(lambda *_: (handle.remove(), from_a_hook())[1])
    _, run = call(model, *inputs())
    assert run.fused == {BLOCK: LAYERS}
    assert len(seen) == 1


def test_speed_is_a_matter_of_one_model(float_model, sample, cosine):
    patched, _ = patcher.patch_model(float_model)
    linear, off = patched.clone(), patched.clone()
    host_backend.set_speed(linear, speeds.LINEAR_ONLY)
    host_backend.set_speed(off, speeds.OFF)
    assert not host_backend.is_attached(off)
    assert [host_backend.speed_of(m) for m in (patched, linear, off)] == [speeds.FUSED, speeds.LINEAR_ONLY, speeds.OFF]
    outputs = [sample(model, steps=1) for model in (patched, linear)]
    # on a GPU the sums of a LayerNorm are added up as PyTorch does where 512 divides the width; here it is 256
    assert cosine(*outputs) > 0.9999 if torch.cuda.is_available() else torch.equal(*outputs)
    fused, alone = (host_backend.record_of(model).blocks_fused() for model in (patched, linear))
    assert fused["fused"] and not fused["unfused"]
    assert alone == {"fused": {}, "unfused": {}}
    assert "blocks fused: " in host_backend.record_of(patched).sentence()
    host_backend.set_speed(off, speeds.FUSED)
    host_backend.set_speed(linear, speeds.FUSED)
    assert host_backend.is_attached(off)
    with pytest.raises(ValueError, match="Needed: one of"):
        host_backend.set_speed(linear, "faster")


def test_a_model_without_known_blocks_says_so(comfy):
    _, run = call(torch.nn.Sequential(), torch.zeros(1))
    assert run.unfused == {"no fusion for the class Sequential": 1} and not run.fused


def test_kernels_are_compiled_once_for_equal_blocks(model, monkeypatch):
    from native_int8.nodes.int8.fusion import feed_forward, gated

    calls = []
    monkeypatch.setattr(gated, "residual_norm", lambda *args, **kwargs: calls.append(kwargs))
    monkeypatch.setattr(feed_forward, "quantize_swiglu", lambda *args, **kwargs: calls.append(kwargs))
    monkeypatch.setattr(feed_forward, "swiglu_of_rows", lambda *args: calls.append(args))
    monkeypatch.setattr(registry, "_compiled", set())
    device = torch.device("cpu")
    # in these tests the kernels run in plain PyTorch, where there is nothing to compile
    assert registry.compile_kernels(model, device, torch.bfloat16) == 0
    kind = registry.seats_of(model).blocks[0].kernels(device)
    as_on_a_gpu = (kind[0], *((k[0], "triton", *k[2:]) for k in kind[1:]))
    monkeypatch.setattr(gated.GatedBlock, "kernels", lambda block, device: as_on_a_gpu)
    assert [registry.compile_kernels(model, device, torch.bfloat16) for _ in range(2)] == [5, 0]
    assert len(calls) == 5


def test_a_compiled_block_is_the_host_s_own(model):
    import torch._dynamo.testing

    x, freqs = torch.randn((1, 6, DIM)).bfloat16(), turns_of(6)
    arguments = (x, None, freqs, torch.randn((1, 1, SIZES["adaln_dim"])).bfloat16())
    expected, _ = call(model.layers[0], *arguments, fused=False)
    counter = torch._dynamo.testing.CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model.layers[0], backend=counter, fullgraph=False)
    for _ in range(3):
        got, run = call_inside(model, compiled, *arguments)
        assert not run.fused and not run.unfused
        assert torch.equal(got, expected)
    graphs = counter.frame_count
    call_inside(model, compiled, *arguments)
    assert counter.frame_count == graphs


def turns_of(tokens):
    angle = torch.rand((1, tokens, 1, 32))
    return torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))


def call_inside(model, part, *arguments):
    """Call a part of the model while the model runs."""
    run = []

    class Whole(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model

        def forward(self, *arguments):
            run.append(short_way.current_run())
            return part(*arguments)

    return call(Whole(), *arguments)[0], run[0]
