"""residual_norm against PyTorch's own operations, called one after the other."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from native_int8.kernels import (
    Branch,
    Norm,
    PreparedLinear,
    UnsupportedInput,
    quantize_rows,
    reference,
    residual_norm,
)
from native_int8.kernels.packed_rows import empty_rows, parts_of
from native_int8.kernels.residual_norm_triton import moments
from packtest.checks import assert_close, assert_codes_within_one, assert_same
from packtest.shapes import activation, generator

EPS = 1e-5
WIDTHS = [(1, 0), (33, 0), (256, 0), (320, 64), (768, 256), (4608, 0), (4608, 256), (5120, 1024)]
HALVES = {"begin": (False, True), "both": (True, True), "end": (True, False)}
# what a block has beside y, gate and scale
KINDS = (
    "sandwich",
    "plain branch and shift",
    "layer norm in one rounding",
    "gate in two roundings, layer norm",
    "no gate, affine layer norm",
)


def normal(*shape, seed, dtype, device):
    return torch.randn(shape, generator=generator(seed, str(device)), device=device).to(dtype)


def operands(m, k, images, dtype, device):
    """x, the branch and the norm: rows of an activation, norm weights around 1, modulation as a Linear gives it."""
    x, y = activation(m, k, dtype, device), activation(m, k, dtype, device, seed=1)
    modulation = normal(images, 4, k, seed=2, dtype=dtype, device=device)
    weights = 1 + 0.2 * normal(2, k, seed=3, dtype=dtype, device=device)
    # slices of one modulation, as they come
    return x, Branch(y, weights[0], EPS, torch.tanh(modulation[:, 1])), Norm(weights[1], EPS, modulation[:, 2])


def as_kind(kind, branch, norm):
    """The operands as blocks have them."""
    weight, shift = norm.weight, norm.scale * 0.5
    if kind == "sandwich":
        return branch, norm
    branch = branch._replace(weight=None)
    if kind == "plain branch and shift":
        return branch, norm._replace(weight=weight.float(), shift=shift)
    if kind == "layer norm in one rounding":
        norm = norm._replace(weight=None, shift=shift, centred=True, one_rounding=True)
        return branch._replace(one_rounding=True), norm
    if kind == "gate in two roundings, layer norm":
        return branch, norm._replace(weight=None, shift=shift, centred=True)
    return branch._replace(gate=None), Norm(weight, EPS, None, bias=(weight - 1) * 3, centred=True)


def in_float64(x, branch, norm):
    """What the op means, without any rounding."""

    def normed(v, weight, eps, centred=False):
        v = v.double().cpu()
        v = v - v.mean(-1, keepdim=True) if centred else v
        v = v / (v.square().mean(-1, keepdim=True) + eps).sqrt()
        return v if weight is None else v * weight.double().cpu()

    def by_image(vector):
        return vector.double().cpu().repeat_interleave(len(x) // len(vector), 0)

    out = x.double().cpu()
    if branch is not None:
        y = branch.y.double().cpu() if branch.weight is None else normed(branch.y, branch.weight, branch.eps)
        out = out + (y if branch.gate is None else by_image(branch.gate) * y)
    if norm is None:
        return out, None
    v = normed(out, norm.weight, norm.eps, norm.centred)
    v = v if norm.bias is None else v + norm.bias.double().cpu()
    v = v if norm.scale is None else v * (1 + by_image(norm.scale))
    return out, v if norm.shift is None else v + by_image(norm.shift)


def as_pytorch(x, branch, norm):
    """The operations of a block in PyTorch, one after the other: x', and what is quantised of it."""
    y, functional = branch.y, torch.nn.functional

    def by_image(vector):
        return vector.repeat_interleave(len(x) // len(vector), 0)

    if branch.weight is not None:
        y = functional.rms_norm(y, y.shape[1:], branch.weight, EPS)
    if branch.gate is not None:
        gate = by_image(branch.gate)
        out = torch.addcmul(x, y, gate) if branch.one_rounding else x + gate * y
    else:
        out = x + y
    if norm.centred:
        v = functional.layer_norm(out, out.shape[1:], norm.weight, norm.bias, EPS)
    else:
        v = functional.rms_norm(out.to(norm.weight.dtype), out.shape[1:], norm.weight, EPS).to(x.dtype)
    if norm.one_rounding:
        return out, torch.addcmul(by_image(norm.shift), v, 1 + by_image(norm.scale))
    v = v if norm.scale is None else v * (1.0 + by_image(norm.scale))
    return out, v if norm.shift is None else v + by_image(norm.shift)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("k", "group"), WIDTHS)
