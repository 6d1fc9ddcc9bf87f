import json

import pytest
import torch
from native_int8.nodes.int8 import formats
from native_int8.nodes.int8.checkpoint import CheckpointError, header_of
from packtest.checkpoints import K, N, codes, floats, int8_layer, marker

LAYER = "blocks.0.attn.q"
NATIVE = {"format": "int8_tensorwise"}
ROW = torch.rand(N, 1) + 0.01


def detect(tensors: dict, metadata: dict | None = None) -> dict:
    header = header_of(tensors, metadata)
    return formats.detect(header, lambda name: tensors[header.key(name)])


def metadata_of(layers: dict) -> dict:
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def test_native_layer():
    spec = detect(int8_layer(LAYER, NATIVE, ROW))[LAYER]
    assert (spec.kind, spec.format, spec.shape, spec.per_row, spec.rotation_group) == (
        "int8", "int8_tensorwise", (N, K), True, 0,
    )  # fmt: skip


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_for_the_tensor(shape):
    assert detect(int8_layer(LAYER, NATIVE, torch.rand(shape)))[LAYER].per_row is False


@pytest.mark.parametrize("shape", [(N,), (N, 1), (1, N)], ids=str)
def test_one_scale_for_each_row(shape):
    assert detect(int8_layer(LAYER, NATIVE, torch.rand(shape)))[LAYER].per_row is True


@pytest.mark.parametrize("shape", [(2,), (N - 1,), (N + 1, 1), (0,), (K,), (N // 8, K // 8)], ids=str)
def test_another_number_of_scales_stops_with_both_counts(shape):
    with pytest.raises(CheckpointError) as caught:
        detect(int8_layer(LAYER, NATIVE, torch.ones(shape)))
    assert f"{LAYER}.weight_scale" in str(caught.value)
    assert f"{torch.Size(shape).numel()} scales" in str(caught.value) and str(N) in str(caught.value)


def test_a_scale_per_column_tells_that_the_weight_is_transposed():
    with pytest.raises(CheckpointError, match=r"stored as \[in, out\]"):
        detect(int8_layer(LAYER, NATIVE, torch.ones(K, 1)))


@pytest.mark.parametrize(
    "fields, group",
    [
        ({**NATIVE, "convrot": True}, 256),
        ({**NATIVE, "convrot": True, "convrot_groupsize": 64}, 64),
        ({**NATIVE, "params": {"convrot": True, "convrot_groupsize": 16}}, 16),
        ({**NATIVE, "convrot": False, "convrot_groupsize": 256}, 0),
        ({"convrot": True, "convrot_groupsize": 256, "per_row": True}, 256),
        ({"convrot": False, "per_row": True}, 0),
        ({"quarot": True}, 256),
        ({**NATIVE, "per_row": True, "orig_dtype": "torch.bfloat16", "num_experts": 3}, 0),
    ],
    ids=str,
)
def test_rotation_of_a_marker(fields, group):
    assert detect(int8_layer(LAYER, fields, ROW, columns=256))[LAYER].rotation_group == group


@pytest.mark.parametrize("group", [0, 2, 3, 96, -4, "64", 64.0, True, 1024, 2048, 8192], ids=repr)
def test_a_rotation_that_is_not_convrot_stops(group):
    with pytest.raises(CheckpointError, match=f"{LAYER}.comfy_quant"):
        detect(int8_layer(LAYER, {**NATIVE, "convrot": True, "convrot_groupsize": group}, ROW, columns=512))


def test_a_group_that_does_not_divide_the_columns_stops():
    with pytest.raises(CheckpointError, match="divides the columns"):
        detect(int8_layer(LAYER, {**NATIVE, "convrot": True}, ROW))


@pytest.mark.parametrize("raw", [b"", b"\0" * 3, b"\0" * 4, b"\0" * 15, b"\0" * 16, b"\0" * 17, b"{}"], ids=repr)
def test_an_empty_marker_says_nothing(raw):
    tensors = {f"{LAYER}.weight": floats(N, K), f"{LAYER}.comfy_quant": marker(raw)}
    assert detect(tensors)[LAYER].kind == "float"
    tensors = {**int8_layer(LAYER, None, ROW), f"{LAYER}.comfy_quant": marker(raw)}
    assert detect(tensors)[LAYER].kind == "int8"


@pytest.mark.parametrize(
    "raw",
    [
        json.dumps(NATIVE).encode() + b"\0\0\0",
        json.dumps(json.dumps(NATIVE)).encode(),
        b"int8_tensorwise",
        json.dumps("int8_tensorwise").encode(),
    ],
    ids=["nul-padded", "json-in-json", "bare", "json-string"],
)
def test_odd_spellings_of_the_native_marker(raw):
    tensors = {**int8_layer(LAYER, None, ROW), f"{LAYER}.comfy_quant": marker(raw)}
    assert detect(tensors)[LAYER].format == "int8_tensorwise"


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "net."])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda layers: json.dumps({"format_version": "1.0", "layers": layers}),
        json.dumps,
        lambda layers: json.dumps(json.dumps({"layers": layers})),
        lambda layers: json.dumps({"layers": json.dumps(layers)}),
    ],
    ids=["layers", "top", "json-in-json", "layers-in-json"],
)
def test_metadata_instead_of_markers(prefix, wrap):
    layers = {f"{prefix}{LAYER}": {**NATIVE, "convrot": True, "convrot_groupsize": 64}}
    tensors = int8_layer(LAYER, None, ROW, columns=64)
    assert detect(tensors, {"_quantization_metadata": wrap(layers)})[LAYER].rotation_group == 64


