"""quantize_swiglu and quantize_gelu against PyTorch's own operations, called one after the other and then joined."""

import pytest
import torch
from native_int8.kernels import UnsupportedInput, quantize_gelu, quantize_rows, quantize_swiglu, reference
from native_int8.kernels.packed_rows import parts_of
from packtest.checks import assert_close, assert_codes_within_one, assert_same
from packtest.shapes import activation

ROWS = 5
# columns that come before, the activation's columns, rotation
WIDTHS = [
    (0, 1, 0),
    (0, 33, 0),
    (0, 320, 64),
    (0, 12288, 256),
    (16, 48, 0),
    (128, 384, 256),
    (33, 7, 0),
    (768, 3072, 256),
]

TWO_TENSORS = [
    (1, 0), (33, 0), (256, 0), (320, 64), (768, 256), (4608, 0), (4608, 256), (5120, 1024), (12288, 0), (12288, 256)
]  # fmt: skip


def operands(before, k, gated, dtype, device):
    """What comes before or None, and gate and up as halves of one tensor, as columns of a wider dirty buffer."""
    made = activation(ROWS, 2 * k + 16, dtype, device, seed=1) * 0.2
    made[:, :8] = made[:, -8:] = float("nan")
    columns = made[:, 8:-8]
    first = activation(ROWS, before, dtype, device) if before else None
    return first, columns[:, :k], columns[:, k:] if gated else None


def call(first, gate, up, **options):
    if up is None:
        return quantize_gelu(gate, before=first, **options)
    return quantize_swiglu(gate, up, before=first, **options)


def expected_values(first, gate, up, dtype):
    """Each operation of PyTorch in `dtype`."""
    gate = gate.to(dtype)
    if up is None:
        v = torch.nn.functional.gelu(gate, approximate="tanh")
    else:
        v = torch.nn.functional.silu(gate) * up.to(dtype)
    return v if first is None else torch.cat((first.to(dtype), v), -1)


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize(("before", "k", "group"), WIDTHS)
def test_means_activation_and_quantise(before, k, group, gated, impl, device):
    parts = operands(before, k, gated, torch.float32, device)
    q, scale = parts_of(call(*parts, rotation_group=group, implementation=impl), ROWS, before + k)
    values = expected_values(*parts, torch.float64).cpu()
    expected_q, expected_scale = reference.quantize_rows(reference.rotate(values, group) if group else values)
    assert_close(scale, expected_scale.view(-1), 1e-5, "scale")
    assert_codes_within_one(q, expected_q, 0.01, "codes")


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("before", "k", "group"), [(0, 320, 0), (128, 384, 256), (768, 3072, 0)])
def test_rounds_where_pytorch_rounds(before, k, group, dtype, gated, impl, device):
    parts = operands(before, k, gated, dtype, device)
    check_rounding(parts, group, impl, device)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "group"), TWO_TENSORS)
def test_two_tensors(k, group, dtype, impl, device):
    gate, up = activation(ROWS, k, dtype, device) * 0.2, activation(ROWS, k, dtype, device, seed=1)
    check_rounding((None, gate, up), group, impl, device)


def check_rounding(parts, group, impl, device):
    dtype, columns = parts[1].dtype, sum(t.shape[-1] for t in parts[:2] if t is not None)
    kept = torch.full((ROWS, columns), torch.nan, dtype=dtype, device=device)
    q, scale = parts_of(call(*parts, rotation_group=group, kept=kept, implementation=impl), ROWS, columns)
    values = expected_values(*parts, dtype)
    expected_q, expected_scale = quantize_rows(values, rotation_group=group, implementation=impl)
    again = parts_of(call(*parts, rotation_group=group, implementation=impl), ROWS, columns)[0]
    assert_same(q, again, "codes without what is kept")
    if device.type == "cpu" and impl == "triton":
        # the interpreter truncates to bfloat16, and its exponential is another
        assert_close(scale, expected_scale.view(-1), 0.02 if dtype == torch.bfloat16 else 1e-3, "scale")
        assert_codes_within_one(q, expected_q, 1.0 if dtype == torch.bfloat16 else 0.02, "codes")
        assert_close(kept, values, 0.02 if dtype == torch.bfloat16 else 1e-3, "kept")
        return
    assert_same(kept, values, "kept")
    assert_same(q, expected_q, "codes")
    assert_same(scale, expected_scale.view(-1), "scale")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("k", "group"), [(33, 0), (320, 64)])