def test_means_norm_gate_norm_and_quantise(k, group, half, kind, impl, device):
    x, *parts = operands(6, k, 3, torch.float32, device)
    branch, norm = as_kind(kind, *parts)
    branch, norm = (part if there else None for part, there in zip((branch, norm), HALVES[half], strict=True))
    # a mean that is not near zero
    x += 2
    out, rows = residual_norm(x, branch, norm, rotation_group=group, implementation=impl)
    expected, normed = in_float64(x, branch, norm)
    assert_close(out, expected, 1e-6, "x")
    if norm is None:
        assert rows is None
        return
    q, scale = parts_of(rows, 6, k)
    expected_q, expected_scale = reference.quantize_rows(reference.rotate(normed, group) if group else normed)
    assert_close(scale, expected_scale.view(-1), 1e-5, "scale")
    assert_codes_within_one(q, expected_q, 0.01, "codes")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("images", [1, 2, 6])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("group", [0, 256])
def test_rounds_where_pytorch_rounds(group, dtype, images, kind, impl, device):
    """Step by step in the dtype of x: on a GPU equal to the bit, the order of the sum of squares included."""
    k, m = 4608, 6
    x, *parts = operands(m, k, images, dtype, device)
    branch, norm = as_kind(kind, *parts)
    kept = torch.full_like(x, torch.nan)
    out, rows = residual_norm(x, branch, norm, rotation_group=group, kept=kept, implementation=impl)
    expected, normed = as_pytorch(x, branch, norm)
    q, row_scale = parts_of(rows, m, k)
    expected_q, expected_scale = quantize_rows(normed, rotation_group=group, implementation=impl)
    again = residual_norm(x, branch, norm, rotation_group=group, implementation=impl)
    assert_same(out, again[0], "x without what is kept")
    assert_same(q, parts_of(again[1], m, k)[0], "codes without what is kept")
    if impl == "triton" and device.type == "cpu":
        # the interpreter truncates to bfloat16 and adds in an order of its own
        assert_close(out, expected, 0.02 if dtype == torch.bfloat16 else 1e-4, "x")
        assert_close(kept, normed, 0.02 if dtype == torch.bfloat16 else 1e-3, "kept")
        assert_close(row_scale, expected_scale.view(-1), 0.02 if dtype == torch.bfloat16 else 1e-3, "scale")
        return
    assert_same(out, expected, "x")
    assert_same(kept, normed, "kept")
    assert_same(q, expected_q, "codes")
    assert_same(row_scale, expected_scale.view(-1), "scale")


@triton.jit
def _moments_kernel(x_ptr, mean_ptr, inverse_ptr, K: tl.constexpr):
    row = tl.program_id(0)
    mean, inverse = moments(x_ptr + row * K, 1e-5, K)
    tl.store(mean_ptr + row, mean)
    tl.store(inverse_ptr + row, inverse)


def welford_of_128_threads(x, multiply_add):
    """Mean and variance of each row of x [M, K], added up as PyTorch's CUDA kernel does; K a multiple of 512."""
    vectors = x.reshape(len(x), -1, 128, 4)
    one = np.float32(1)
    mean, spread, count = (np.zeros((len(x), 128), np.float32) for _ in range(3))
    for part in range(vectors.shape[1]):
        for value in range(4):
            v = vectors[:, part, :, value]
            delta, count = v - mean, count + one
            mean = multiply_add(delta, one / count, mean)
            spread = multiply_add(delta, v - mean, spread)
    # a warp's lanes in halves, then the four warps in halves
    mean, spread, count = (a.reshape(-1, 4, 32) for a in (mean, spread, count))
    for axis, width in ((2, 16), (2, 8), (2, 4), (2, 2), (2, 1), (1, 2), (1, 1)):
        (own, other), (own_spread, other_spread), (own_count, other_count) = (
            np.split(a.take(range(2 * width), axis), 2, axis) for a in (mean, spread, count)
        )
        delta, count = own - other, own_count + other_count
        share = one / count
        mean = multiply_add(other, other_count * share, own * (own_count * share))
        spread = multiply_add(delta * delta * other_count, own_count * share, own_spread + other_spread)
    return mean.ravel(), spread.ravel() / np.float32(x.shape[1])


