"""quantize_rms_norm against RMSNorm followed by the reference quantisation."""

import pytest
import torch
from native_int8.kernels import UnsupportedInput, quantize_rms_norm, reference
from packtest.checks import assert_close, assert_codes_within_one
from packtest.shapes import activation, generator

EPS = 1e-5


def normed(x, weight, group):
    """RMSNorm in float64, then the rotation."""
    x = x.cpu().double()
    v = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.cpu().double()
    return reference.rotate(v, group) if group else v


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("k", "group"), [(1, 0), (33, 0), (256, 0), (320, 64), (768, 256), (4608, 0), (4608, 256)])
def test_equals_norm_then_quantise(k, group, dtype, impl, device):
    x = activation(5, k, dtype, device)
    weight = torch.randn(k, generator=generator(2, str(device)), device=device).to(dtype)
    q, scale = quantize_rms_norm(x, weight, EPS, rotation_group=group, implementation=impl)
    expected_q, expected_scale = reference.quantize_rows(normed(x, weight, group))
    assert_close(scale, expected_scale, 1e-4, "scale")
    assert_codes_within_one(q, expected_q, 0.01, "codes")


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_any_number_of_rows_and_dimensions(rows, impl, device):
    x = activation(2 * rows, 64, torch.float16, device).reshape(2, rows, 64)
    q, scale = quantize_rms_norm(x, torch.ones(64, device=device), EPS, implementation=impl)
    assert q.shape == (2, rows, 64) and scale.shape == (2, rows, 1)


def test_a_zero_row_and_a_bad_row(impl, device):
    x = activation(4, 48, torch.float32, device)
    x[1] = 0
    x[2, 5] = float("nan")
    q, scale = quantize_rms_norm(x, torch.ones(48, device=device), EPS, implementation=impl)
    assert q[1].abs().max() == 0 and scale[1] < 1e-29
    assert torch.isnan(scale[2]).all() and torch.isfinite(scale[[0, 1, 3]]).all()


def test_weight_of_another_size_is_refused():
    with pytest.raises(UnsupportedInput, match="7 values for 8 columns"):
        quantize_rms_norm(torch.zeros(2, 8), torch.ones(7), EPS)
