"""int8_linear: the whole Linear against a float one, for every kind of input, and as a torch.library op."""

import pytest
import torch
import torch._dynamo.testing
from native_int8.kernels import (
    NoImplementation,
    UnsupportedInput,
    choose,
    detect,
    device_from,
    int8_linear,
    quantize_rows,
    reference,
    rotate,
)
from native_int8.kernels.compiled import interpreted
from packtest.checks import assert_close, assert_rounded_once, assert_same, sqnr_db
from packtest.shapes import activation, generator

DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def layer(k, n, device, group=0, bias=True):
    """A float weight [n, k] with its int8 codes, scales and bias."""
    w = torch.randn((n, k), generator=generator(7, str(device)), device=device) / k**0.5
    q, scale = quantize_rows(w, rotation_group=group, implementation="torch")
    return w, q, scale, torch.randn((n,), generator=generator(8, str(device)), device=device) if bias else None


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_is_quantise_then_multiply_rounded_once(dtype, bias, impl, device):
    x = activation(21, 144, dtype, device)
    _, q, scale, b = layer(144, 56, device, bias=bias)
    expected = reference.int8_matmul(*reference.quantize_rows(x), q, scale, b, dtype)
    assert_rounded_once(int8_linear(x, q, scale, b, implementation=impl), expected, interpreted(), "y")


@pytest.mark.parametrize("group", [0, 4, 16, 64, 256])
def test_is_close_to_the_float_linear(group, impl, device):
    w, q, scale, b = layer(512, 96, device, group)
    x = torch.randn((40, 512), generator=generator(3, str(device)), device=device)
    y = int8_linear(x, q, scale, b, rotation_group=group, implementation=impl)
    assert sqnr_db(y, torch.nn.functional.linear(x.double(), w.double(), b.double())) > 36


@pytest.mark.fault("B98")
def test_rotation_saves_a_layer_with_outlier_channels(impl, device):
    w, q, scale, b = layer(512, 96, device)
    _, q_rotated, scale_rotated, _ = layer(512, 96, device, group=256)
    x = activation(40, 512, torch.float32, device)
    exact = torch.nn.functional.linear(x.double(), w.double(), b.double())
    plain = sqnr_db(int8_linear(x, q, scale, b, implementation=impl), exact)
    rotated = sqnr_db(int8_linear(x, q_rotated, scale_rotated, b, rotation_group=256, implementation=impl), exact)
    mismatched = sqnr_db(int8_linear(x, q_rotated, scale_rotated, b, implementation=impl), exact)
    assert rotated > plain + 2
    assert mismatched < 3


@pytest.mark.parametrize(
    "shape", [(64,), (1, 64), (0, 64), (2, 3, 64), (2, 0, 64), (2, 3, 2, 64), (1, 2, 3, 2, 64)], ids=str
)
@pytest.mark.fault("B86")
def test_keeps_the_leading_dimensions(shape, impl, device):
    _, q, scale, b = layer(64, 24, device)
    x = torch.randn(shape, generator=generator(4, str(device)), device=device)
    y = int8_linear(x, q, scale, b, implementation=impl)
    assert y.shape == (*shape[:-1], 24) and y.is_contiguous()
    flat = int8_linear(x.reshape(-1, 64), q, scale, b, implementation=impl)
    assert_same(y.reshape(-1, 24), flat, "y")


@pytest.mark.parametrize("x_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", [*DTYPES, None], ids=str)
@pytest.mark.parametrize("rows", [4, 64])
@pytest.mark.fault("B99")
def test_output_dtype_is_the_inputs_whatever_the_bias(x_dtype, bias_dtype, rows, impl, device):
    _, q, scale, b = layer(64, 24, device)
    bias = None if bias_dtype is None else b.to(bias_dtype)
    y = int8_linear(activation(rows, 64, x_dtype, device), q, scale, bias, implementation=impl)
    assert y.dtype == x_dtype and bool(torch.isfinite(y).all())


def test_out_dtype_can_be_asked_for(impl, device):
    _, q, scale, b = layer(64, 24, device)
    y = int8_linear(
        activation(5, 64, torch.bfloat16, device), q, scale, b, out_dtype=torch.float32, implementation=impl
    )
    assert y.dtype == torch.float32


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.fault("B89")
def test_a_bad_row_is_nan_and_the_others_keep_their_bits(bad, impl, device):
    _, q, scale, b = layer(80, 32, device)
    x = activation(20, 80, torch.float16, device)
    clean = int8_linear(x, q, scale, b, implementation=impl)
    x[11, 3] = bad
    y = int8_linear(x, q, scale, b, implementation=impl)
    assert torch.isnan(y[11]).all()
    rest = [row for row in range(20) if row != 11]
    assert_same(y[rest], clean[rest], "other rows")