@pytest.mark.parametrize("k", [512, 1536, 3072, 5120])
def test_mean_and_variance_are_taken_in_pytorch_s_order(k, device):
    x = activation(4, k, torch.float32, device) + 0.5
    got, inverse = (torch.empty(4, device=device) for _ in range(2))
    _moments_kernel[(4,)](x, got, inverse, k, num_warps=4)

    def fused(a, b, c):
        return (a.astype(np.float64) * b + c).astype(np.float32)

    # the interpreter rounds products, too
    mean, variance = welford_of_128_threads(
        x.cpu().numpy(), fused if device.type == "cuda" else lambda a, b, c: a * b + c
    )
    assert_same(got, torch.from_numpy(mean), "mean")
    assert_close(inverse, torch.from_numpy(1 / np.sqrt(variance + np.float32(1e-5))), 3e-7, "inverse")
    assert_close(inverse, 1 / (x.double().var(-1, correction=0) + 1e-5).sqrt(), 1e-6, "inverse")


def test_a_prepared_linear_takes_the_rows(impl, device):
    x, branch, norm = operands(7, 256, 1, torch.float32, device)
    codes, scale = quantize_rows(normal(48, 256, seed=5, dtype=torch.float32, device=device))
    prepared = PreparedLinear(codes, scale, implementation=impl)
    rows = residual_norm(x, branch, norm, implementation=impl)[1]
    got = prepared.with_rows(torch.full_like(x, float("nan")), codes, scale, None, rows)[0]
    q, row_scale = parts_of(rows, 7, 256)
    expected = reference.int8_matmul(q, row_scale.view(-1, 1), codes, scale, None, torch.float32)
    assert_close(got, expected, 1e-6, "y")


def test_a_zero_row_and_a_bad_row_stay_alone(impl, device):
    x, _, norm = operands(4, 48, 1, torch.float32, device)
    x[1] = 0
    x[2, 5] = float("inf")
    _, scale = parts_of(residual_norm(x, None, norm, implementation=impl)[1], 4, 48)
    assert scale[1] < 1e-29 and torch.isnan(scale[2]) and torch.isfinite(scale[[0, 3]]).all()


def test_no_rows(impl, device):
    x, branch, norm = operands(0, 64, 1, torch.float16, device)
    out, rows = residual_norm(x.view(2, 0, 64), branch._replace(y=x.view(2, 0, 64)), norm, implementation=impl)
    assert out.shape == (2, 0, 64)
    q, scale = parts_of(rows, 0, 64)
    assert q.shape == (0, 64) and scale.numel() == 0


def test_parts_are_where_they_were_made(device):
    for implementation in ("triton", "torch"):
        rows, q, scale = empty_rows(3, 33, device, implementation)
        q.fill_(1)
        scale.fill_(2.0)
        got_q, got_scale = parts_of(rows, 3, 33)
        assert_same(got_q, q, "codes")
        assert_same(got_scale, scale, "scales")


def test_what_does_not_fit_is_refused():
    x, branch, norm = operands(6, 32, 1, torch.float32, torch.device("cpu"))
    for part, words in (
        (norm._replace(scale=norm.scale[:, :8]), r"scale torch.float32 \(1, 8\)"),
        (norm._replace(scale=norm.scale.expand(4, 32)), "for 6 rows"),
        (norm._replace(weight=norm.weight.half()), "weight is torch.float16"),
        (norm._replace(weight=torch.ones(64)[::2]), "side by side"),
        (norm._replace(shift=norm.scale.expand(2, 32)), "Expand one"),
        (norm._replace(bias=norm.weight), "the norm has weight, eps, scale, bias"),
        (norm._replace(one_rounding=True), "scale, one_rounding. Needed"),
        (norm._replace(scale=None, shift=norm.scale), "a scale where it shifts"),
        (norm._replace(bias=norm.weight.half(), centred=True), "its bias torch.float16"),
    ):
        with pytest.raises(UnsupportedInput, match=words):
            residual_norm(x, None, part)
    with pytest.raises(UnsupportedInput, match=r"y is torch\.float32"):
        residual_norm(x, branch._replace(y=branch.y[:3]), None)
    with pytest.raises(UnsupportedInput, match="contiguous"):
        residual_norm(x.t(), None, norm)
    with pytest.raises(UnsupportedInput, match="kept is"):
        residual_norm(x, None, norm, kept=x[:3])
    with pytest.raises(UnsupportedInput):
        residual_norm(x, None, norm, rotation_group=64)
