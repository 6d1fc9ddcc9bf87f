"""Other nodes on INT8 MODELs: each does to INT8 what it does to float, before and after our node, and no Linear leaves INT8."""

import importlib
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from native_int8.nodes.int8 import host_backend, patcher
from packtest import tiny
from packtest.loras import add_lora, lora_file

pytestmark = pytest.mark.comfy

RUN = {"size": (6, 6), "steps": 3, "cfg": 3.0}


def node(module: str, name: str, *arguments, method="execute", **inputs) -> Callable:
    """A function MODEL -> MODEL: the host's node `name` of comfy_extras."""

    def patch(model):
        kind = getattr(importlib.import_module(f"comfy_extras.nodes_{module}"), name)
        owner = kind if method == "execute" else kind()
        result = getattr(owner, method)(model, *arguments, **inputs)
        return getattr(result, "result", result)[0]

    return patch


def on_clone(change: Callable) -> Callable:
    def patch(model):
        twin = model.clone()
        change(twin)
        return twin

    return patch


class Reuse:
    """What TeaCache and its like do: every second call of the model is the change that the call before made."""

    def __init__(self):
        self.calls, self.change = 0, None

    def __call__(self, executor, x, *args, **kwargs):
        self.calls += 1
        if self.calls % 2 == 0:
            return x + self.change
        y = executor(x, *args, **kwargs)
        self.change = y - x
        return y


def reuse_by_wrapper(model):
    model.add_wrapper_with_key("diffusion_model", "reuse", Reuse())


def reuse_by_unet_function(model):
    kept = Reuse()

    def function(apply_model, args):
        return kept(lambda x: apply_model(x, args["timestep"], **args["c"]), args["input"])

    model.set_model_unet_function_wrapper(function)


def attention_output(model):
    model.set_model_attn1_output_patch(lambda out, options: out * 0.5)


def attention_input(model):
    def patch(q, k, v, *_, **__):
        return {"q": q, "k": k * 0.5, "v": v * 1.5, "pe": __.get("pe"), "attn_mask": __.get("attn_mask")}

    model.set_model_attn1_patch(patch)


def double_block(model):
    def block(args, extra):
        out = extra["original_block"](args)
        return {"img": out["img"] * 1.5, "txt": out["txt"]}

    model.set_model_patch_replace(block, "dit", "double_block", 0)


def post_input(model):
    model.set_model_post_input_patch(lambda args: args | {"img": args["img"] * 1.3})


def other_attention(model):
    def override(function, q, k, v, heads, *args, **kwargs):
        return function(q * 0.8, k, v, heads, *args, **kwargs)

    model.model_options.setdefault("transformer_options", {})["optimized_attention_override"] = override


def guided(model):
    model.set_model_sampler_cfg_function(lambda args: args["uncond"] + 2 * (args["cond"] - args["uncond"]))


def added(model):
    """An object patch, as model-sampling nodes of packs make them."""
    sampling = model.get_model_object("model_sampling")
    again = type(sampling)(model.model.model_config)
    again.set_parameters(shift=5.0)
    model.add_object_patch("model_sampling", again)


class Case(NamedTuple):
    """patch: MODEL -> MODEL. skipped: whether the model runs less often than without. unfused: why blocks do not run fused."""

    patch: Callable
    skipped: bool = False
    unfused: str = ""


