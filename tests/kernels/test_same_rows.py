"""Kernels that quantise rows give the same codes and scales for the same values, however many warps share a row."""

import pytest
import torch
from native_int8.kernels import Branch, Norm, quantize_rows, quantize_swiglu, residual_norm
from native_int8.kernels.packed_rows import parts_of
from packtest.checks import assert_same
from packtest.shapes import activation

ROWS = 7
WIDTHS = [
    (256, 0), (256, 16), (256, 256), (320, 64), (768, 0), (768, 256), (1024, 1024), (2304, 256), (3072, 64), (4608, 0),
    (4608, 256), (5120, 1024), (12288, 0), (12288, 256),
]  # fmt: skip


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=str)
def dtype(request):
    return request.param


def assert_rows_of(kept, rows, apart, **options):
    """That `rows` are those of the values `kept`, and that they are `apart` as well."""
    expected = quantize_rows(kept, **options)
    q, scale = parts_of(rows, *kept.shape)
    assert_same(q, apart[0], "codes")
    assert_same(scale, apart[1], "scales")
    assert len({t.untyped_storage().data_ptr() for t in apart}) == 2
    assert_same(q, expected[0], "codes")
    assert_same(scale, expected[1].view(-1), "scales")


@pytest.mark.parametrize(("k", "group"), WIDTHS)
def test_of_an_activation(k, group, dtype, impl, device):
    gate, up = (activation(ROWS, k, dtype, device, seed=seed) for seed in (1, 2))
    kept = torch.empty_like(gate)
    options = {"rotation_group": group, "implementation": impl}
    rows = quantize_swiglu(gate, up, kept=kept, **options)
    assert_rows_of(kept, rows, quantize_swiglu(gate, up, packed=False, **options), **options)


@pytest.mark.parametrize(("k", "group"), WIDTHS)
def test_of_a_norm(k, group, dtype, impl, device):
    x, y = (activation(ROWS, k, dtype, device, seed=seed) for seed in (1, 2))
    vectors = activation(3, k, dtype, device, seed=3) * 0.1
    branch, norm = Branch(y, None, 0.0, vectors[:1]), Norm(1 + vectors[1], 1e-5, vectors[2:])
    kept = torch.empty_like(x)
    options = {"rotation_group": group, "implementation": impl}
    _, rows = residual_norm(x, branch, norm, kept=kept, **options)
    assert_rows_of(kept, rows, residual_norm(x, branch, norm, packed=False, **options)[1], **options)
