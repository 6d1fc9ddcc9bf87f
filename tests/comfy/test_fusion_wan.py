"""Fused blocks of Wan against the host's own, bit for bit; what all fused blocks share is in test_fusion.py."""

import pytest
import torch
from native_int8.kernels import residual_norm
from native_int8.kernels.residual_norm_triton import constants_of
from native_int8.nodes.int8 import direct_linears, host_backend, short_way
from native_int8.nodes.int8.fusion import pieces, registry, wan
from packtest.host_parts import fill, turns
from packtest.loras import WEIGHT_CHANGES, change_weights, low_rank
from packtest.short_runs import fused_call

pytestmark = pytest.mark.comfy
DIM, HIDDEN, HEADS, TOKENS, TEXT, IMAGE = 128, 256, 4, 12, 5, 3
UNEVEN = "12 tokens are modulated in 5 parts, which are not of one length"


class Row(torch.nn.Module):
    """Blocks in a row, as the model calls them."""

    def __init__(self, blocks):
        super().__init__()
        self.blocks = torch.nn.ModuleList(blocks)

    def forward(self, x, e, options):
        freqs = turns(x.shape[1]).transpose(1, 2)
        context = random(x.shape[0], IMAGE + TEXT, DIM, seed=3, dtype=x.dtype)
        keywords = {"freqs": freqs, "context": context, "context_img_len": IMAGE, "transformer_options": options}
        for block in self.blocks:
            x = block(x, e=e, **keywords)
        return x


