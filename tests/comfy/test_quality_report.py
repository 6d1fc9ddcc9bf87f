"""The quality report on the trained emoji model: it finds what is wrong and leaves both MODELs as they were."""

import pytest
import torch
from native_int8.nodes.int8 import compare, host_backend, quality
from native_int8.nodes.int8.loader import LoadOptions, load_model
from packtest import loras
from safetensors import safe_open

from .conftest import LATENT, MODEL_FILE, PROMPTS_FILE

pytestmark = pytest.mark.comfy

BROKEN = "single_blocks.2.linear1"


@pytest.fixture
def int8_model(comfy):
    return load_model(str(MODEL_FILE))


@pytest.fixture
def run(comfy):
    """A function (float model, INT8 model, **changes) -> QualityResult over two steps."""

    def run(float_model, int8_model, progress=lambda done, total: None, steps=2, cfg=1.0):
        with safe_open(PROMPTS_FILE, "pt") as file:
            states = file.get_tensor("penguin").float().unsqueeze(0)
        positive, negative = [[states, {}]], [[torch.zeros_like(states), {}]]
        return compare.compare(
            float_model,
            int8_model,
            positive,
            negative,
            {"samples": torch.zeros(LATENT)},
            seed=3,
            steps=steps,
            cfg=cfg,
            progress=progress,
        )

    return run


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.model.modules())


def test_every_int8_layer_is_measured_and_both_models_stay(run, float_model, int8_model):
    before = {key: value.clone() for key, value in float_model.model.state_dict().items()}
    seen = []
    result = run(float_model, int8_model, lambda done, total: seen.append((done, total)), cfg=3.0)
    assert {layer.layer for layer in result.layers} == set(compare.int8_linears(int8_model))
    assert len(result.layers) == 28 and not result.notes
    assert all(30 < layer.sqnr_db < 60 and layer.rotation_group == 256 for layer in result.layers)
    assert all(4 <= layer.rows <= 64 * 6 for layer in result.layers)
    assert len(result.steps) == 2 and result.steps[0].own == result.steps[0].path > 0
    assert 0.99 < result.cosine < 1
    assert seen == [(i, 5) for i in range(1, 6)]
    assert hooks_of(float_model) == hooks_of(int8_model) == 0
    assert all(torch.equal(value, before[key]) for key, value in float_model.model.state_dict().items())


def test_layers_run_on_our_kernel(run, float_model, int8_model):
    host_backend.record_of(int8_model).reset()
    (layer, *_) = [q for q in run(float_model, int8_model, steps=1).layers if q.layer == BROKEN]
    counts = host_backend.record_of(int8_model).snapshot()
    assert not counts["declined"] and sum(counts["calls"].values()) == 2 * 28
    assert layer.shape == (2304, 256)


def test_a_broken_layer_is_the_worst_and_goes_on_the_protect_list(run, float_model, int8_model, tmp_path):
    weight = compare.int8_linears(int8_model)[BROKEN].weight
    weight._params.scale.mul_(1.3)
    result = run(float_model, int8_model)
    worst, second = result.sorted_layers()[:2]
    assert worst.layer == BROKEN and worst.sqnr_db < 12 < 30 < second.sqnr_db
    protect = quality.protect_list(result.layers, 20.0, compare.linears(int8_model))
    assert protect == BROKEN
    kept = {d.layer for d in load_model(str(MODEL_FILE), LoadOptions(protect=protect)).get_attachment(
        "native_int8_report").decisions if "protected" in d.reason}  # fmt: skip
    assert kept == {BROKEN}
    # the steps see it too: the error of a step is larger than any sound one
    assert result.steps[0].own > 0.03


def test_without_rotation_no_layer_is_better_on_the_whole(run, float_model, int8_model):
    plain = run(float_model, load_model(str(MODEL_FILE), LoadOptions(rotation=False)), steps=1)
    rotated = run(float_model, int8_model, steps=1)
    assert {layer.rotation_group for layer in plain.layers} == {0}
    assert min(q.sqnr_db for q in rotated.layers) > min(q.sqnr_db for q in plain.layers)


def test_the_hosts_own_int8_model_is_compared_too(run, float_model, stock_int8_model):
    assert len(run(float_model, stock_int8_model, steps=1).layers) == 28


def test_a_lora_is_part_of_both(run, float_model, int8_model):
    file = loras.lora_file(int8_model, size=0.5)
    with_lora = loras.add_lora(int8_model, file)
    both = run(loras.add_lora(float_model, file), with_lora, steps=1)
    assert min(layer.sqnr_db for layer in both.layers) > 30
    only_float = run(loras.add_lora(float_model, file), int8_model, steps=1)
    assert max(layer.sqnr_db for layer in only_float.layers) < 20


def test_wrong_models_are_told(run, float_model, int8_model, comfy):
    with pytest.raises(compare.WrongModels, match="int8_model has no INT8 Linears"):
        run(float_model, float_model)
    with pytest.raises(compare.WrongModels, match="float_model has INT8 Linears"):
        run(int8_model, int8_model)
    twin = comfy.sd.load_diffusion_model(str(MODEL_FILE))
    twin.model.diffusion_model.single_blocks[5].linear1 = torch.nn.Identity()
    with pytest.raises(compare.WrongModels, match=r"1 of 28 INT8 layers .* single_blocks\.5\.linear1"):
        run(twin, int8_model)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_an_interrupt_leaves_no_hook(run, float_model, int8_model, at):
    def stop(done, total):
        if done == at:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        run(float_model, int8_model, stop)
    assert hooks_of(float_model) == hooks_of(int8_model) == 0
