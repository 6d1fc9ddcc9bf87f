"""quantize_rows against the reference: codes, scales, bad rows, strides, activation and rotation."""

import importlib

import pytest
import torch
from native_int8.kernels import UnsupportedInput, quantize_rows, reference
from packtest.checks import assert_close, assert_codes_within_one, assert_same
from packtest.shapes import activation

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
WIDTHS = [1, 7, 15, 16, 17, 33, 63, 127, 129, 256, 1000, 4608]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("k", WIDTHS)
def test_equals_the_reference(k, dtype, impl, device):
    x = activation(5, k, dtype, device)
    q, scale = quantize_rows(x, implementation=impl)
    expected_q, expected_scale = reference.quantize_rows(x)
    assert_same(scale, expected_scale, "scale")
    assert_same(q, expected_q, "codes")


@pytest.mark.parametrize("rows", [0, 1, 2, 7])
def test_any_number_of_rows(rows, impl, device):
    x = activation(rows, 48, torch.bfloat16, device)
    q, scale = quantize_rows(x, implementation=impl)
    assert q.shape == (rows, 48) and scale.shape == (rows, 1)
    assert_same(q, reference.quantize_rows(x)[0], "codes")


@pytest.mark.fault("B95")
def test_halves_round_to_even(impl, device):
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, -126.5, 3.4999]], device=device)
    q, scale = quantize_rows(halves, implementation=impl)
    assert q.cpu().tolist() == [[127, 0, 2, 2, 0, -2, -2, 126, -126, 3]]
    assert scale.item() == 1.0


@pytest.mark.fault("B88")
def test_zero_row_gives_a_tiny_scale_and_zero_codes(impl, device):
    x = torch.zeros((3, 40), device=device, dtype=torch.float16)
    q, scale = quantize_rows(x, implementation=impl)
    assert q.abs().max().item() == 0
    assert_close(scale, torch.full((3, 1), 1e-30), 1e-6, "scale")


@pytest.mark.parametrize("value", [1e-40, 1e-29, 6e-8, 65504.0, 3e38])
@pytest.mark.fault("B88")
def test_extreme_magnitudes(value, impl, device):
    x = torch.full((2, 33), value, device=device)
    q, scale = quantize_rows(x, implementation=impl)
    assert_same(q, reference.quantize_rows(x)[0], "codes")
    assert_same(scale, reference.quantize_rows(x)[1], "scale")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("group", [0, 16])
@pytest.mark.fault("B89")
def test_bad_row_is_nan_and_leaves_the_others_alone(bad, group, impl, device):
    x = activation(6, 272, torch.float32, device)
    clean_q, clean_scale = quantize_rows(x, rotation_group=group, implementation=impl)
    x[2, 9] = bad
    q, scale = quantize_rows(x, rotation_group=group, implementation=impl)
    assert torch.isnan(scale[2]).all()
    others = [0, 1, 3, 4, 5]
    assert_same(q[others], clean_q[others], "codes of other rows")
    assert_same(scale[others], clean_scale[others], "scales of other rows")


@pytest.mark.parametrize("act", ["gelu_tanh", "swiglu"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activation_is_applied_before_quantising(act, dtype, impl, device):
    x = activation(5, 2 * 96 if act == "swiglu" else 96, dtype, device) * 0.1
    q, scale = quantize_rows(x, input_act=act, implementation=impl)
    expected_q, expected_scale = reference.quantize_rows(reference.input_act(x, act))
    assert q.shape == (5, 96)
    assert_close(scale, expected_scale, 1e-5, "scale")
    assert_codes_within_one(q, expected_q, 0.01, "codes")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("k", "group"), [(16, 4), (48, 16), (64, 64), (320, 64), (256, 256), (768, 256), (1024, 1024), (4608, 256)]
)
def test_rotation_is_applied_before_quantising(k, group, dtype, impl, device):
    x = activation(4, k, dtype, device)
    q, scale = quantize_rows(x, rotation_group=group, implementation=impl)
    expected_q, expected_scale = reference.quantize_rows(reference.rotate(x, group))
    assert_close(scale, expected_scale, 3e-5, "scale")
    assert_codes_within_one(q, expected_q, 0.01, "codes")


@pytest.mark.fault("B82", "B83", "B85", "B86")
def test_views_equal_their_contiguous_copies(impl, device):
    base = activation(24, 130, torch.float16, device)
    views = {
        "every other column": base[:, ::2],
        "odd offset": base[:, 1:66],
        "transposed": base.t(),
        "expanded": base[:1].expand(6, 130),
        "permuted 4-D": base[:, :128].reshape(2, 3, 4, 128).permute(0, 2, 1, 3),
        "1-D": base[3],
        "5-D": base.reshape(2, 2, 3, 2, 130),
        "size-1 stride": torch.as_strided(base, (1, 130), (0, 1)),
    }
    for name, view in views.items():
        q, scale = quantize_rows(view, implementation=impl)
        expected_q, expected_scale = reference.quantize_rows(view.contiguous())
        assert_same(q, expected_q, name)
        assert_same(scale, expected_scale, name)


def test_reads_nothing_past_the_row(impl, device):
    dirty = torch.full((4, 96), 1e6, device=device)
    dirty[:, 8:41] = activation(4, 33, torch.float32, device)
    q, _ = quantize_rows(dirty[:, 8:41], implementation=impl)
    assert_same(q, reference.quantize_rows(dirty[:, 8:41])[0], "codes")


@pytest.mark.parametrize(
    ("x", "options", "words"),
    [
        (torch.zeros(2, 8, dtype=torch.int32), {}, "Needed: float16"),
        (torch.zeros(2, 8, dtype=torch.float64), {}, "Needed: float16"),
        (torch.zeros(()), {}, "at least one"),
        (torch.zeros(2, 8), {"rotation_group": 16}, "group 16 on 8 columns"),
        (torch.zeros(2, 128), {"rotation_group": 128}, "group 128"),
        (torch.zeros(2, 9), {"input_act": "swiglu"}, "an even number"),
        (torch.zeros(2, 8), {"input_act": "relu"}, "'relu'"),
    ],
)
def test_bad_input_is_refused_with_a_sentence(x, options, words):
    with pytest.raises(UnsupportedInput, match=words):
        quantize_rows(x, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("act", [None, "swiglu"])
@pytest.mark.parametrize("group", [0, 16, 256])
def test_pieces_of_rows_equal_rows_alone_and_the_input_stays(group, act, dtype, monkeypatch):
    module = importlib.import_module("native_int8.kernels.quantize_rows")
    # of two rows each, and a shorter last one
    monkeypatch.setattr(module, "CPU_CHUNK_BYTES_PER_THREAD", 2 * 4 * 512 // torch.get_num_threads())
    x = activation(7, 1024 if act else 512, dtype, torch.device("cpu"))
    before = x.clone()
    q, scale = quantize_rows(x, rotation_group=group, input_act=act, implementation="torch")
    assert_same(x, before, "input")
    for row in range(7):
        one = quantize_rows(x[row], rotation_group=group, input_act=act, implementation="torch")
        assert_same(q[row], one[0], "codes")
        assert_same(scale[row], one[1], "scale")