def random(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def inputs(batch=1, parts=(1,), dtype=torch.bfloat16):
    """x, and e with these dimensions between those of images and vectors."""
    return random(batch, TOKENS, DIM, seed=1, dtype=dtype), random(batch, *parts, 6, DIM, seed=2, dtype=dtype) * 0.5


@pytest.fixture
def make(comfy):
    from comfy.ldm.wan.model import WanAttentionBlock

    host_backend.register()

    def build(kind="t2v", group=0, dtype=torch.bfloat16):
        settings = {"operations": comfy.ops.mixed_precision_ops({}, dtype), "device": None, "dtype": dtype}
        sizes = (f"{kind}_cross_attn", DIM, HIDDEN, HEADS)
        blocks = [WanAttentionBlock(*sizes, cross_attn_norm=True, operation_settings=settings) for _ in "ab"]
        made = Row(blocks)
        fill(made, group, {})
        return made

    return build


def both(row, x, e, options=None):
    """The unfused and the fused output, and the fused run."""
    expected, run = fused_call(row, x, e, options or {}, fused=False)
    assert not run.fused
    got, run = fused_call(row, x, e, options or {})
    return expected, got, run


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("kind", ["t2v", "i2v"])
def test_equals_the_unfused(make, kind, group, batch, dtype):
    expected, got, run = both(make(kind, group, dtype), *inputs(batch, dtype=dtype))
    assert run.fused == {"Wan": 2} and not run.unfused
    assert torch.isfinite(got).all() and torch.equal(got, expected)


class VaceRow(Row):
    """Blocks for control, as the model calls them: each gives what it adds to the picture and what the next one reads."""

    def forward(self, x, e, options):
        keywords = {"freqs": turns(TOKENS).transpose(1, 2), "context": random(x.shape[0], TEXT, DIM, seed=3)}
        c, added = random(*x.shape, seed=4), []
        for block in self.blocks:
            skip, c = block(c, x=x, e=e, transformer_options=options, **keywords)
            added.append(skip)
        return torch.stack([*added, c])


@pytest.fixture
def vace_row(comfy):
    from comfy.ldm.wan.model import VaceWanAttentionBlock

    host_backend.register()
    settings = {
        "operations": comfy.ops.mixed_precision_ops({}, torch.bfloat16),
        "device": None,
        "dtype": torch.bfloat16,
    }
    sizes = ("t2v_cross_attn", DIM, HIDDEN, HEADS)
    made = VaceRow(
        VaceWanAttentionBlock(*sizes, cross_attn_norm=True, block_id=i, operation_settings=settings) for i in range(2)
    )
    fill(made, 0, {})
    return made


def test_blocks_for_control_equal_the_unfused(vace_row):
    expected, got, run = both(vace_row, *inputs(2))
    assert run.fused == {"Wan": 2} and not run.unfused
    assert torch.equal(got, expected)


def test_a_replaced_method_of_the_class_below_is_seen(vace_row, monkeypatch):
    from comfy.ldm.wan.model import WanAttentionBlock

    both(vace_row, *inputs())
    of_class = WanAttentionBlock.forward
    monkeypatch.setattr(WanAttentionBlock, "forward", lambda self, x, **keywords: of_class(self, x, **keywords) * 2)
    expected, got, run = both(vace_row, *inputs())
    assert run.unfused == {"another pack replaced WanAttentionBlock.forward": 2}
    assert torch.equal(got, expected)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("parts", [(), (3,), (TOKENS,)], ids=["one", "frames", "tokens"])
def test_modulation_of_frames_and_of_tokens(make, parts, batch):
    expected, got, run = both(make(), *inputs(batch, parts))
    assert run.fused == {"Wan": 2}
    assert torch.equal(got, expected)


def test_modulation_of_uneven_parts_runs_unfused(make):
    expected, got, run = both(make(), *inputs(parts=(5,)))
    assert run.unfused == {UNEVEN: 2} and not run.fused
    assert torch.equal(got, expected)


def test_modulation_of_another_dtype_runs_unfused(make):
    x, e = inputs()
    row = make()
    with pytest.raises(RuntimeError):
        fused_call(row, x, e.float(), {}, fused=False)
    with pytest.raises(RuntimeError):
        fused_call(row, x, e.float(), {})


def test_a_transposed_input_is_copied_as_by_the_host(make):
    x, e = inputs(2)
    x = x.transpose(1, 2).contiguous().transpose(1, 2)
    expected, got, run = both(make(), x, e)
    assert run.fused == {"Wan": 2}
    assert torch.equal(got, expected)


def test_attention_patches_get_the_real_thing(make):
    def runs():
        seen = []

        def patch(arguments):
            seen.extend(arguments[name].clone() for name in ("x", "q", "k") if name in arguments)
            return arguments["x"] * 1.5

        return seen, {"patches": {"attn1_patch": [patch], "attn2_patch": [patch, patch]}}

    row = make("i2v")
    results = []
    for fused in (False, True):
        seen, options = runs()
        y, run = fused_call(row, *inputs(2), options, fused=fused)
        results.append((y, *seen))
    assert run.fused == {"Wan": 2}
    assert len(results[0]) == 1 + 2 * 5
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], both(row, *inputs(2))[1])


