"""The ComfyUI side of tuning and warm-up: a MODEL's shapes and rows, the file in the user folder, refusals."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from native_int8.kernels import tiles, tuned
from native_int8.kernels.capability import device_from
from native_int8.kernels.tuning import Entry, TuningResult
from native_int8.kernels.warmup import LinearKind
from native_int8.nodes.int8 import tune, tuned_tiles, warm_up

pytestmark = pytest.mark.comfy

CARD = device_from(
    name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), multiprocessors=82, torch="2", triton="3", driver="1"
)
TILE = tiles.Tile(256, 128, 64, 8, 4)
RESULT = TuningResult(
    (Entry(8192, 4608, 4608, 4352, TILE, 80.0, tiles.Tile(128, 128, 64, 4, 4), 100.0),), 68.0, 71.2, 3.0
)


@pytest.fixture
def card(comfy, tmp_path, monkeypatch):
    """A made-up card whose file lives in an empty user folder."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "get_user_directory", lambda: str(tmp_path))
    monkeypatch.setattr(tuned_tiles, "detect", lambda device: CARD)
    tuned_tiles.use.cache_clear()
    yield torch.device("cuda", 0)
    tuned_tiles.use.cache_clear()
    tiles.use_tuned(CARD, {})


def test_linears_of_a_model_are_its_kinds_each_once(stock_int8_model):
    found = tuned_tiles.linears_of(stock_int8_model)
    dtype = stock_int8_model.model.get_dtype_inference()
    assert len(found) == len(set(found)) >= 3
    assert all(isinstance(kind, LinearKind) and kind.dtype == dtype and kind.row_scales for kind in found)
    assert {kind.rotation_group for kind in found} == {256}
    shapes = {
        tuple(module.weight._qdata.shape)
        for module in stock_int8_model.model.diffusion_model.modules()
        if hasattr(getattr(module, "weight", None), "_qdata")
    }
    assert {(kind.out_features, kind.in_features) for kind in found} == shapes


def test_a_float_model_has_nothing_to_tune(float_model):
    assert tuned_tiles.linears_of(float_model) == ()
    report = tune.tune_model(float_model, (64,), lambda *_: None, lambda: False)
    assert "no INT8 Linears" in report and "INT8 Patch Model" in report


def test_rows_of_a_size(stock_int8_model):
    # FLUX.2's latent has 16 x 16 pixels per token
    assert tuned_tiles.rows_of(stock_int8_model, 1024, 1024, 1, 256) == (256, 4096, 4352, 8192, 8704)
    assert tuned_tiles.rows_of(stock_int8_model, 1000, 16, 2, 0) == (126, 252)


@pytest.mark.parametrize(
    ("channels", "ratio", "patch", "pixels"),
    [(16, 8, 2, 16), (128, 16, 2, 16), (48, 16, (1, 2, 2), 32), (128, 32, 1, 32), (16, 8, [1, 2, 2], 16)],
)
def test_pixels_of_a_token(channels, ratio, patch, pixels):
    latent = SimpleNamespace(latent_channels=channels, spacial_downscale_ratio=ratio)
    base = SimpleNamespace(latent_format=latent, diffusion_model=SimpleNamespace(patch_size=patch))
    assert tuned_tiles.pixels_per_token(SimpleNamespace(model=base)) == pixels


def test_what_is_kept_is_used_at_once_and_after_a_restart(card, tmp_path):
    path = tuned_tiles.keep(card, RESULT)
    assert path == tmp_path / "native_int8" / "tiles-nvidia-geforce-rtx-3090-sm86.json"
    assert tiles.pick(CARD, 4352, 4608, 4608) == TILE
    tiles.use_tuned(CARD, {})
    assert tuned_tiles.use(card).entries == {(8192, 4608, 4608): TILE}
    assert tiles.pick(CARD, 4352, 4608, 4608) == TILE


def test_a_stale_file_is_told_of_once_and_not_used(card, caplog):
    path = tuned_tiles.keep(card, RESULT)
    tiles.use_tuned(CARD, {})
    body = json.loads(path.read_text())
    body["key"]["driver"] = "2"
    path.write_text(json.dumps(body))
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert "measured with driver 2" in tuned_tiles.use(card).ignored
    assert caplog.text.count("is ignored") == 1
    assert tiles.pick(CARD, 4352, 4608, 4608) != TILE


def test_nothing_is_read_for_a_cpu(card):
    assert tuned_tiles.use(torch.device("cpu")) == tuned.Tuned({})


def test_a_folder_that_cannot_be_written_is_told_and_the_tiles_are_used(card, tmp_path):
    (tmp_path / "native_int8").write_text("a file where the folder should be")
    line = tune._keep(card, RESULT)
    assert "1 faster than before (up to 1.25 times), used until ComfyUI ends" in line
    assert tiles.pick(CARD, 4352, 4608, 4608) == TILE


def test_warm_up_does_nothing_on_a_cpu(stock_int8_model):
    if stock_int8_model.load_device.type == "cpu":
        assert warm_up.compile_kernels(stock_int8_model) == ""
    else:
        warm_up.compile_kernels(stock_int8_model)
        assert warm_up.compile_kernels(stock_int8_model) == ""