def test_swiglu_reads_gate_and_up(impl, device):
    w, q, scale, b = layer(96, 32, device)
    x = torch.randn((9, 192), generator=generator(5, str(device)), device=device)
    exact = torch.nn.functional.linear(reference.input_act(x, "swiglu"), w.double().cpu(), b.double().cpu())
    assert sqnr_db(int8_linear(x, q, scale, b, input_act="swiglu", implementation=impl), exact) > 36


def test_transposed_weight_storage_is_accepted(impl, device):
    _, q, scale, b = layer(64, 64, device)
    x = activation(5, 64, torch.float32, device)
    stored = q.t().contiguous().t()
    assert_same(
        int8_linear(x, stored, scale, b, implementation=impl), int8_linear(x, q, scale, b, implementation=impl), "y"
    )


def test_gradient_is_refused(device):
    _, q, scale, b = layer(64, 24, device)
    x = torch.randn((4, 64), device=device, requires_grad=True)
    with pytest.raises(UnsupportedInput, match="requires a gradient"):
        int8_linear(x, q, scale, b)
    with torch.no_grad():
        assert int8_linear(x, q, scale, b).shape == (4, 24)


def test_rotation_group_must_divide_the_input(device):
    _, q, scale, b = layer(96, 24, device)
    with pytest.raises(UnsupportedInput, match="rotation group 64 does not fit in_features 96"):
        int8_linear(activation(4, 96, torch.float32, device), q, scale, b, rotation_group=64)


def test_weight_rotation_is_its_own_inverse_so_a_lora_can_be_added(device):
    w, q, scale, _ = layer(256, 32, device, group=64)
    assert_close(rotate(q.float() * scale, 64), w, 0.01, "unrotated weight")


def test_choice_names_every_reason():
    turing = device_from(name="NVIDIA GeForce RTX 2080", compute_capability=(7, 5), triton="3.6.0")
    chosen = choose(turing, in_features=4608, out_features=4608)
    assert chosen.implementation == "torch"
    assert "8.0" in dict(chosen.declined)["triton"]
    with pytest.raises(NoImplementation, match=r"sm_75.*8\.0"):
        choose(turing, in_features=64, out_features=64, implementation="triton")
    with pytest.raises(NoImplementation, match="no 'cutlass'"):
        choose(turing, in_features=64, out_features=64, implementation="cutlass")


def test_ampere_uses_triton_when_it_is_there():
    card = {"name": "NVIDIA GeForce RTX 3090", "compute_capability": (8, 6)}
    assert choose(device_from(**card, triton="3.6.0"), in_features=64, out_features=64).implementation == "triton"
    without = choose(
        device_from(**card, triton=None, triton_missing="No module named 'triton'"), in_features=64, out_features=64
    )
    assert without.implementation == "torch"
    assert "No module named" in without.sentence()


@pytest.mark.fault("B135")
def test_opcheck(device):
    _, q, scale, b = layer(64, 24, device)
    op = torch.ops.native_int8.int8_linear.default
    for x in (
        activation(6, 64, torch.float16, device),
        activation(6, 128, torch.float32, device)[:, ::2],
        torch.zeros(2, 3, 64),
    ):
        x = x.to(device)
        torch.library.opcheck(
            op, (x, q, scale, b, 0, None, x.dtype, None), test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.fault("B138")
def test_compile_has_one_graph_and_no_recompile_for_new_sizes(device):
    _, q, scale, b = layer(64, 64, device)

    def block(x):
        return int8_linear(torch.nn.functional.silu(int8_linear(x, q, scale, b)), q, scale, b) + x

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)
    for rows in (77, 154, 231, 300):
        x = torch.randn((1, rows, 64), device=device)
        assert_same(compiled(x), block(x), f"{rows} rows")
    assert counter.frame_count == 1


def test_device_of_this_machine_has_an_implementation(device):
    assert choose(detect(device), in_features=64, out_features=64).implementation in ("triton", "torch")
