"""A diffusion transformer with outliers put in that leave its function as it is: what rotation is for, in its latents."""

import pytest
import torch
from packtest import emoji_quality

pytestmark = pytest.mark.comfy

SMALL, FEW = (1, 128, 8, 8), 2
WAYS = ("plain", "rotated")


@pytest.fixture(scope="module")
def found(comfy):
    """{"as trained" | "with outliers": {way: MODEL}}."""
    state = comfy.utils.load_torch_file(str(emoji_quality.MODEL))
    with torch.inference_mode():
        return {
            "as trained": emoji_quality.models(comfy, state, WAYS),
            "with outliers": emoji_quality.models(comfy, emoji_quality.with_outliers(state), WAYS),
        }


def test_the_outliers_leave_the_float_model_as_it_is(comfy, found):
    before, after = (
        emoji_quality.sample(comfy, found[kind]["float"], "penguin", SMALL, FEW) for kind in found
    )  # fmt: skip
    weights = [found[kind]["float"].model.diffusion_model.single_blocks[0].linear1.weight.abs().max() for kind in found]
    assert weights[1] > 5 * weights[0]
    assert torch.allclose(before, after, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("kind", "plain_db", "rotated_db"), [("as trained", 30, 35), ("with outliers", 8, 20)])
def test_layers_plain_and_rotated(found, kind, plain_db, rotated_db):
    worst = {
        way: min(layer.sqnr_db for layer in emoji_quality.layers(found[kind]["float"], found[kind][way]))
        for way in WAYS
    }
    assert worst["plain"] >= plain_db and worst["rotated"] >= rotated_db
    assert worst["rotated"] > worst["plain"] + 3
    if kind == "with outliers":
        assert worst["plain"] < 16 and worst["rotated"] > worst["plain"] + 8


def test_the_latent_with_outliers_is_kept_by_rotation(comfy, found):
    from native_int8.nodes.int8 import quality

    models = found["with outliers"]
    expected, plain, rotated = (
        emoji_quality.sample(comfy, models[way], "penguin", SMALL, FEW) for way in ("float", "plain", "rotated")
    )
    assert quality.relative_error(rotated, expected) < 0.5 * quality.relative_error(plain, expected)
    assert quality.cosine(rotated, expected) > 0.995
