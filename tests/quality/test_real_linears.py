"""Single trained Linears with the real inputs that have outliers: how much of the signal INT8 keeps."""

import pytest
from packtest import real_quality
from safetensors.torch import load_file

STATE = load_file(real_quality.DATA)
LAYERS = sorted(key.removesuffix(".weight") for key in STATE if key.endswith(".weight"))
PLAIN_DB, ROTATED_DB = 16.0, 28.0
# layers whose outliers sit in a few tokens, so that one scale for all tokens ruins the others
TOKEN_OUTLIERS = ("smollm2.model.layers.9.mlp.down_proj", "minilm.encoder.layer.1.output.dense")


@pytest.fixture(params=LAYERS)
def linear(request):
    """(name, x, weight, bias) in float32."""
    parts = [STATE.get(f"{request.param}.{part}") for part in ("input", "weight", "bias")]
    return request.param, *(None if part is None else part.float() for part in parts)


def test_there_are_layers_of_three_models_with_outliers():
    assert {name.split(".")[0] for name in LAYERS} == {"smollm2", "minilm", "whisper_enc"}
    for name in LAYERS:
        x = STATE[f"{name}.input"].float()
        assert x.abs().max() > 8 * x.square().mean().sqrt(), name


def test_plain_and_rotated_pass_and_rotation_helps(linear):
    _, x, weight, bias = linear
    plain = real_quality.linear_sqnr_db(x, weight, bias, rotation=False)
    rotated = real_quality.linear_sqnr_db(x, weight, bias, rotation=True)
    assert plain >= PLAIN_DB and rotated >= ROTATED_DB
    assert rotated >= plain + 6


def test_the_scale_search_neither_ruins_nor_rescues(linear):
    _, x, weight, bias = linear
    for rotation in (False, True):
        usual, searched = (
            real_quality.linear_sqnr_db(x, weight, bias, rotation=rotation, mse=mse) for mse in (False, True)
        )
        assert abs(searched - usual) < 1.5


def test_one_scale_per_activation_tensor_fails(linear):
    name, x, weight, bias = linear
    per_tensor = real_quality.linear_sqnr_db_per_tensor(x, weight, bias)
    assert per_tensor < real_quality.linear_sqnr_db(x, weight, bias, rotation=False)
    if name in TOKEN_OUTLIERS:
        assert per_tensor < real_quality.linear_sqnr_db(x, weight, bias, rotation=False) - 10
    assert per_tensor < ROTATED_DB


def test_the_gate_catches_one_scale_per_tensor():
    found = []
    for name in LAYERS:
        x, weight, bias = (STATE.get(f"{name}.{part}") for part in ("input", "weight", "bias"))
        found.append(
            real_quality.linear_sqnr_db_per_tensor(x.float(), weight.float(), None if bias is None else bias.float())
        )
    assert min(found) < PLAIN_DB
