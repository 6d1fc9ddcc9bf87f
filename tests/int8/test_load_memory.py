"""Host memory while a file is converted: never more than two layers beyond the result."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from native_int8.nodes.int8 import policy, quantize, save
from native_int8.nodes.int8.loader import LoadOptions, load_model
from packtest import ROOT

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's account of anonymous memory"),
]

# the size of a layer must stand out from what libraries allocate
FILE_BYTES = 190_000_000


@pytest.fixture(scope="module")
def bench():
    """The program tests/bench/load_memory.py as a module."""
    folder = str(ROOT / "tests" / "bench")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("load_memory")
    finally:
        sys.path.remove(folder)


@pytest.fixture(scope="module")
def big(comfy, bench, tmp_path_factory) -> tuple[str, int]:
    """A Wan model of two blocks and 190 MB in bf16; the bytes of its largest Linear."""
    path = tmp_path_factory.mktemp("big") / "wan.safetensors"
    largest = bench.write_model(path, FILE_BYTES)
    yield str(path), largest
    os.unlink(path)


@pytest.fixture(autouse=True)
def torch_quantises(monkeypatch):
    """The interpreter, which stands in for a GPU in these tests, has memory of its own."""
    from native_int8.kernels import dispatch

    if not torch.cuda.is_available():
        real = dispatch.choose
        quantize_rows = importlib.import_module("native_int8.kernels.quantize_rows")
        monkeypatch.setattr(
            quantize_rows, "choose", lambda device, **facts: real(device, **{**facts, "implementation": "torch"})
        )


def watched(bench, work) -> tuple[object, int, int]:
    """(result of work(), peak beyond what is left, peak beyond the start) of anonymous memory in bytes."""
    before = bench.anonymous_bytes()
    peak = bench.Peak()
    peak.start()
    result = work()
    top = peak.stop()
    return result, top - bench.anonymous_bytes(), top - before


@pytest.mark.parametrize("rotation", [True, False], ids=["rotated", "plain"])
def test_converting_in_memory_takes_two_layers_beyond_the_result(rotation, bench, big):
    path, largest = big
    options = LoadOptions(rotation=rotation, device="cpu")
    load_model(path, options)
    model, beyond, total = watched(bench, lambda: load_model(path, options))
    assert beyond <= 2 * largest
    assert total <= model.model_size() + 2 * largest


def test_converting_into_a_copy_takes_two_layers(bench, big, tmp_path, monkeypatch):
    import folder_paths

    path, largest = big
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path))
    load_model(path, LoadOptions(device="cpu"))
    model, _, total = watched(bench, lambda: load_model(path, LoadOptions(device="cpu", cache=True)))
    # without dynamic VRAM the host copies a file's float tensors
    floats = sum(p.nbytes for p in model.model.diffusion_model.parameters() if p.dtype != torch.int8)
    assert total <= floats + 2 * largest
    assert total < model.model_size()


@pytest.mark.fault("B147")
def test_saving_takes_two_layers(bench, big, tmp_path):
    path, largest = big
    model = load_model(path, LoadOptions(device="cpu"))
    # one after the other: four take no more than one
    state = model.model.state_dict()
    keys = [f"diffusion_model.blocks.{i}.ffn.{j}.weight" for i in (0, 1) for j in (0, 2)]
    model.add_patches(
        {key: ("diff", (torch.full(tuple(state[key].shape), 1e-3, dtype=torch.bfloat16),)) for key in keys}
    )
    _, _, total = watched(bench, lambda: save.save_model(model, str(tmp_path / "saved.safetensors")))
    assert total <= 2 * largest
    model.patches.clear()
    _, _, total = watched(bench, lambda: save.save_model(model, str(tmp_path / "saved.safetensors")))
    assert total <= 2 * largest


def test_the_program_says_which_bars_hold(bench, big, tmp_path):
    path, largest = big
    rows = [{"way": way, "runs": bench.measure(way, path, str(tmp_path), "cpu", 2, 60.0)} for way in ("plain", "int8")]
    assert [len(row["runs"]) for row in rows] == [2, 2]
    bench.summarise(rows, largest)
    assert rows[0]["times_plain"] == 1 and rows[1]["seconds"] == rows[1]["runs"][1]["seconds"]
    text = bench.table(rows, largest)
    assert "pass int8: host memory beyond the result <= 2 layers" in text
    rows[1]["beyond_layers"] = 2.5
    assert "FAIL int8: host memory beyond the result <= 2 layers: 2.50" in bench.table(rows, largest)
    # a share of the time that is used up ends after one load
    assert len(bench.measure("plain", path, str(tmp_path), "cpu", 3, 0.0)) == 1


def test_an_fp8_weight_is_expanded_by_rows(bench):
    weight = torch.full((4096, 4096), 0.5).to(torch.float8_e4m3fn)
    decision = policy.Decision("a", "quantise", None, "", (4096, 4096), 256)
    small = quantize.quantised(decision, weight[:8], torch.tensor(2.0), torch.device("cpu"))
    layer = 2 * weight.numel()
    result, _, total = watched(
        bench, lambda: quantize.quantised(decision, weight, torch.full((4096, 1), 2.0), torch.device("cpu"))
    )
    assert total <= 2 * layer
    assert torch.equal(result["a.weight"][:8], small["a.weight"])
    assert torch.equal(result["a.weight_scale"][:8], small["a.weight_scale"])
