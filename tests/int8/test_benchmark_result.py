"""The benchmark's arithmetic on made-up times."""

import json

import pytest
from native_int8.nodes.int8.benchmark import BenchmarkError, parse_sizes
from native_int8.nodes.int8.benchmark_result import BenchmarkResult, Shape, ShapeTime, SizeResult

MACHINE = {"device": "Card", "architecture": "sm_86", "driver": None, "torch": "2", "cuda": "12", "triton": None, "platform": "linux"}  # fmt: skip
MODEL = {
    "class": "Flux2", "int8": True, "float_type": "bf16", "linears": 3, "weights_bytes": 1 << 20, "weights_bytes_bf16": 2 << 20,
    "weights_bytes_int8": 1 << 20,
}  # fmt: skip


def size(step_ms, is_int8, fp8=(1500.0, None)):
    shapes = tuple(
        (ShapeTime(Shape(4096, n, 512, 256, True), us, us / 2, fp8_us, "triton", 4096), count)
        for n, us, fp8_us, count in ((512, 2000.0, fp8[0], 2), (1024, 4000.0, fp8[1], 1))
    )
    return SizeResult("1024x1024", "seen in a forward", shapes, step_ms, is_int8)


def test_sums_over_the_calls_of_a_step():
    result = size(None, True)
    assert (result.float_ms, result.int8_ms, result.fp8_ms) == (8.0, 4.0, None)
    assert size(None, True, (1500.0, 3000.0)).fp8_ms == 6.0
    assert size(None, True, (1500.0, 3000.0)).fp8_step_ms is None
    assert result.rest_ms is None and result.amdahl() is None


@pytest.mark.parametrize(("step_ms", "is_int8"), [(6.0, True), (10.0, False)])
def test_the_bound_is_the_same_from_either_model(step_ms, is_int8):
    found = size(step_ms, is_int8).amdahl()
    assert found == pytest.approx(
        {"float_step_ms": 10.0, "int8_step_ms": 6.0, "gain": 10 / 6, "share": 0.8, "bound": 5.0}
    )


def test_a_step_shorter_than_its_linears_has_no_bound_and_the_json_is_valid():
    result = BenchmarkResult(MACHINE, MODEL, (size(3.0, True), size(None, True)), ("THROTTLED: hot",))
    table = result.table()
    assert "no bound can be given" in table and table.startswith("THROTTLED: hot")
    assert "no step was measured" in table and "weights 1.0 MiB as it is, 2.0 MiB in bf16" in table
    body = json.loads(result.to_json("2026-01-02"))
    assert body["sizes"][0]["amdahl"]["bound"] is None and body["sizes"][1]["amdahl"] is None
    assert body["sizes"][0]["shapes"][0] == {
        "m": 4096, "n": 512, "k": 512, "rotation_group": 256, "bias": True, "float_us": 2000.0, "int8_us": 1000.0,
        "fp8_us": 1500.0, "implementation": "triton", "measured_rows": 4096, "count": 2,
    }  # fmt: skip
    assert result.plot().shape[2] == 1000


def test_the_table_and_summary_say_gain_and_bound():
    result = BenchmarkResult(MACHINE, MODEL, (size(6.0, True),))
    assert "INT8 6.00 ms measured, bf16 10.00 ms computed from it: INT8 is 1.67 times as fast" in result.table()
    assert "these Linears take 80% of the bf16 step; if they took no time it would be 5.00 times" in result.table()
    assert result.summary() == "1024x1024: a step is 1.67 times as fast in INT8; at most 5.00"


def test_a_step_in_fp8_is_computed_where_all_linears_have_it():
    result = BenchmarkResult(MACHINE, MODEL, (size(6.0, True, (1500.0, 3000.0)), size(6.0, True)))
    assert (
        "INT8 6.00 ms measured, bf16 10.00, fp8 8.00 ms computed from it: INT8 is 1.67 times as fast" in result.table()
    )
    first, second = json.loads(result.to_json("2026-01-02"))["sizes"]
    assert first["fp8_step_ms"] == 8.0 and second["fp8_step_ms"] is None
    assert result.plot().shape[2] == 1000


def test_sizes_are_read():
    assert parse_sizes("1024x1024") == [(1024, 1024, 1)]
    assert parse_sizes(" 768 X 512,\n832x480x81; 64*64 ,") == [(768, 512, 1), (832, 480, 81), (64, 64, 1)]


@pytest.mark.parametrize("text", ["", " , ", "1024", "1024x", "0x64", "1024x1024x", "big"])
def test_what_is_no_size_is_told(text):
    with pytest.raises(BenchmarkError, match="1024x1024"):
        parse_sizes(text)
