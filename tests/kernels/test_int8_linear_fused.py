"""SwiGLU and residual epilogues against the reference and against the separate ops."""

import pytest
import torch
from native_int8.kernels import (
    PreparedLinear,
    UnsupportedInput,
    int8_linear_fused,
    int8_linear_residual,
    int8_linear_swiglu,
    quantize_rows,
    reference,
)
from native_int8.kernels.int8_linear_fused import fits_low_rank, fits_swiglu, swiglu_of_rows
from native_int8.kernels.low_rank import LowRank
from packtest.checks import assert_close, assert_same
from packtest.shapes import activation, generator

TOLERANCE = {torch.float16: 1e-3, torch.bfloat16: 8e-3, torch.float32: 1e-5}


def weight(n, k, device, seed, group=0, row_scales=True):
    w = torch.randn((n, k), generator=generator(seed, str(device)), device=device) / k**0.5
    q, scale = quantize_rows(w, rotation_group=group, implementation="torch")
    return q, scale if row_scales else scale.mean().reshape(1)


def linear(x, q, scale, bias, group=0):
    """The reference Linear in fp32."""
    rows = reference.rotate(x, group) if group else x
    flat = rows.reshape(-1, x.shape[-1])
    return reference.int8_matmul(*reference.quantize_rows(flat), q, scale, bias, torch.float32)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 32, 16), (33, 80, 49), (65, 256, 130)])
@pytest.mark.parametrize("row_scales", [True, False], ids=["row_scales", "one_scale"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_swiglu(dtype, m, k, n, row_scales, with_bias, impl, device):
    x = activation(m, k, dtype, device)
    (wg, sg), (wu, su) = (weight(n, k, device, seed, 0, row_scales) for seed in (1, 2))
    bg, bu = (torch.randn(n, device=device), torch.randn(n, device=device)) if with_bias else (None, None)
    y = int8_linear_swiglu(x, wg, sg, wu, su, bg, bu, implementation=impl)
    expected = torch.nn.functional.silu(linear(x, wg, sg, bg)) * linear(x, wu, su, bu)
    assert y.dtype == dtype
    assert_close(y, expected, TOLERANCE[dtype], "y")


def test_swiglu_of_the_halves_of_one_weight(impl, device):
    x = activation(20, 64, torch.float32, device).reshape(2, 10, 64)
    q, scale = weight(96, 64, device, 3)
    y = int8_linear_swiglu(x, q[:48], scale[:48], q[48:], scale[48:], implementation=impl)
    together = linear(x, q, scale, None)
    expected = (torch.nn.functional.silu(together[:, :48]) * together[:, 48:]).reshape(2, 10, 48)
    assert_close(y, expected, 1e-5, "y")


def test_swiglu_with_rotation_and_odd_weight_addresses(impl, device, caplog):
    x = activation(9, 64, torch.float32, device)
    (wg, sg), (wu, su) = (weight(24, 64, device, seed, 16) for seed in (4, 5))
    shifted = torch.empty(24 * 64 + 1, dtype=torch.int8, device=device)[1:].reshape(24, 64).copy_(wu)
    int8_linear_fused._say_copied.cache_clear()
    y = int8_linear_swiglu(x, wg, sg, shifted, su, rotation_group=16, implementation=impl)
    assert ("copies its weights [24, 64]" in caplog.text) == (impl == "triton")
    expected = torch.nn.functional.silu(linear(x, wg, sg, None, 16)) * linear(x, wu, su, None, 16)
    assert_close(y, expected, 3e-2, "y")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("gates", [None, 0, 1, 3], ids=["no_gate", "vector", "one_image", "three_images"])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_residual(dtype, gates, with_bias, impl, device):
    x = activation(3 * 11, 48, dtype, device).reshape(3, 11, 48)
    q, scale = weight(40, 48, device, 6)
    bias = torch.randn(40, device=device) if with_bias else None
    residual = torch.randn((3, 11, 40), device=device).to(dtype)
    gate = None if gates is None else torch.randn((40,) if gates == 0 else (gates, 1, 40), device=device).to(dtype)
    y = int8_linear_residual(x, q, scale, bias, residual=residual, gate=gate, implementation=impl)
    branch = linear(x, q, scale, bias).reshape(3, 11, 40)
    expected = residual.cpu().float() + branch * (
        1 if gate is None else gate.cpu().float().reshape(-1, 1, 40) if gates else gate.cpu().float()
    )
    assert y.dtype == dtype and y.shape == residual.shape
    assert_close(y, expected, TOLERANCE[dtype], "y")


def test_residual_may_be_a_strided_view(impl, device):
    x = activation(7, 32, torch.float32, device)
    q, scale = weight(24, 32, device, 7)
    wide = torch.randn((7, 60), device=device)
    for view in (wide[:, 5:29], wide[:, ::2][:, :24]):
        y = int8_linear_residual(x, q, scale, residual=view, implementation=impl)
        assert_close(y, view.cpu() + linear(x, q, scale, None), 1e-5, "y")


@pytest.mark.parametrize("rows", [0, 1])
def test_few_rows(rows, impl, device):
    x = activation(rows, 32, torch.float16, device)
    q, scale = weight(16, 32, device, 8)
    residual = torch.zeros((rows, 16), dtype=torch.float16, device=device)
    assert int8_linear_residual(x, q, scale, residual=residual, implementation=impl).shape == (rows, 16)
    assert int8_linear_swiglu(x, q, scale, q, scale, implementation=impl).shape == (rows, 16)


def test_what_does_not_fit_is_refused(device):
    x = activation(4, 32, torch.float16, device)
    q, scale = weight(16, 32, device, 9)
    with pytest.raises(UnsupportedInput, match="equal shapes"):
        int8_linear_swiglu(x, q, scale, q[:8], scale[:8])
    with pytest.raises(UnsupportedInput, match="as many scales"):
        int8_linear_swiglu(x, q, scale, q, scale[:1])
    for residual, gate in (((4, 15), None), ((5, 16), None), ((4, 16), 15), ((4, 16), 48)):
        with pytest.raises(UnsupportedInput, match="a gate of"):
            int8_linear_residual(
                x, q, scale,
                residual=torch.zeros(residual, dtype=torch.float16, device=device),
                gate=None if gate is None else torch.ones(gate, device=device),
            )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 48), (33, 127, 40), (17, 256, 130)])
