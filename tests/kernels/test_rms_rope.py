"""rms_rope against its meaning in float64 and against PyTorch's operations, one after the other."""

import pytest
import torch
from native_int8.kernels import UnsupportedInput, rms_rope
from native_int8.kernels.rms_rope import rms_rope_torch
from packtest.checks import assert_close, assert_same
from packtest.shapes import generator

EPS = 1e-6
SHAPES = [(1, 3, 18, 18, 256), (2, 2, 7, 2, 64), (1, 1, 1, 13, 96), (2, 3, 24, 24, 128), (1, 2, 2, 2, 4)]


def operands(batch, length, heads, k_heads, dim, dtype, device, images=1):
    """q and k as slices of one qkv, rotation matrices of random angles, weights around 1."""
    g = generator(0, str(device))
    qkv = (torch.randn((batch, length, (heads + 2 * k_heads) * dim), generator=g, device=device) * 3).to(dtype)
    q, k, _ = qkv.split([heads * dim, k_heads * dim, k_heads * dim], -1)
    angle = torch.rand((images, length, dim // 2), generator=g, device=device) * 6
    freqs = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    weights = (1 + 0.3 * torch.randn((2, dim), generator=g, device=device)).to(dtype)
    return q.unflatten(-1, (heads, dim)), k.unflatten(-1, (k_heads, dim)), freqs.contiguous(), *weights


def meaning(x, freqs, weight, split_half):
    x, freqs = x.double().cpu(), freqs.double().cpu().unsqueeze(2)
    x = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double().cpu()
    first, second = x.chunk(2, -1) if split_half else (x[..., ::2], x[..., 1::2])
    out = [freqs[..., i, 0] * first + freqs[..., i, 1] * second for i in (0, 1)]
    return torch.cat(out, -1) if split_half else torch.stack(out, -1).flatten(-2)


@pytest.mark.parametrize("by_lane", [True, False])
@pytest.mark.parametrize("split_half", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_norms_and_rotates(shape, split_half, by_lane, impl, device):
    for images in {1, shape[0]}:
        q, k, freqs, *weights = operands(*shape, torch.float32, device, images)
        got = rms_rope(q, k, freqs, *weights, EPS, split_half=split_half, by_lane=by_lane, implementation=impl)
        for out, x, weight, name in zip(got, (q, k), weights, "qk", strict=True):
            assert out.is_contiguous() and out.shape == x.shape
            assert_close(out, meaning(x, freqs, weight, split_half), 1e-6, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("split_half", [True, False])
@pytest.mark.parametrize("shape", SHAPES[:2], ids=str)
def test_rounds_where_pytorch_rounds(shape, split_half, dtype, impl, device):
    """On a GPU equal to the bit, the order of the sum of squares included."""
    q, k, freqs, *weights = operands(*shape, dtype, device)
    got = rms_rope(q, k, freqs, *weights, EPS, split_half=split_half, implementation=impl)
    for out, x, weight, name in zip(got, (q, k), weights, "qk", strict=True):
        expected = rms_rope_torch(x, freqs, weight, EPS, split_half)
        if impl == "triton" and device.type == "cpu":
            # the interpreter truncates to bfloat16 and adds in an order of its own
            assert_close(out, expected, 0.02 if dtype == torch.bfloat16 else 1e-3, name)
        else:
            assert_same(out, expected, name)


@pytest.mark.parametrize("images", [1, 2])
@pytest.mark.parametrize("rotate_by_lane", [True, False])
def test_writes_into_parts_of_larger_tensors(rotate_by_lane, images, impl, device):
    """As two streams write into the q and k that they attend with, by parts of longer matrices."""
    q, k, freqs, *weights = operands(2, 5, 3, 2, 64, torch.float32, device, images)
    joint = torch.full((2, 5, 3, 64), -1.0, device=device), torch.full((2, 5, 2, 64), -1.0, device=device)
    for part in (slice(0, 2), slice(2, 5)):
        got = rms_rope(
            q[:, part], k[:, part], freqs[:, part], *weights, EPS, split_half=False, rotate_by_lane=rotate_by_lane,
            out=tuple(t[:, part] for t in joint), implementation=impl,
        )  # fmt: skip
        assert [t.data_ptr() for t in got] == [t[:, part].data_ptr() for t in joint]
    for out, x, weight, name in zip(joint, (q, k), weights, "qk", strict=True):
        assert_close(out, meaning(x, freqs, weight, False), 1e-6, name)


def test_products_are_rounded_to_the_matrices_type(impl, device):
    q, k, freqs, *weights = operands(1, 2, 2, 2, 64, torch.bfloat16, device)
    freqs = freqs.bfloat16()
    for by_lane in (False, True):
        got = rms_rope(q, k, freqs, *weights, EPS, split_half=False, rotate_by_lane=by_lane, implementation=impl)
        for out, x, weight, name in zip(got, (q, k), weights, "qk", strict=True):
            normed = torch.nn.functional.rms_norm(x, (64,), weight, EPS)
            pairs, rows = normed.unflatten(-1, (-1, 2)), freqs.unsqueeze(2)
            second, first = (pairs[..., [i]] * rows[..., i] for i in (1, 0))
            expected = torch.addcmul(second, pairs[..., [0]], rows[..., 0]).flatten(-2)
            if impl == "torch" or not by_lane:
                expected = torch.addcmul(first, pairs[..., [1]], rows[..., 1]).flatten(-2)
            if impl == "triton" and device.type == "cpu":
                # the interpreter truncates to bfloat16
                assert_close(out, expected, 0.04, name)
            else:
                assert_same(out, expected, name)


def test_what_does_not_fit_is_refused():
    q, k, freqs, *weights = operands(1, 3, 2, 2, 64, torch.float16, torch.device("cpu"))
    for wrong in (
        (q.float(), k, freqs, *weights),
        (q[:, :2], k, freqs, *weights),
        (q, k, freqs.bfloat16(), *weights),
        (q, k, freqs[:, :2], *weights),
        (q, k, freqs, weights[0][:8], weights[1]),
        (q.transpose(2, 3), k, freqs, *weights),
    ):
        with pytest.raises(UnsupportedInput, match="Needed: heads"):
            rms_rope(*wrong, EPS, split_half=True)
    for out in ((q, k.float()), (q, k[:, :2]), (q, k.transpose(2, 3))):
        with pytest.raises(UnsupportedInput, match="Needed: heads"):
            rms_rope(q, k, freqs, *weights, EPS, split_half=True, out=out)