CASES = {
    "ModelSamplingFlux": Case(node("model_advanced", "ModelSamplingFlux", 1.15, 0.5, 1024, 1024, method="patch")),
    "ModelSamplingAuraFlow": Case(node("model_advanced", "ModelSamplingAuraFlow", 3.0, method="patch_aura")),
    "ModelSamplingSD3": Case(node("model_advanced", "ModelSamplingSD3", 5.0, method="patch")),
    "model_sampling of a pack": Case(on_clone(added)),
    "ModelComputeDtype": Case(
        node("model_advanced", "ModelComputeDtype", "fp16", method="patch"), unfused="the input is torch.float16"
    ),
    "RescaleCFG": Case(node("model_advanced", "RescaleCFG", 0.7, method="patch")),
    "SkipLayerGuidanceDiT": Case(
        node("slg", "SkipLayerGuidanceDiT", scale=3.0, start_percent=0.0, end_percent=1.0, single_layers="1")
    ),
    "SkipLayerGuidanceDiTSimple": Case(
        node("slg", "SkipLayerGuidanceDiTSimple", start_percent=0.0, end_percent=1.0, single_layers="0")
    ),
    "APG": Case(node("apg", "APG", eta=1.0, norm_threshold=1.0, momentum=0.5)),
    "CFGZeroStar": Case(node("cfg", "CFGZeroStar")),
    "CFGNorm": Case(node("cfg", "CFGNorm", strength=1.0)),
    "TCFG": Case(node("tcfg", "TCFG")),
    "Mahiro": Case(node("mahiro", "Mahiro")),
    "FreSca": Case(node("fresca", "FreSca", scale_low=1.0, scale_high=2.0, freq_cutoff=2)),
    "EpsilonScaling": Case(node("eps", "EpsilonScaling", scaling_factor=1.1)),
    "ScaleROPE": Case(
        node("rope", "ScaleROPE", scale_x=2.0, shift_x=0.0, scale_y=2.0, shift_y=0.0, scale_t=1.0, shift_t=0.0)
    ),
    "EasyCache": Case(
        node("easycache", "EasyCacheNode", reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False), True
    ),
    "LazyCache": Case(
        node("easycache", "LazyCacheNode", reuse_threshold=3.0, start_percent=0.0, end_percent=1.0, verbose=False), True
    ),
    "TeaCache by a wrapper": Case(on_clone(reuse_by_wrapper), True),
    "TeaCache by a function": Case(on_clone(reuse_by_unet_function), True),
    "PAG by attention output": Case(on_clone(attention_output)),
    "attention input": Case(on_clone(attention_input)),
    "attention function": Case(on_clone(other_attention)),
    "block replaced": Case(on_clone(double_block)),
    "post input": Case(on_clone(post_input)),
    "cfg function": Case(on_clone(guided)),
}


@pytest.fixture(scope="module")
def models(comfy):
    """(float MODEL, INT8 MODEL, outputs of both without a patch, INT8 calls of the second)."""
    with torch.inference_mode():
        float_model = tiny.float_model(comfy)
        model = patcher.patch_model(float_model)[0]
        plain = [tiny.sample(comfy, one, **RUN) for one in (float_model, model)]
        return float_model, model, plain, calls(model)


def calls(model, unfused=""):
    """How many INT8 products ran since the last time; all on our kernels, and all blocks fused but for the reason given."""
    record = host_backend.record_of(model)
    found, ways, words, blocks = record.snapshot(), record.ways_taken(), record.sentence(), record.blocks_fused()
    record.reset()
    assert found["declined"] == {} and set(ways["ways"]) <= {"resident"}, words
    assert bool(blocks["unfused"]) == bool(unfused) and all(unfused in reason for reason in blocks["unfused"]), words
    assert blocks["fused"] or unfused
    return sum(found["calls"].values())


@pytest.mark.parametrize("name", CASES)
def test_a_node_does_the_same_to_int8(comfy, models, cosine, name):
    float_model, model, (float_plain, plain), per_run = models
    patch, skipped, unfused = CASES[name]
    expected = tiny.sample(comfy, patch(float_model), **RUN)
    got = tiny.sample(comfy, patch(model), **RUN)
    ran = calls(model, unfused)
    assert 0 < ran < per_run if skipped else ran >= per_run
    assert cosine(got, expected) > 0.99
    if (expected - float_plain).norm() > 0.02 * float_plain.norm():
        assert cosine(got - plain, expected - float_plain) > 0.9
    else:
        assert (got - plain).norm() < 0.1 * plain.norm()
    # in front of our node it does the same to the last bit, and both MODELs are as they were
    before = patcher.patch_model(patch(float_model))[0]
    assert torch.equal(tiny.sample(comfy, before, **RUN), got)
    assert torch.equal(tiny.sample(comfy, model, **RUN), plain)
    assert calls(model) == per_run