def test_an_unrounded_gelu_is_that_of_the_linear(k, group, dtype, impl, device):
    _, x, _ = operands(0, k, False, dtype, device)
    kept = torch.full(x.shape, torch.nan, dtype=dtype, device=device)
    options = {"rotation_group": group, "implementation": impl}
    rows = parts_of(quantize_gelu(x, rounded=False, kept=kept, **options), ROWS, k)
    expected = quantize_rows(x, input_act="gelu_tanh", **options)
    for part, value in zip(rows, expected, strict=True):
        assert_same(part, value.view(part.shape), "rows")
    assert_same(kept, torch.nn.functional.gelu(x, approximate="tanh"), "kept")


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
def test_rows_of_images_are_read_in_place(gated, impl, device):
    first, gate, up = (
        None if t is None else t[:4].unflatten(0, (2, 2)) for t in operands(16, 48, gated, torch.float32, device)
    )
    got = parts_of(call(first, gate, up, implementation=impl), 4, 64)
    flat = [None if t is None else t.reshape(4, -1) for t in (first, gate, up)]
    for part, expected in zip(got, parts_of(call(*flat, implementation=impl), 4, 64), strict=True):
        assert_same(part, expected, "rows")


@pytest.mark.parametrize("gated", [True, False], ids=["swiglu", "gelu"])
def test_a_zero_row_and_a_bad_row_stay_alone(gated, impl, device):
    first, gate, up = operands(16, 48, gated, torch.float32, device)
    gate, first = gate.clone(), first.clone()
    up = None if up is None else up.clone()
    gate[1] = first[1] = 0
    first[2, 5] = gate[3, 7] = float("inf")
    _, scale = parts_of(call(first, gate, up, implementation=impl), ROWS, 64)
    assert scale[1] < 1e-29 and torch.isnan(scale[[2, 3]]).all() and torch.isfinite(scale[[0, 4]]).all()


def test_no_rows(impl, device):
    x = torch.empty((2, 0, 64), dtype=torch.float16, device=device)
    q, scale = parts_of(quantize_gelu(x, before=x, implementation=impl), 0, 128)
    assert q.shape == (0, 128) and scale.numel() == 0


def test_what_does_not_fit_is_refused():
    x = torch.ones((6, 32))
    spaced = torch.ones((2, 6, 32))[:, :3]
    for arguments, keywords in (
        ((x.half(), x), {}), ((x, x[:, :16]), {}), ((x.t(), x.t()), {}), ((spaced, spaced), {}), ((x.long(), x.long()), {}),
        ((x, torch.ones((6, 64))[:, :32]), {}), ((x, x), {"before": x[:3]}), ((x, x), {"before": torch.ones((6, 64))[:, :32]}),
    ):  # fmt: skip
        with pytest.raises(UnsupportedInput, match="rows evenly spaced"):
            quantize_swiglu(*arguments, **keywords)
    with pytest.raises(UnsupportedInput, match="rows evenly spaced"):
        quantize_gelu(torch.tensor(1.0))
    with pytest.raises(UnsupportedInput, match="kept is"):
        quantize_gelu(x, kept=x.half())
    with pytest.raises(UnsupportedInput):
        quantize_gelu(x, before=x[:, :16].contiguous(), rotation_group=64)
    with pytest.raises(UnsupportedInput, match="rounded is False"):
        quantize_gelu(x, before=x, rounded=False)
