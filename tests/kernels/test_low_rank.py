"""A low-rank product beside an INT8 product: in the matmul's epilogue and as a pair of products after it."""

import pytest
import torch
from native_int8.kernels import LowRank, PreparedLinear, add_low_rank, quantize_rows
from native_int8.kernels.compiled import interpreted
from native_int8.kernels.low_rank import fits_epilogue
from packtest.checks import assert_same
from packtest.shapes import IDEOGRAM4, generator

K, N = 128, 80


def skip_what_the_interpreter_cannot(dtype, impl):
    if impl == "triton" and dtype is torch.bfloat16 and interpreted():
        pytest.skip("Triton's interpreter multiplies bfloat16 as integers")


def layer(device, group=0, n=N):
    w = torch.randn((n, K), generator=generator(7, str(device)), device=device)
    q, scale = quantize_rows(w, rotation_group=group, implementation="torch")
    return q, scale, torch.randn((n,), generator=generator(8, str(device)), device=device)


def stack(device, dtype, rank=32, n=N):
    down = torch.randn((rank, K), generator=generator(1, str(device)), device=device)
    up = torch.randn((n, rank), generator=generator(2, str(device)), device=device) * 0.1
    return LowRank(down.to(dtype), up.to(dtype))


def rows(shape, device, dtype):
    return torch.randn(shape, generator=generator(4, str(device)), device=device).to(dtype)


def exact(y, x, low_rank):
    """y + (x down^T) up^T with the inner product rounded to the dtype of x, as it is stored."""
    inner = (x.double() @ low_rank.down.double().t()).to(x.dtype)
    return y.double() + inner.double() @ low_rank.up.double().t()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [32, 64, 192])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_equals_the_layer_and_the_product(dtype, rank, bias, impl, device):
    skip_what_the_interpreter_cannot(dtype, impl)
    q, scale, b = layer(device, 64)
    b = b if bias else None
    prepared = PreparedLinear(q, scale, rotation_group=64, implementation=impl)
    low_rank = stack(device, dtype, rank)
    for m in (5, 33, 5, 5):
        x = rows((1, m, K), device, dtype)
        plain = prepared(x.float(), q, scale, b)
        y, _ = prepared.with_rows(x, q, scale, b, None, low_rank)
        expected = exact(plain, x, low_rank)
        # the product is rounded like the output, the inner product once
        unit = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float32: 1e-5}[dtype]
        assert y.dtype == dtype and y.shape == (1, m, N)
        assert (y.double() - expected).abs().max() <= unit * expected.abs().max()


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 3, K), (1, 2, 1, 3, K)], ids=str)
def test_keeps_the_leading_dimensions(shape, impl, device):
    q, scale, b = layer(device)
    prepared, low_rank = PreparedLinear(q, scale, implementation=impl), stack(device, torch.float16)
    x = rows(shape, device, torch.float16)
    y, _ = prepared.with_rows(x, q, scale, b, None, low_rank)
    assert y.shape == (*shape[:-1], N) and y.is_contiguous()


def test_zero_factors_change_no_bit(impl, device):
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation=impl)
    for dtype in (torch.float16, torch.float32):
        x = rows((7, K), device, dtype)
        nothing = LowRank(
            torch.zeros((32, K), device=device, dtype=dtype), torch.zeros((N, 32), device=device, dtype=dtype)
        )
        for _ in range(2):
            assert_same(prepared.with_rows(x, q, scale, b, None, nothing)[0], prepared(x, q, scale, b), "y")


def test_layers_that_share_rows_add_their_own(impl, device):
    q, scale, b = layer(device, 64)
    one = PreparedLinear(q, scale, rotation_group=64, implementation=impl)
    two = PreparedLinear(q[:48].contiguous(), scale[:48].contiguous(), rotation_group=64, implementation=impl)
    first, second = stack(device, torch.float16), stack(device, torch.float16, 64, 48)
    for _ in range(3):
        x = rows((9, K), device, torch.float16)
        y, kept = one.with_rows(x, q, scale, b, None, first)
        z, _ = two.with_rows(x, q[:48].contiguous(), scale[:48].contiguous(), None, kept, second)
        assert_same(y, one.with_rows(x, q, scale, b, None, first)[0], "y")
        alone = two.with_rows(x, q[:48].contiguous(), scale[:48].contiguous(), None, None, second)[0]
        assert_same(z, alone, "z")


def test_strided_rows_and_other_dtypes_take_the_pair_of_products(impl, device):
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation=impl)
    wide = rows((6, 2 * K), device, torch.float16)
    low_rank = stack(device, torch.bfloat16)
    assert not fits_epilogue(low_rank, wide)
    for x in (wide[:, :K], wide[:, ::2], wide[:, :K].contiguous()):
        for factors in (low_rank, stack(device, torch.float16)):
            y, _ = prepared.with_rows(x, q, scale, b, None, factors)
            expected = exact(prepared(x.float(), q, scale, b), x, LowRank(*(f.to(x.dtype) for f in factors)))
            assert (y.double() - expected).abs().max() <= 4e-3 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("layer_name", ["qkv", "w2"])
@pytest.mark.parametrize("rank", [32, 192])
def test_real_layers_on_the_gpu(layer_name, rank, device):
    k, n = IDEOGRAM4[layer_name]
    q, scale = quantize_rows(torch.randn((n, k), generator=generator(1, str(device)), device=device))
    prepared = PreparedLinear(q, scale, implementation="triton")
    down = torch.randn((rank, k), generator=generator(2, str(device)), device=device) * k**-0.5
    up = torch.randn((n, rank), generator=generator(3, str(device)), device=device)
    low_rank = LowRank(down.bfloat16(), up.bfloat16())
    for m in (1, 17, 130, 1000, 4352, 4352):
        x = rows((m, k), device, torch.bfloat16)
        expected = exact(prepared(x.float(), q, scale), x, low_rank)
        y = prepared.with_rows(x, q, scale, None, None, low_rank)[0]
        # rounding to bf16 is at most 2**-9 of each value; sums of another order may round the inner product otherwise
        assert (y.double() - expected).abs().max() <= 2**-7 * expected.abs().max()
        assert (y.double() - expected).norm() <= 3e-3 * expected.norm()


def test_add_low_rank_leaves_gradients_and_strides_alone():
    x, y = torch.randn(5, 8, requires_grad=True), torch.randn(6, 5).t()
    low_rank = LowRank(torch.randn(4, 8), torch.randn(6, 4))
    expected = y + x @ low_rank.down.T @ low_rank.up.T
    got = add_low_rank(y, x, low_rank)
    assert torch.allclose(got, expected, atol=1e-5) and got.requires_grad
    for leading in ((), (0,), (2, 0, 3)):
        x, y = torch.randn((*leading, 8)), torch.zeros((*leading, 6))
        assert torch.allclose(add_low_rank(y, x, low_rank), x @ low_rank.down.T @ low_rank.up.T, atol=1e-5)