class Residuals:
    """A ControlNet of the host whose network only says what is added to the blocks."""

    def __new__(cls, comfy):
        class Control(comfy.controlnet.ControlBase):
            def get_control(self, x_noisy, t, cond, batched_number, transformer_options):
                shape = (x_noisy.shape[0], x_noisy.shape[2] * x_noisy.shape[3], 256)
                added = torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 0.3
                return {"input": [added], "output": [None, added]}

            def copy(self):
                made = Control()
                self.copy_to(made)
                return made

            def get_models(self):
                return []

            def cleanup(self):
                pass

        return Control()


def with_controlnet(comfy):
    return [[tiny.conditioning(512), {"control": Residuals(comfy), "control_apply_to_uncond": False}]]


def with_regions(comfy):
    from nodes import ConditioningCombine, ConditioningSetArea, ConditioningSetMask

    one, two, three = ([[tiny.conditioning(512, seed), {}]] for seed in (1, 2, 3))
    (one,) = ConditioningSetArea().append(one, 32, 96, 0, 0, 1.0)
    mask = torch.zeros((1, 96, 96))
    mask[:, 48:] = 1.0
    (two,) = ConditioningSetMask().append(two, mask, "default", 0.8)
    (both,) = ConditioningCombine().combine(one, two)
    return ConditioningCombine().combine(both, three)[0]


def with_times(comfy):
    from nodes import ConditioningCombine, ConditioningSetTimestepRange

    one, two = ([[tiny.conditioning(512, seed), {}]] for seed in (1, 2))
    (one,) = ConditioningSetTimestepRange().set_range(one, 0.0, 0.5)
    (two,) = ConditioningSetTimestepRange().set_range(two, 0.5, 1.0)
    return ConditioningCombine().combine(one, two)[0]


def with_reference(comfy):
    return [[tiny.conditioning(512), {"reference_latents": [torch.randn(1, tiny.CHANNELS, 4, 4)]}]]


@pytest.mark.parametrize(
    "positive", [with_controlnet, with_regions, with_times, with_reference], ids=lambda f: f.__name__
)
def test_conditioning_does_the_same_to_int8(comfy, models, cosine, positive):
    float_model, model, (float_plain, plain), per_run = models
    torch.manual_seed(0)
    prompt = positive(comfy)
    expected, got = (tiny.sample(comfy, one, **RUN, positive=prompt) for one in (float_model, model))
    assert calls(model) >= per_run
    assert not torch.equal(expected, float_plain)
    assert cosine(got, expected) > 0.99
    assert cosine(got - plain, expected - float_plain) > 0.9
    assert torch.equal(tiny.sample(comfy, model, **RUN), plain)
    calls(model)


def test_a_control_lora_that_widens_the_input(comfy, models, cosine):
    """Flux's control LoRAs give the first Linear more inputs, for the picture that controls."""
    float_model, model, (_, plain), _ = models
    width = tiny.CHANNELS
    generator = torch.Generator().manual_seed(2)
    name = "diffusion_model.img_in"
    file = {
        f"{name}.lora_up.weight": torch.randn((256, 4), generator=generator) * 0.05,
        f"{name}.lora_down.weight": torch.randn((4, 2 * width), generator=generator),
        f"{name}.reshape_weight": torch.tensor([256, 2 * width]),
    }
    picture = torch.randn((1, width, 6, 6), generator=generator)
    prompt = [[tiny.conditioning(512), {"concat_latent_image": picture}]]
    expected, got = (tiny.sample(comfy, add_lora(one, file), **RUN, positive=prompt) for one in (float_model, model))
    assert not torch.equal(got, plain)
    assert cosine(got, expected) > 0.99
    assert torch.equal(tiny.sample(comfy, model, **RUN), plain)
    calls(model)


