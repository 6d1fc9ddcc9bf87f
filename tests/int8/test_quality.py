"""The measures of the quality report against their definitions, and its protect list against the loader's rule."""

import math

import pytest
import torch
from native_int8.nodes.int8 import plots, policy, quality
from native_int8.nodes.int8.formats import LayerSpec
from native_int8.nodes.int8.quality import LayerQuality, PictureQuality, QualityResult, StepQuality


def pictures(seed=0, height=19, width=23):
    generator = torch.Generator().manual_seed(seed)
    a = torch.rand((height, width, 3), generator=generator)
    return a, (a + 0.05 * torch.randn(a.shape, generator=generator)).clamp(0, 1)


def layer(name, db, shape=(256, 256)):
    return LayerQuality(name, shape, 0, db, 0.99, 8)


def test_sqnr_is_ten_times_the_logarithm_of_the_power_ratio():
    y = torch.tensor([[3.0, 4.0]])
    assert quality.sqnr_db(torch.tensor([[3.0, 4.5]]), y) == pytest.approx(20.0)
    assert quality.sqnr_db(y, y) == math.inf
    assert math.isnan(quality.sqnr_db(torch.tensor([[math.nan, 4.0]]), y))


def test_cosine_and_relative_error():
    a, b = torch.tensor([1.0, 0.0]), torch.tensor([3.0, 4.0])
    assert quality.cosine(a, b) == pytest.approx(0.6)
    assert quality.cosine(a, torch.zeros(2)) == 0
    assert quality.relative_error(torch.tensor([3.0, 3.0]), b) == pytest.approx(0.2)


def test_psnr_of_a_known_difference():
    assert quality.psnr_db(torch.full((4, 4, 3), 0.5), torch.full((4, 4, 3), 0.6)) == pytest.approx(20.0, abs=1e-4)


def test_ssim_is_that_of_its_definition_window_by_window():
    a, b = pictures()
    weights = torch.tensor([math.exp(-((i - 5) ** 2) / 4.5) for i in range(11)], dtype=torch.float64)
    window = weights[:, None] * weights[None, :] / weights.sum() ** 2
    found = []
    for channel in range(3):
        for top in range(a.shape[0] - 10):
            for left in range(a.shape[1] - 10):
                x, y = (p[top : top + 11, left : left + 11, channel].double() for p in (a, b))
                mx, my = (window * x).sum(), (window * y).sum()
                vx, vy = (window * (x - mx) ** 2).sum(), (window * (y - my) ** 2).sum()
                cov = (window * (x - mx) * (y - my)).sum()
                found.append(
                    (2 * mx * my + 1e-4) * (2 * cov + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
                )  # fmt: skip
    assert quality.ssim(a, b) == pytest.approx(float(torch.stack(found).mean()), abs=1e-9)
    assert quality.ssim(a, a) == pytest.approx(1.0)
    assert quality.ssim(a[:5, :7], b[:5, :7]) < 1


def test_pictures_must_come_in_pairs_of_one_size():
    a, b = (p.unsqueeze(0) for p in pictures())
    assert quality.compare_both(None, None) is None
    assert quality.compare_both(a, b).psnr_db == pytest.approx(quality.psnr_db(a, b))
    with pytest.raises(ValueError, match=r"image_b without image_a"):
        quality.compare_both(None, b)
    with pytest.raises(ValueError, match=r"23 x 19 and 23 x 18 pixels"):
        quality.compare_both(a, b[:, 1:])


def test_the_protect_list_takes_the_worst_and_nothing_else_of_the_loader():
    shape = (256, 256)
    names = [f"{kind}blocks.{i}.ff" for kind in ("", "double_") for i in (0, 1, 10)]
    specs = {name: LayerSpec("float", "bf16", "BF16", shape, f"{name}.weight") for name in names}
    measured = [layer(name, 40.0) for name in names]
    measured[1], measured[3] = layer("blocks.1.ff", 15.0), layer("double_blocks.0.ff", 12.0)
    text = quality.protect_list(measured, 20.0, names)
    assert text == "double_blocks.0.ff, [b]locks.1.ff"
    kept = {d.layer for d in policy.plan(specs, protect=text) if not d.is_int8}
    assert kept == {"blocks.1.ff", "double_blocks.0.ff"}
    assert quality.protect_list(measured, 10.0, names) == ""
    assert quality.protect_list([layer("a.0.b", math.nan)], 20.0) == "a.0.b"


RESULT = QualityResult(
    tuple(layer(f"blocks.{i}.ff", 50.0 - i) for i in range(30)),
    (StepQuality(1.0, 0.01, 0.01), StepQuality(0.5, 0.0, 0.02)),
    0.9987,
    PictureQuality(30.0, 0.9, *pictures()),
    ("One layer saw no input.",),
)


def test_the_report_names_the_worst_first_and_all_notes():
    lines = RESULT.report(25.0).splitlines()
    assert lines[1] == "30 INT8 layers: worst 21.0 dB, median 36.0 dB; 4 below 25 dB"
    rows = [line for line in lines if "blocks." in line]
    assert len(rows) == quality.WORST and rows[0].endswith("blocks.29.ff") and "21.00" in rows[0]
    assert lines[-1] == "One layer saw no input." and any("PSNR 30.00 dB, SSIM 0.90000" in line for line in lines)


@pytest.mark.parametrize("draw", [plots.draw_matplotlib, plots.draw_pillow])
def test_both_ways_draw_every_panel(draw, monkeypatch):
    if draw is plots.draw_matplotlib:
        pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "draw", draw)
    whole = RESULT.plot()
    assert whole.dtype == torch.float32 and whole.shape[0] == 1 and whole.shape[2:] == (plots.WIDTH, 3)
    assert 0 <= float(whole.min()) < 0.1 and float(whole.max()) == 1
    less = QualityResult(RESULT.layers, RESULT.steps, RESULT.cosine).plot()
    assert less.shape[1] < whole.shape[1]
    panels = [
        plots.Bars("nothing to compare", ("a", "b"), {"x": (1.0, math.nan), "y": (math.nan, 0.0)}, "us"),
        plots.Lines("one point, none above 0", {"z": (0.0,)}, "step", "error", log=True),
    ]
    assert draw(panels).shape[1] == sum(panel.height for panel in panels)


def test_without_matplotlib_pillow_draws(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    assert RESULT.plot().shape[2] == plots.WIDTH