def test_a_patch_that_returns_what_no_kernel_takes(make):
    calls = []

    def patch(arguments):
        calls.append(arguments)
        return arguments["x"][:, : TOKENS // 2]

    row = make()
    row.blocks = row.blocks[:1]
    expected, got, run = both(row, *inputs(), {"patches": {"attn2_patch": [patch]}})
    assert run.fused == {"Wan": 1} and len(calls) == 2
    assert got.shape == (1, TOKENS // 2, DIM)
    assert torch.equal(got, expected)


def twice(module):
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs) * 2


def replaced(block):
    block.ffn[1] = torch.nn.GELU()


def float_layer(block):
    block.cross_attn.q = torch.nn.Linear(DIM, DIM, dtype=torch.bfloat16)


# what is done to the second block -> why it runs unfused, when it was known before
FOREIGN = {
    "hook on an attention": (lambda b: b.cross_attn.register_forward_hook(lambda *_: None), "has hooks"),
    "wrapped attention": (lambda b: twice(b.cross_attn), "another forward"),
    "wrapped norm": (lambda b: twice(b.norm3), "another forward"),
    "wrapped Linear": (lambda b: twice(b.self_attn.k), "another forward"),
    "another GELU": (replaced, "was replaced"),
    "float Linear": (float_layer, "was replaced"),
    "own _forward": (lambda b: setattr(b.ffn[2], "_forward", torch.nn.functional.linear), "multiplies with"),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("known_before", [False, True], ids=["new", "known"])
def test_a_patched_block_runs_unfused(make, name, known_before):
    change, reason = FOREIGN[name]
    row = make()
    if known_before:
        fused_call(row, *inputs(), {})
    change(row.blocks[1])
    expected, got, run = both(row, *inputs())
    assert run.fused == {"Wan": 1} and sum(run.unfused.values()) == 1
    assert not known_before or reason in next(iter(run.unfused))
    assert torch.equal(got, expected)


def test_a_replaced_method_of_the_host_is_seen(make, monkeypatch):
    from comfy.ldm.wan import model

    row = make()
    fused_call(row, *inputs(), {})
    monkeypatch.setattr(model, "repeat_e", lambda e, x: e * 2)
    expected, got, run = both(row, *inputs())
    assert run.unfused == {"another pack replaced comfy.ldm.wan.model.repeat_e": 2}
    assert torch.equal(got, expected)


def test_patches_on_the_affine_norm_are_applied(make):
    row = make()
    plain, _ = fused_call(row, *inputs(), {})
    row.blocks[1].norm3.weight_function = [lambda weight: weight * 1.5]
    row.blocks[0].norm3.bias_function = [lambda bias: bias - 0.5]
    expected, got, run = both(row, *inputs())
    assert run.fused == {"Wan": 2}
    assert torch.equal(got, expected) and not torch.equal(got, plain)


@pytest.mark.parametrize("how", WEIGHT_CHANGES)
def test_what_the_host_does_to_weights_is_done_in_a_fused_block(make, how):
    row = make("i2v", 64)
    plain, _ = fused_call(row, *inputs(2), {})
    change_weights(row, how)
    with direct_linears.seated(row):
        expected, got, run = both(row, *inputs(2))
    assert run.fused == {"Wan": 2} and not run.unfused
    assert torch.equal(got, expected)
    assert how == "weight held elsewhere" or not torch.equal(got, plain)


@pytest.mark.parametrize("name", ["ffn.0", "ffn.2"])
def test_the_lora_of_each_layer_of_the_feed_forward_counts(make, name):
    row = make()
    plain, _ = fused_call(row, *inputs(), {})
    layer = row.blocks[0].get_submodule(name)
    setattr(layer, short_way.BRANCH, low_rank(layer))
    with direct_linears.seated(row):
        expected, got, run = both(row, *inputs())
    assert run.fused == {"Wan": 2}
    assert torch.equal(got, expected) and not torch.equal(got, plain)


def test_kernels_are_compiled_as_they_run(make, monkeypatch):
    """Warming up passes what a run passes, as far as it decides about machine code."""
    row, calls = make(), []

    def recorded(x, branch=None, norm=None, **options):
        vectors = [t for part in (branch, norm) if part is not None for t in part if isinstance(t, torch.Tensor)]
        kinds = [(t.dtype, t.stride()[-2:]) for t in vectors if t.dim() < 3]
        calls.append((x.dtype, constants_of(branch, norm), kinds, options["implementation"]))
        return residual_norm(x, branch, norm, **options | {"implementation": "torch"})

    for module in (wan, pieces):
        monkeypatch.setattr(module, "residual_norm", recorded)
    monkeypatch.setattr(wan.FeedForward, "warm_up", lambda self, kinds, dtype: 1)
    block = registry.seats_of(row).blocks[0]
    kinds = block.kernels(torch.device("cpu"))
    assert block.warm_up(kinds, torch.bfloat16) == 0 and not calls
    as_on_a_gpu = (kinds[0], *((k[0], "triton", *k[2:]) for k in kinds[1:]))
    assert block.warm_up(as_on_a_gpu, torch.bfloat16) == 5
    warm = [(*call[:3], "torch") for call in calls]
    calls.clear()
    fused_call(row, *inputs(), {})
    assert warm * 2 == calls
