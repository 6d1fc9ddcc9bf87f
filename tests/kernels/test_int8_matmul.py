"""int8_matmul against the reference: the integer part exactly, the output rounded once."""

import pytest
import torch
from native_int8.kernels import UnsupportedInput, int8_matmul, reference
from native_int8.kernels.compiled import interpreted
from native_int8.kernels.tiles import TABLES, Tile, all_tiles
from packtest.checks import assert_rounded_once, assert_same
from packtest.shapes import EDGE_SHAPES, generator, int8_in_dirty_buffer, shape_id


def operands(shape, device, row_scales=True, with_bias=True, bias_dtype=torch.float32):
    m, k, n = shape
    g = generator(1, str(device))
    x_scale = torch.rand((m, 1), device=device, generator=g) * 0.1 + 1e-3
    w_scale = torch.rand((n, 1) if row_scales else (1,), device=device, generator=g) * 0.01 + 1e-4
    bias = torch.randn((n,), device=device, generator=g).to(bias_dtype) if with_bias else None
    return int8_in_dirty_buffer(m, k, device, 2), x_scale, int8_in_dirty_buffer(n, k, device, 3), w_scale, bias


def accumulator(q_x, q_w, impl, tile=None):
    """The int32 sums, read through unit scales; fp32 holds them exactly below 2**24."""
    ones = torch.ones((q_x.shape[0], 1), device=q_x.device)
    return int8_matmul(
        q_x, ones, q_w, torch.ones(1, device=q_x.device), out_dtype=torch.float32, implementation=impl, tile=tile
    )


@pytest.mark.parametrize("shape", EDGE_SHAPES, ids=shape_id)
@pytest.mark.fault("B92", "B93")
def test_integer_part_is_exact(shape, impl, device):
    q_x, _, q_w, _, _ = operands(shape, device)
    assert_same(accumulator(q_x, q_w, impl), reference.int8_accumulate(q_x, q_w).float(), "int32 sums")


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("row_scales", [True, False], ids=["row_scales", "one_scale"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_output_is_the_reference_rounded_once(out_dtype, row_scales, with_bias, impl, device):
    args = operands((33, 80, 49), device, row_scales, with_bias)
    got = int8_matmul(*args, out_dtype=out_dtype, implementation=impl)
    assert_rounded_once(got, reference.int8_matmul(*args, out_dtype), interpreted(), "output")


@pytest.mark.parametrize("bias_dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_bias_of_any_dtype(bias_dtype, impl, device):
    args = operands((20, 64, 40), device, bias_dtype=bias_dtype)
    args = (*args[:4], torch.stack([args[4], args[4] + 1], dim=1)[:, 1])
    got = int8_matmul(*args, out_dtype=torch.float16, implementation=impl)
    assert_same(got, reference.int8_matmul(*args, torch.float16), "output")


@pytest.mark.fault("B92", "B93")
def test_codes_of_minus_128_do_not_wrap(impl, device):
    q = torch.full((17, 96), -128, dtype=torch.int8, device=device)
    assert accumulator(q, q, impl).unique().tolist() == [128.0 * 128 * 96]


@pytest.mark.fault("B90")
def test_scale_is_applied_in_fp32_so_that_fp16_does_not_overflow(impl, device):
    q_x = torch.full((16, 4096), 127, dtype=torch.int8, device=device)
    scale = torch.full((16, 1), 1e-3, device=device)
    y = int8_matmul(
        q_x, scale, q_x[:16], torch.tensor([1e-3], device=device), out_dtype=torch.float16, implementation=impl
    )
    assert y.unique().tolist() == [torch.tensor(127 * 127 * 4096 * 1e-6).half().item()]


def test_scale_of_every_shape_means_the_same(impl, device):
    q_x, x_scale, q_w, w_scale, bias = operands((24, 40, 24), device)
    expected = int8_matmul(q_x, x_scale, q_w, w_scale, bias, out_dtype=torch.float32, implementation=impl)
    for view in (w_scale.reshape(-1), w_scale.reshape(1, -1), w_scale.reshape(-1, 1)):
        assert_same(
            int8_matmul(q_x, x_scale, q_w, view, bias, out_dtype=torch.float32, implementation=impl), expected, "y"
        )
    one = torch.tensor(0.5, device=device)
    expected = int8_matmul(q_x, x_scale, q_w, one.expand(24), bias, out_dtype=torch.float32, implementation=impl)
    tail = torch.full((9,), 1e6, device=device)
    tail[0] = 0.5
    for view in (one, one.reshape(1), one.reshape(1, 1), tail[:1]):
        assert_same(
            int8_matmul(q_x, x_scale, q_w, view, bias, out_dtype=torch.float32, implementation=impl), expected, "y"
        )


def test_square_layer_scales_channels_not_tokens(impl, device):
    q = torch.eye(24, dtype=torch.int8, device=device)
    w_scale = torch.arange(1, 25, device=device).float()
    y = int8_matmul(q, torch.ones(24, 1, device=device), q, w_scale, out_dtype=torch.float32, implementation=impl)
    assert_same(y, torch.diag(w_scale), "y")


def test_bad_row_scale_makes_that_row_nan_and_no_other(impl, device):
    q_x, x_scale, q_w, w_scale, bias = operands((19, 32, 40), device)
    x_scale[4] = float("nan")
    y = int8_matmul(q_x, x_scale, q_w, w_scale, bias, out_dtype=torch.float16, implementation=impl)
    assert torch.isnan(y).any(1).nonzero().flatten().tolist() == [4]
    assert torch.isnan(y[4]).all()


@pytest.mark.parametrize(
    "tile",
    [*sorted({t for sm in TABLES for t in all_tiles(sm) if not t.tma}, key=str), Tile(16, 16, 32, 1, 2, 3)],
    ids=str,
)
def test_every_tile_of_the_tables_is_exact(tile, device):
    q_x = int8_in_dirty_buffer(tile.block_m + 3, 2 * tile.block_k + 16, device, 5)
    q_w = int8_in_dirty_buffer(tile.block_n + 9, 2 * tile.block_k + 16, device, 6)
    got = accumulator(q_x, q_w, "triton", tile)
    assert_same(got, reference.int8_accumulate(q_x, q_w).float(), "int32 sums")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q_x": torch.zeros(4, 32)}, "Needed: int8"),
        ({"weight": torch.zeros(8, 33, dtype=torch.int8)}, "for an input of 32 columns"),
        ({"weight": torch.zeros(8, 32)}, "Needed: int8"),
        ({"weight_scale": torch.ones(7)}, "7 values for 8"),
        ({"weight_scale": torch.ones(9)}, "9 values for 8"),
        ({"weight_scale": torch.ones(2)}, "2 values for 8"),
        ({"bias": torch.ones(7)}, "bias has 7"),
        ({"x_scale": torch.ones(3, 1)}, "3 values for 4 rows"),
        ({"out_dtype": torch.int32}, "torch.int32"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(change, words):
    arguments = {
        "q_x": torch.zeros(4, 32, dtype=torch.int8),
        "x_scale": torch.ones(4, 1),
        "weight": torch.zeros(8, 32, dtype=torch.int8),
        "weight_scale": torch.ones(8),
        "out_dtype": torch.float16,
    }
    with pytest.raises(UnsupportedInput, match=words):
        int8_matmul(**{**arguments, **change})