@pytest.fixture
def draw(comfy):
    """A function (positive MODEL, negative MODEL) -> what the host's Dual Model Guider makes of them."""
    from comfy_extras.nodes_custom_sampler import DualModelGuider

    latent, text = torch.zeros((1, tiny.CHANNELS, 6, 6)), tiny.conditioning(512)
    noise, sigmas = comfy.sample.prepare_noise(latent, 0), torch.linspace(1.0, 0.0, 4)

    def run(positive, negative):
        guider = DualModelGuider.execute(positive, [[text, {}]], 3.0, negative, [[torch.zeros_like(text), {}]]).result[
            0
        ]
        return guider.sample(noise, latent, comfy.samplers.sampler_object("euler"), sigmas, disable_pbar=True, seed=0)

    return run


@pytest.fixture
def others(comfy):
    """Another model with the same layers, in float and in INT8."""
    state = {key: value * 0.9 if "_blocks" in key else value for key, value in tiny.state(comfy).items()}
    other = comfy.sd.load_diffusion_model_state_dict(state)
    return other, patcher.patch_model(other)[0]


def test_dual_model_guider_runs_each_model_with_its_own_kernels(models, others, draw, cosine):
    float_model, model, _, _ = models
    other, twin = others
    expected, got = draw(float_model, other), draw(model, twin)
    assert cosine(got, expected) > 0.99
    ran = calls(model)
    assert ran == calls(twin) > 0
    assert not torch.equal(draw(model, model), got)
    assert calls(model) == 2 * ran
    assert torch.equal(draw(model, twin), got)
    assert calls(model) == calls(twin) == ran
    assert "apply_model" not in vars(model.model) and "apply_model" not in vars(twin.model)


@pytest.mark.parametrize("side", ["positive", "negative"])
def test_dual_model_guider_with_one_int8_model_and_its_lora(models, others, draw, cosine, side):
    float_model, model, _, _ = models
    other, twin = others
    file = lora_file(model, size=0.5)
    in_float, in_int8 = add_lora(other, file), add_lora(twin, file)
    pairs = [(one, float_model)[:: 1 if side == "positive" else -1] for one in (in_float, in_int8, twin)]
    expected, got, plain = (draw(*pair) for pair in pairs)
    # the guider calls both with the wrappers of the positive MODEL, which then sees the float blocks of the other
    assert calls(twin, "of a block are not INT8" if side == "positive" else "") > 0
    assert cosine(got, expected) > 0.99
    assert cosine(got - plain, expected - draw(*((other, float_model)[:: 1 if side == "positive" else -1]))) > 0.9
    assert "apply_model" not in vars(twin.model)


def test_dual_model_guider_compiles_the_right_model(models, others, draw):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    _, model, _, _ = models
    _, twin = others
    expected = draw(model, twin)
    compiled = model.clone()
    set_torch_compile_wrapper(compiled, backend="eager", keys=["diffusion_model.single_blocks.0"])
    got = draw(compiled, twin)
    assert torch.allclose(got, expected, atol=1e-4)
    torch._dynamo.reset()


def test_the_stock_merge_node_takes_int8_models(comfy, models, others, cosine):
    from comfy_extras.nodes_model_merging import ModelMergeSimple

    float_model, model, (_, plain), _ = models
    other, twin = others
    expected = tiny.sample(comfy, ModelMergeSimple().merge(float_model, other, 0.5)[0], **RUN)
    merged = ModelMergeSimple().merge(model, twin, 0.5)[0]
    assert cosine(tiny.sample(comfy, merged, **RUN), expected) > 0.99
    assert calls(merged) > 0
    assert torch.equal(tiny.sample(comfy, model, **RUN), plain)
    calls(model)
