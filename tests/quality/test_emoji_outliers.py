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


def test_pictures_with_outliers_are_kept_by_rotation(comfy, found):
    """FLIP sees what a person would see when flipping between two pictures: 0 is equal, and 0.2 disturbs."""
    from native_int8.nodes.int8 import quality

    pytest.importorskip("flip_evaluator", reason="needs flip-evaluator: pip install -r requirements-dev.txt")
    pictures = {
        (kind, way): emoji_quality.emoji_pack().decode(
            emoji_quality.sample(comfy, found[kind][way], "penguin", SMALL, FEW)
        )[0]
        for kind in found
        for way in ("float", *WAYS)
    }
    flips = {
        (kind, way): emoji_quality.flip(pictures[kind, "float"], pictures[kind, way]) for kind in found for way in WAYS
    }
    floats = pictures["with outliers", "float"]
    assert emoji_quality.flip(floats, floats) == 0
    assert max(flips["as trained", way] for way in WAYS) < 0.08
    assert flips["with outliers", "rotated"] < 0.12 < 0.5 * flips["with outliers", "plain"]
    compared = [quality.compare_pictures(floats[None], pictures["with outliers", way][None]) for way in WAYS]
    assert compared[0].psnr_db + 3 < compared[1].psnr_db and compared[0].ssim < compared[1].ssim