def test_swiglu_of_rows_rounds_as_two_linears_do(m, k, n, bias, dtype, impl, device):
    """Equal to two Linears, SiLU and a product, each in the dtype of x."""
    g = generator(4, str(device))
    x = torch.randn((m, k), generator=g, device=device).to(dtype)
    linears = []
    for _ in range(2):
        codes, scale = quantize_rows(torch.randn((n, k), generator=g, device=device))
        vector = torch.randn(n, generator=g, device=device).to(dtype) if bias else None
        linears.append((codes, scale, vector))
    assert fits_swiglu(*linears)
    prepared = PreparedLinear(linears[0][0], linears[0][1], implementation=impl)
    gate, rows = prepared.with_rows(x, *linears[0])
    up = prepared.with_rows(x, *linears[1], rows)[0]
    expected = torch.nn.functional.silu(gate) * up
    got = swiglu_of_rows(torch.full_like(x, float("nan")), rows, *linears, impl)
    if impl == "triton" and device.type == "cpu":
        # NumPy's exponential is another than PyTorch's
        assert_close(got, expected, 1e-3, "y")
    else:
        assert_same(got, expected, "y")


@pytest.mark.parametrize("one_down", [False, True], ids=["two_inputs", "one_input"])
@pytest.mark.parametrize(("m", "k", "n", "rank"), [(1, 64, 48, 32), (33, 128, 40, 64), (17, 256, 130, 192)])
def test_swiglu_of_rows_adds_what_two_linears_add(m, k, n, rank, one_down, impl, device):
    """Equal to two Linears with a low-rank product each, SiLU and a product."""
    g = generator(5, str(device))
    x = torch.randn((m, k), generator=g, device=device).half()
    linears, low_rank = [], []
    for _ in range(2):
        linears.append((*quantize_rows(torch.randn((n, k), generator=g, device=device)), None))
        down, up = (torch.randn(shape, generator=g, device=device).half() * 0.1 for shape in ((rank, k), (n, rank)))
        low_rank.append(LowRank(low_rank[0].down if low_rank and one_down else down, up))
    assert fits_low_rank(low_rank, x) and not fits_low_rank(low_rank, x.double())
    prepared = PreparedLinear(linears[0][0], linears[0][1], implementation=impl)
    _, rows = prepared.with_rows(x, *linears[0])
    gate, up = (prepared.with_rows(x, *linear, rows, own)[0] for linear, own in zip(linears, low_rank, strict=True))
    expected = torch.nn.functional.silu(gate) * up
    got = swiglu_of_rows(x.view(1, m, k), rows, *linears, impl, low_rank)[0]
    plain = swiglu_of_rows(x, rows, *linears, impl)
    assert not torch.equal(got, plain)
    if impl == "triton" and device.type == "cpu":
        assert_close(got, expected, 2e-3, "y")
    else:
        assert_same(got, expected, "y")


def test_low_rank_products_that_differ_do_not_fit(device):
    def low_rank(rank, dtype=torch.float16):
        return LowRank(*(torch.zeros(shape, dtype=dtype, device=device) for shape in ((rank, 64), (48, rank))))

    x = torch.zeros((1, 64), dtype=torch.float16, device=device)
    assert fits_low_rank((low_rank(32), low_rank(32)), x)
    for pair in ((32, 64), (32, 32, torch.bfloat16)):
        assert not fits_low_rank((low_rank(32), low_rank(*pair[1:])), x)


def test_weights_that_lie_differently_do_not_fit(device):
    codes, scale = quantize_rows(torch.randn((48, 64), device=device))
    one, wide = (codes, scale, None), torch.empty((48, 80), dtype=torch.int8, device=device)
    for other in ((codes[:8], scale[:8], None), (wide[:, :64], scale, None), (codes, scale[:1], None)):
        assert not fits_swiglu(one, other)
    assert not fits_swiglu(one, (codes, scale, torch.zeros(48, device=device)))
