"""The search for row scales: never worse than the plain rule, better with outliers, and the same each time."""

import pytest
import torch
from native_int8.kernels import quantize_rows, rotate
from native_int8.nodes.int8.loader import LoadOptions, load_model
from native_int8.nodes.int8.scale_search import quantize_rows_mse
from packtest.checkpoints import dequantised, floats


def squared_error(values, codes, scale) -> torch.Tensor:
    """Of each row, in float64."""
    return (values.double() - codes.double() * scale.double()).square().sum(dim=1)


@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_row_is_worse_and_most_are_better(group, dtype):
    weight = floats(48, 512, seed=1)
    weight = weight.to(dtype)
    turned = rotate(weight.float(), group) if group else weight.float()
    plain = squared_error(turned, *quantize_rows(weight, rotation_group=group))
    codes, scale = quantize_rows_mse(weight, group)
    found = squared_error(turned, codes, scale)
    assert codes.dtype == torch.int8 and codes.abs().max() <= 127 and scale.shape == (48, 1)
    assert (found <= plain * (1 + 1e-5)).all()
    assert found.sum() < 0.995 * plain.sum()
    again = quantize_rows_mse(weight, group)
    assert torch.equal(again[0], codes) and torch.equal(again[1], scale)


def test_rows_that_lie_on_the_grid_stay():
    weight = torch.arange(-127, 129).clamp(max=127).float().repeat(3, 1) * torch.tensor([[0.5], [1.0], [2.0]])
    codes, scale = quantize_rows_mse(weight)
    assert torch.equal(codes * scale, weight)


def test_zero_and_bad_rows_are_marked_as_ever():
    weight = floats(4, 64)
    weight[1] = 0
    weight[2, 5] = float("nan")
    weight[3, 6] = float("inf")
    codes, scale = quantize_rows_mse(weight)
    assert not codes[1].any() and torch.isnan(scale[2:]).all() and not torch.isnan(scale[:2]).any()
    alone = quantize_rows_mse(weight[:1])
    assert torch.equal(codes[:1], alone[0]) and torch.equal(scale[:1], alone[1])


@pytest.mark.comfy
def test_a_model_gets_closer_weights(comfy, emoji_file):
    float_state = comfy.utils.load_torch_file(emoji_file)
    errors = []
    for search in (False, True):
        state = load_model(emoji_file, LoadOptions(mse=search)).model.diffusion_model.state_dict()
        key = "single_blocks.2.linear1.weight"
        back = dequantised(state[key], state[f"{key}_scale"], 256)
        errors.append((back - float_state[key].double()).square().sum().item())
    assert errors[1] < errors[0]
