"""Fused blocks of Flux.1, Flux.2 and Qwen-Image against the host's own, bit for bit; guards of all blocks: test_fusion.py."""

import pytest
import torch
from native_int8.nodes.int8 import host_backend, short_way
from native_int8.nodes.int8.fusion import flux, qwen_image, registry
from packtest.host_parts import fill, turns
from packtest.loras import WEIGHT_CHANGES, change_weights
from packtest.short_runs import fused_call

pytestmark = pytest.mark.comfy
DIM, HEADS, IMAGE, TEXT = 128, 4, 12, 5
DOUBLE, SINGLE, QWEN = flux.Double.name, flux.Single.name, qwen_image.Block.name
# what a model of the host says of its blocks
FLUX = {
    "flux 1": {"mlp_ratio": 4.0, "qkv_bias": True},
    "flux 2": {"mlp_ratio": 3.0, "modulation": False, "mlp_silu_act": True},
    "yak": {"mlp_ratio": 2.0, "yak_mlp": True},
}


def random(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


class Flux(torch.nn.Module):
    """Two blocks of two streams and two of one, called as the host's model does."""

    def __init__(self, comfy, kind, group):
        from comfy.ldm.flux import layers

        super().__init__()
        host_backend.register()
        own = FLUX[kind] | {"operations": comfy.ops.mixed_precision_ops({}, torch.bfloat16), "dtype": torch.bfloat16}
        bias = not own.get("mlp_silu_act")
        single = {name: value for name, value in own.items() if name != "qkv_bias"} | {"bias": bias}
        self.doubles = torch.nn.ModuleList(
            layers.DoubleStreamBlock(DIM, HEADS, proj_bias=bias, **own) for _ in range(2)
        )
        self.singles = torch.nn.ModuleList(layers.SingleStreamBlock(DIM, HEADS, **single) for _ in range(2))
        if not own.get("modulation", True):
            self.modulations = torch.nn.ModuleList(
                layers.Modulation(DIM, double, bias=False, dtype=torch.bfloat16, operations=own["operations"])
                for double in (True, True, False)
            )
        fill(self, group, {})

    def forward(self, img, txt, vec, pe, options, mask=None, dims=None):
        # as the host's blocks add in place
        img, txt = img.clone(), txt.clone()
        vecs = vec, vec
        if hasattr(self, "modulations"):
            img_vec, txt_vec, single = (modulation(vec) for modulation in self.modulations)
            vecs = (img_vec, txt_vec), single[0]
        reference = {} if dims is None else {"modulation_dims_img": dims}
        for block in self.doubles:
            img, txt = block(
                img=img, txt=txt, vec=vecs[0], pe=pe, attn_mask=mask, transformer_options=options, **reference
            )
        x = torch.cat((txt, img), 1)
        reference = {} if dims is None else {"modulation_dims": [(a + TEXT, b + TEXT, c) for a, b, c in dims]}
        for block in self.singles:
            x = block(x, vec=vecs[1], pe=pe, attn_mask=mask, transformer_options=options, **reference)
        return x


def flux_inputs(batch=1, options=None, mask=None):
    pe = turns(TEXT + IMAGE)
    images = random(batch, IMAGE, DIM, seed=1), random(batch, TEXT, DIM, seed=2)
    return *images, random(batch, DIM, seed=3), pe, options or {}, mask


class Qwen(torch.nn.Module):
    """Two blocks in a row."""

    def __init__(self, comfy, group):
        from comfy.ldm.qwen_image.model import QwenImageTransformerBlock

        super().__init__()
        host_backend.register()
        static = {"operations": comfy.ops.mixed_precision_ops({}, torch.bfloat16), "dtype": torch.bfloat16}
        self.blocks = torch.nn.ModuleList(
            QwenImageTransformerBlock(DIM, HEADS, DIM // HEADS, **static) for _ in range(2)
        )
        fill(self, group, {})

    def forward(self, img, txt, mask, temb, pe, index=None, options=None):
        for block in self.blocks:
            txt, img = block(
                hidden_states=img,
                encoder_hidden_states=txt,
                encoder_hidden_states_mask=mask,
                temb=temb,
                image_rotary_emb=pe,
                timestep_zero_index=index,
                transformer_options=options or {},
            )
        return torch.cat((txt, img), 1)


def qwen_inputs(batch=1, mask=None):
    pe = turns(TEXT + IMAGE).bfloat16()
    return random(batch, IMAGE, DIM, seed=1), random(batch, TEXT, DIM, seed=2), mask, random(batch, DIM, seed=3), pe


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("kind", FLUX)
def test_flux_equals_the_unfused(comfy, kind, group, batch):
    model = Flux(comfy, kind, group)
    expected, _ = fused_call(model, *flux_inputs(batch), fused=False)
    got, run = fused_call(model, *flux_inputs(batch))
    assert run.fused == {DOUBLE: 2, SINGLE: 2} and not run.unfused
    assert torch.equal(got, expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("group", [0, 64])
def test_qwen_image_equals_the_unfused(comfy, group, batch):
    model = Qwen(comfy, group)
    expected, _ = fused_call(model, *qwen_inputs(batch), fused=False)
    got, run = fused_call(model, *qwen_inputs(batch))
    assert run.fused == {QWEN: 2} and not run.unfused
    assert torch.equal(got, expected)


def test_masks_reach_attention(comfy):
    hidden = torch.zeros((1, TEXT)).bfloat16()
    hidden[:, 3:] = torch.finfo(torch.bfloat16).min
    joint = torch.cat((hidden, torch.zeros((1, IMAGE)).bfloat16()), 1).view(1, 1, 1, -1)
    qwen, flux = (
        (Qwen(comfy, 0), qwen_inputs, {"mask": hidden}),
        (Flux(comfy, "flux 1", 0), flux_inputs, {"mask": joint}),
    )
    for model, inputs, mask in (qwen, flux):
        expected, _ = fused_call(model, *inputs(**mask), fused=False)
        got, run = fused_call(model, *inputs(**mask))
        assert not run.unfused
        assert torch.equal(got, expected)
        assert not torch.equal(got, fused_call(model, *inputs())[0])


def q_and_v(q, k, v, pe=None, attn_mask=None, extra_options=None):
    assert extra_options.get("img_slice", [TEXT]) == [TEXT, TEXT + IMAGE][: len(extra_options.get("img_slice", [TEXT]))]
    return {"q": q * 0.5, "v": v * 2, "pe": pe}


@pytest.mark.parametrize("name", ["attn1_patch", "attn1_output_patch"])
def test_attention_patches_run(comfy, name):
    patch = q_and_v if name == "attn1_patch" else lambda out, extra: out * 2
    options = {"patches": {name: [patch]}, "block_index": 0}
    model = Flux(comfy, "flux 2", 0)
    expected, _ = fused_call(model, *flux_inputs(options=options), fused=False)
    got, run = fused_call(model, *flux_inputs(options=options))
    assert run.fused == {DOUBLE: 2, SINGLE: 2}
    assert torch.equal(got, expected)
    assert not torch.equal(got, fused_call(model, *flux_inputs())[0])
    if name == "attn1_patch":
        model = Qwen(comfy, 0)
        expected, _ = fused_call(model, *qwen_inputs(), None, options, fused=False)
        got, run = fused_call(model, *qwen_inputs(), None, options)
        assert run.fused == {QWEN: 2}
        assert torch.equal(got, expected)
        assert not torch.equal(got, fused_call(model, *qwen_inputs())[0])


def test_tokens_of_a_reference_run_unfused(comfy):
    model, reason = Flux(comfy, "flux 1", 0), flux.REFERENCE
    img, txt, _, *rest = flux_inputs()
    arguments = (img, txt, random(1, 2, DIM, seed=3), *rest, [(0, 8, 0), (8, IMAGE, 1)])
    # the text has one modulation only
    for block in model.doubles:
        block.txt_mod.register_forward_pre_hook(lambda _, args: (args[0][:, :1],))
    expected, _ = fused_call(model, *arguments, fused=False)
    got, run = fused_call(model, *arguments)
    assert run.unfused == {reason: 4} and not run.fused
    assert torch.equal(got, expected)
    model = Qwen(comfy, 0)
    img, txt, mask, _, pe = qwen_inputs()
    arguments = (img, txt, mask, random(2, DIM, seed=3), pe, 8)
    expected, _ = fused_call(model, *arguments, fused=False)
    got, run = fused_call(model, *arguments)
    assert run.unfused == {reason: 2} and not run.fused
    assert torch.equal(got, expected)


def test_the_host_s_in_place_addition_is_left_out(comfy):
    """Unfused blocks write into their inputs; fused ones leave them alone, and both give the same."""
    block = Flux(comfy, "flux 1", 0).doubles[0]
    img, txt, vec, pe, *_ = flux_inputs()
    before = img.clone(), txt.clone()
    (got_img, got_txt), run = fused_call(block, img, txt, vec, pe)
    assert run.fused == {DOUBLE: 1}
    assert torch.equal(img, before[0]) and torch.equal(txt, before[1])
    (expected_img, expected_txt), _ = fused_call(block, img, txt, vec, pe, fused=False)
    assert torch.equal(got_img, expected_img) and torch.equal(got_txt, expected_txt)


def make(comfy, name, batch=1):
    """A model, its inputs, and how many of its blocks run fused."""
    if name == "qwen":
        return Qwen(comfy, 64), qwen_inputs(batch), 2
    return Flux(comfy, name, 64), flux_inputs(batch), 4


@pytest.mark.parametrize("name", ["qwen", *FLUX])
@pytest.mark.parametrize("how", WEIGHT_CHANGES)
def test_what_the_host_does_to_weights_is_done_in_a_fused_block(comfy, name, how):
    model, inputs, blocks = make(comfy, name)
    plain, _ = fused_call(model, *inputs)
    change_weights(model, how)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert sum(run.fused.values()) == blocks and not run.unfused
    assert torch.equal(got, expected)
    assert how == "weight held elsewhere" or not torch.equal(got, plain)


def nothing(*_):
    return None


def other_forward(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def float_layer(parent, name):
    layer = parent._modules[name]
    plain = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, dtype=torch.bfloat16)
    parent._modules[name] = plain


# what is done to one block -> the blocks of that kind that still run fused
FOREIGN = {
    "flux 1": {
        "hook on a norm": lambda m: m.doubles[0].txt_norm2.register_forward_hook(nothing),
        "hook on an MLP": lambda m: m.doubles[0].img_mlp.register_forward_pre_hook(nothing),
        "hook on an activation": lambda m: m.doubles[0].img_mlp[1].register_forward_hook(lambda *a: a[-1] * 2),
        "wrapped qkv": lambda m: other_forward(m.doubles[0].txt_attn.qkv),
        "replaced activation": lambda m: m.doubles[0].img_mlp.__setitem__(1, torch.nn.SiLU()),
        "float Linear": lambda m: float_layer(m.doubles[0].txt_mlp, "2"),
        "wrapped linear1": lambda m: other_forward(m.singles[0].linear1),
        "hook on linear2": lambda m: m.singles[0].linear2.register_forward_hook(nothing),
        "wrapped activation": lambda m: other_forward(m.singles[0].mlp_act),
    },
    "flux 2": {
        "hook inside an activation": lambda m: m.doubles[0].img_mlp[1].gate_fn.register_forward_hook(lambda *a: a[-1] * 2),
        "wrapped inside an activation": lambda m: other_forward(m.singles[0].mlp_act.gate_fn),
    },
    "qwen": {
        "hook on attention": lambda m: m.blocks[0].attn.register_forward_pre_hook(nothing),
        "wrapped MLP": lambda m: other_forward(m.blocks[0].txt_mlp),
        "wrapped GELU": lambda m: other_forward(m.blocks[0].img_mlp.net[0]),
        "wrapped to_k": lambda m: other_forward(m.blocks[0].attn.to_k),
        "replaced norm": lambda m: setattr(m.blocks[0], "img_norm1", torch.nn.Identity()),
        "float Linear": lambda m: float_layer(m.blocks[0].attn, "add_v_proj"),
    },
}  # fmt: skip


@pytest.mark.parametrize("known_before", [False, True], ids=["new", "known"])
@pytest.mark.parametrize(("name", "how"), [(name, how) for name, changes in FOREIGN.items() for how in changes])
def test_a_patched_block_runs_unfused(comfy, name, how, known_before):
    model, inputs, blocks = make(comfy, name)
    if known_before:
        fused_call(model, *inputs)
    FOREIGN[name][how](model)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert sum(run.fused.values()) == blocks - 1
    assert sum(run.unfused.values()) == 1
    assert torch.equal(got, expected)


def test_called_modules_may_be_patched(comfy):
    """What a fused block calls itself sees the real thing."""
    model, inputs = Flux(comfy, "flux 1", 0), flux_inputs()
    other_forward(model.doubles[0].img_attn.proj)
    model.doubles[1].txt_attn.norm.register_forward_hook(lambda *a: tuple(t * 2 for t in a[-1]))
    model.singles[0].norm.query_norm.register_forward_hook(lambda *a: a[-1] * 2)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert run.fused == {DOUBLE: 2, SINGLE: 2}
    assert torch.equal(got, expected)


def test_replaced_functions_of_the_host_are_seen(comfy, monkeypatch):
    from comfy.ldm.flux import layers
    from comfy.ldm.qwen_image import model as host

    model, inputs, blocks = make(comfy, "flux 1")
    fused_call(model, *inputs)
    real = layers.apply_mod
    monkeypatch.setattr(layers, "apply_mod", lambda *args, **kwargs: real(*args, **kwargs) * 2)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert run.unfused == {"another pack replaced comfy.ldm.flux.layers.apply_mod": blocks}
    assert torch.equal(got, expected)
    # attention is called by its name
    monkeypatch.setattr(layers, "apply_mod", real)
    attention = layers.attention
    monkeypatch.setattr(layers, "attention", lambda *args, **kwargs: attention(*args, **kwargs) * 2)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert sum(run.fused.values()) == blocks
    assert torch.equal(got, expected)

    model, inputs, blocks = make(comfy, "qwen")
    fused_call(model, *inputs)
    monkeypatch.setattr(host.QwenImageTransformerBlock, "_apply_gate", lambda self, x, y, gate, index=None: x * gate)
    expected, _ = fused_call(model, *inputs, fused=False)
    got, run = fused_call(model, *inputs)
    assert run.unfused == {"another pack replaced QwenImageTransformerBlock._apply_gate": blocks}
    assert torch.equal(got, expected)


@pytest.mark.parametrize("name", ["qwen", "flux 1"])
def test_source_that_is_not_known_runs_unfused(comfy, name, monkeypatch):
    monkeypatch.setattr(qwen_image.Block, "known", {("", "forward"): "0"})
    monkeypatch.setattr(flux, "KNOWN_DOUBLE", "0")
    monkeypatch.setattr(flux, "KNOWN_SINGLE", "0")
    model, inputs, blocks = make(comfy, name)
    _, run = fused_call(model, *inputs)
    assert not run.fused and sum(run.unfused.values()) == blocks
    assert all("of this ComfyUI is another than the known ones" in reason for reason in run.unfused)


# kernels that a model compiles: of the two-stream block per kind of stream, and of the single block
COMPILED = {"flux 1": 4 + 3, "flux 2": 5 + 3, "yak": 5 + 3, "qwen": 4 + 4}


@pytest.mark.parametrize("name", COMPILED)
def test_kernels_are_compiled_once_for_equal_blocks(comfy, name, monkeypatch):
    model, _, _ = make(comfy, name)
    device = torch.device("cpu")
    monkeypatch.setattr(registry, "_compiled", set())
    # in these tests the kernels run in plain PyTorch, where there is nothing to compile
    assert registry.compile_kernels(model, device, torch.bfloat16) == 0
    monkeypatch.setattr(registry, "_compiled", set())
    real = short_way.static_kind

    def on_a_gpu(*arguments):
        kind = real(*arguments)
        return (kind[0], "triton", *kind[2:])

    monkeypatch.setattr(short_way, "static_kind", on_a_gpu)
    called = count_kernels(monkeypatch)
    counts = [registry.compile_kernels(model, device, torch.bfloat16) for _ in range(2)]
    assert counts == [COMPILED[name], 0]
    assert len(called) == COMPILED[name]


def count_kernels(monkeypatch):
    """Let the kernels run in plain PyTorch and be counted."""
    from native_int8.nodes.int8.fusion import feed_forward, two_streams

    called = []

    def counted(function):
        def call(*args, **keywords):
            called.append(function)
            if "implementation" in keywords:
                return function(*args, **keywords | {"implementation": "torch"})
            return None

        return call

    for module in (feed_forward, two_streams, flux):
        for name in ("residual_norm", "quantize_gelu", "quantize_swiglu", "swiglu_of_rows"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted(getattr(module, name)))
    return called