@pytest.mark.parametrize("text", ["", "not json {", "[1]", "null", '{"layers": 3}'])
def test_unreadable_metadata_leaves_the_decision_to_the_dtype(text):
    assert detect(int8_layer(LAYER, None, ROW), {"_quantization_metadata": text})[LAYER].kind == "int8"


def test_a_marker_wins_over_the_metadata():
    tensors = int8_layer(LAYER, {**NATIVE, "convrot": True, "convrot_groupsize": 16}, ROW, columns=64)
    specs = detect(tensors, metadata_of({LAYER: {**NATIVE, "convrot": True, "convrot_groupsize": 64}}))
    assert specs[LAYER].rotation_group == 16


def test_int8_without_a_scale_stops_and_names_the_key():
    with pytest.raises(
        CheckpointError, match=f"model.diffusion_model.{LAYER}.weight: an INT8 weight .* without a scale"
    ):
        detect({f"model.diffusion_model.{LAYER}.weight": codes()})


@pytest.mark.parametrize("suffix", [".weight._data", ".wq", ".int8_weight"])
def test_int8_under_an_unknown_name_stops_and_names_the_key(suffix):
    with pytest.raises(CheckpointError, match=f"{LAYER}{suffix}"):
        detect({LAYER + suffix: codes(), f"{LAYER}.bias": floats(N)})


@pytest.mark.parametrize("name", ["convrot_w4a4", "asym_w4a8_int8", "w6a8_int8", "nvfp4", "something_new", 3, ["a"]])
def test_a_marker_of_another_format_stops_and_says_what_to_use(name):
    with pytest.raises(CheckpointError) as caught:
        detect(int8_layer(LAYER, {"format": name}, ROW))
    assert (
        f"{LAYER}.comfy_quant" in str(caught.value) and repr(name) in str(caught.value) and "use " in str(caught.value)
    )


def test_the_int8_dtype_beats_an_fp8_marker():
    tensors = {**int8_layer(LAYER, {"format": "float8_e4m3fn"}, torch.tensor(0.5)), "scaled_fp8": floats(2)}
    assert detect(tensors)[LAYER].kind == "int8"


@pytest.mark.parametrize("scale", [".weight_scale", ".scale_weight"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_with_a_scale(scale, dtype):
    tensors = {
        f"{LAYER}.weight": floats(N, K).to(dtype),
        LAYER + scale: torch.tensor(0.5),
        f"{LAYER}.input_scale": torch.tensor(1.0),
    }
    spec = detect(tensors)[LAYER]
    assert (spec.kind, spec.scale, spec.extras) == ("fp8_scaled", LAYER + scale, (f"{LAYER}.input_scale",))


def test_fp8_without_a_scale_is_a_float():
    assert detect({f"{LAYER}.weight": floats(N, K).to(torch.float8_e4m3fn)})[LAYER].kind == "float"


def test_fp8_that_is_marked_as_scaled_but_has_no_scale_stops():
    tensors = {
        f"{LAYER}.weight": floats(N, K).to(torch.float8_e4m3fn),
        f"{LAYER}.comfy_quant": marker({"format": "float8_e4m3fn"}),
    }
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        detect(tensors)


@pytest.mark.parametrize(
    "extra", [{f"{LAYER}.weight_scale": ROW}, {f"{LAYER}.comfy_quant": marker(NATIVE)}], ids=["scale", "marker"]
)
def test_a_float_weight_that_something_calls_quantised_stops(extra):
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight"):
        detect({f"{LAYER}.weight": floats(N, K), **extra})


def test_a_scale_without_its_weight_stops():
    with pytest.raises(CheckpointError, match=f"{LAYER}.weight_scale: a scale without its weight"):
        detect({f"{LAYER}.weight_scale": ROW, "blocks.1.attn.q.weight": floats(N, K)})


def test_packed_bytes_stop_and_list_what_is_beside_them():
    tensors = {f"{LAYER}.weight": torch.zeros(N, K, dtype=torch.uint8), f"{LAYER}.absmax": floats(4)}
    with pytest.raises(CheckpointError, match=f"{LAYER}.absmax"):
        detect(tensors)
