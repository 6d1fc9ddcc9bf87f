import json

import pytest
import torch
from native_int8.nodes.int8 import quantize
from native_int8.nodes.int8.checkpoint import CheckpointError
from native_int8.nodes.int8.formats import LayerSpec
from native_int8.nodes.int8.policy import Decision
from packtest.checkpoints import codes, dequantised, floats

CPU = torch.device("cpu")
LAYER = "blocks.0.attn.q"


def decision(n: int, k: int, group: int = 0, kind: str = "float", per_row: bool = True) -> Decision:
    spec = LayerSpec(kind, "test", "BF16", (n, k), f"{LAYER}.weight", per_row=per_row, rotation_group=group)
    return Decision(LAYER, "adopt" if kind == "int8" else "quantise", spec, "test", (n, k), group, True)


def steps(tensors: dict, weight: torch.Tensor, group: int) -> torch.Tensor:
    """|w' - w| in units of each row's scale, w' being the quantised weight in the stored basis."""
    scale = tensors[f"{LAYER}.weight_scale"].double()
    ones = torch.ones_like(scale)
    # rotating the weight equals rotating codes back, because H is symmetric and its own inverse
    rotated = dequantised(weight, ones, group)
    return (tensors[f"{LAYER}.weight"].double() - rotated / scale).abs()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("group", [0, 16, 64, 256])
@pytest.mark.fault("B60", "B96")
def test_codes_are_the_nearest_steps(dtype, group):
    weight = floats(40, 512, dtype=dtype)
    tensors = quantize.quantised(decision(40, 512, group), weight, None, CPU)
    assert tensors[f"{LAYER}.weight"].dtype == torch.int8
    assert tensors[f"{LAYER}.weight_scale"].shape == (40, 1)
    # rotation in float32 moves a value by far less than a hundredth of a step
    assert steps(tensors, weight, group).max() <= 0.51
    assert tensors[f"{LAYER}.weight"].abs().max() == 127


def test_the_result_is_the_same_each_time():
    weight = floats(40, 512)
    runs = [quantize.quantised(decision(40, 512, 256), weight, None, CPU) for _ in range(2)]
    assert all(torch.equal(runs[0][key], runs[1][key]) for key in runs[0])


@pytest.mark.parametrize("count", [1, 40])
@pytest.mark.fault("B53", "B119")
def test_an_fp8_source_is_dequantised_with_its_scale_first(count):
    stored = floats(40, 512).mul(20).to(torch.float8_e4m3fn)
    scale = torch.rand(count) + 0.5
    tensors = quantize.quantised(decision(40, 512, kind="fp8_scaled"), stored, scale, CPU)
    assert steps(tensors, stored.float() * scale.reshape(-1, 1), 0).max() <= 0.51


def test_marker_says_the_format_and_the_rotation():
    fields = [json.loads(bytes(quantize.marker_tensor(group).tolist())) for group in (0, 64)]
    assert fields == [
        {"format": "int8_tensorwise"},
        {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64},
    ]


@pytest.mark.parametrize("shape", [(24,), (24, 1), (1, 24)], ids=str)
def test_adopts_codes_as_they_are_and_scales_as_a_column(shape):
    weight, scale = codes(), torch.rand(shape).to(torch.bfloat16)
    tensors = quantize.adopted(decision(24, 40, kind="int8"), weight, scale)
    assert torch.equal(tensors[f"{LAYER}.weight"], weight)
    assert tensors[f"{LAYER}.weight_scale"].dtype == torch.float32
    assert torch.equal(tensors[f"{LAYER}.weight_scale"], scale.float().reshape(24, 1))


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_adopts_one_scale_as_a_scalar(shape):
    tensors = quantize.adopted(decision(24, 40, kind="int8", per_row=False), codes(), torch.full(shape, 0.5))
    assert tensors[f"{LAYER}.weight_scale"].shape == ()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_weight_that_is_not_finite_stops_and_names_the_layer(bad):
    weight = floats(40, 512)
    weight[3, 5] = bad
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight: 1 of 40 rows"):
        quantize.quantised(decision(40, 512), weight, None, CPU)
    with pytest.raises(CheckpointError, match=LAYER):
        quantize.adopted(decision(24, 40, kind="int8", per_row=False), codes(), torch.tensor(bad))


@pytest.mark.parametrize("scale", [None, torch.tensor(0.5), torch.rand(24, 1)], ids=["none", "one", "rows"])
@pytest.mark.fault("B119")
def test_a_kept_fp8_weight_becomes_bfloat16(scale):
    stored = floats(24, 40).to(torch.float8_e4m3fn)
    expected = stored.float() * (1 if scale is None else scale)
    assert torch.equal(quantize.kept(stored, scale), expected.to(torch.bfloat16))


def test_a_kept_float_is_passed_on():
    weight = floats(24, 40, dtype=torch.float16)
    assert quantize.kept(weight) is weight
