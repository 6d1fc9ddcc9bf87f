"""The machine code of every default tile and kernel, compiled ahead of time: no GPU needed.

The installed Triton is always checked. Others are checked when NATIVE_INT8_TRITONS names a folder that holds one
unpacked Triton per subfolder (`.ci/env` makes it).
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton
from native_int8.kernels import tiles
from packtest import machine_code

ARCHITECTURES = [80, 86, 89, 90]
SHARED_MEMORY_BYTES = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448}
_EXTRA = Path(os.environ.get("NATIVE_INT8_TRITONS") or "/nonexistent")
TRITONS = {triton.__version__: None} | {folder.name: folder for folder in sorted(_EXTRA.glob("*.*")) if folder.is_dir()}


@functools.cache
def reports(version: str) -> list[dict]:
    """All variants compiled by one Triton, in a process of its own, where kernels are not interpreted."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("TRITON_")} | {"TRITON_INTERPRET": "0"}
    if TRITONS[version] is not None:
        environment["PYTHONPATH"] = str(TRITONS[version])
    command = [sys.executable, machine_code.__file__, "--sm", *map(str, ARCHITECTURES), "--form", "trans", "usual"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert {r["triton"] for r in found} == {version}
    return found


def of(version, kernel, sm=None):
    return [r for r in reports(version) if r["kernel"] == kernel and sm in (None, r["sm"])]


@pytest.mark.parametrize("version", TRITONS)
def test_matmul_tiles_have_a_clean_loop(version):
    found = of(version, "int8_matmul")
    assert {(r["sm"], r["variant"]) for r in found} == {
        (sm, t.name) for sm in ARCHITECTURES for t in tiles.all_tiles(sm)
    }
    for r in found:
        assert r["stack_bytes"] == 0 and r["loop_local_memory"] == 0, f"spills: {r}"
        assert r["loop_permutes"] == 0, f"byte permutes in the loop: {r}"
        assert r["loop_mma"] > 0, f"no tensor-core instruction in the loop: {r}"


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize("kernel", ["int8_matmul_tma", "int8_matmul_split_k"])
def test_forms_of_the_matmul_have_the_same_clean_loop(version, kernel):
    expected = {
        (sm, t.name)
        for sm in ARCHITECTURES
        for t in tiles.all_tiles(sm)
        if (t.split_k if kernel == "int8_matmul_split_k" else t.tma and not t.split_k)
    }
    found = of(version, kernel)
    assert {(r["sm"], r["variant"]) for r in found} == expected and expected
    for r in found:
        assert r["stack_bytes"] == 0 and r["loop_local_memory"] == 0, f"spills: {r}"
        assert r["loop_permutes"] == 0 and r["loop_mma"] > 0, r
        assert (r["wgmma"] > 0) == (r["sm"] == 90), r
        assert r["mma_share"] >= 0.5 or r["sm"] == 90, r


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize("sm", [80, 86, 89])
def test_default_large_tiles_spend_half_the_loop_on_the_tensor_cores(version, sm):
    large = {t.name for t in tiles.default_large_tiles(sm) if t.block_m * t.block_n >= 128 * 128}
    found = [r for r in of(version, "int8_matmul", sm) if r["variant"] in large]
    assert len(found) == len(large) > 0
    for r in found:
        assert r["mma_share"] >= 0.5, r
        assert r["wgmma"] == 0, r


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize("kernel", ["int8_matmul_swiglu", "int8_matmul_swiglu_low_rank", "int8_matmul_residual"])
def test_fused_epilogues_leave_the_loop_clean(version, kernel):
    found = of(version, kernel)
    assert len(found) == sum(len(tiles.default_large_tiles(sm)) for sm in ARCHITECTURES)
    for r in found:
        assert r["loop_permutes"] == 0 and r["loop_local_memory"] == 0 and r["loop_mma"] > 0, r
        # a residual or a low-rank product may park a few values, once per tile and outside the loop
        assert r["stack_bytes"] <= (0 if kernel == "int8_matmul_swiglu" else 160), r


@pytest.mark.parametrize("version", TRITONS)
def test_a_low_rank_product_in_the_epilogue_spills_nothing(version):
    found = of(version, "int8_matmul_low_rank")
    assert len(found) == sum(len(tiles.default_large_tiles(sm)) for sm in ARCHITECTURES)
    for r in found:
        assert r["stack_bytes"] == 0 and r["loop_local_memory"] == 0 and r["loop_mma"] > 0, r


@pytest.mark.parametrize("version", TRITONS)
def test_hopper_uses_its_own_matrix_instruction(version):
    large = {t.name for t in tiles.default_large_tiles(90)}
    assert all(r["wgmma"] > 0 for r in of(version, "int8_matmul", 90) if r["variant"] in large)


@pytest.mark.parametrize("version", TRITONS)
def test_shared_memory_fits(version):
    for r in reports(version):
        assert r["shared_bytes"] <= SHARED_MEMORY_BYTES[r["sm"]], r


@pytest.mark.parametrize("version", TRITONS)
def test_quantising_keeps_a_row_in_registers(version):
    found = of(version, "quantize_rows")
    assert len(found) == 10 * len(ARCHITECTURES)
    for r in found:
        # the longest row of all, 53248 values on 512 threads, may park a few of them
        assert r["stack_bytes"] <= (320 if "k53248" in r["variant"] else 0), r


@pytest.mark.parametrize("version", TRITONS)
@pytest.mark.parametrize(("kernel", "variants"), [("residual_norm", 12), ("quantize_activation", 12), ("rms_rope", 2)])
def test_passes_between_linears_keep_a_row_in_registers(version, kernel, variants):
    found = of(version, kernel)
    assert len(found) == variants * len(ARCHITECTURES)
    # with LoRAs the input is written, too, for which Triton 3.6 parks two registers on sm_86 and sm_89
    assert all(r["stack_bytes"] <= (8 if "kept" in r["variant"] else 0) for r in found), found
    # a product that is rounded before it is added; older cards add by such an instruction, too
    assert all(r["bf16_multiply_adds"] == 0 for r in found if r["sm"] == 90), found


@pytest.mark.parametrize("version", TRITONS)
def test_the_checks_bite_on_the_usual_form(version):
    """The textbook form fails exactly these checks on sm_8x from Triton 3.8 on, and passes them before."""
    broken = tuple(map(int, version.split(".")[:2])) >= (3, 8)
    for sm in (80, 86, 89):
        (r,) = of(version, "usual_form", sm)
        fails = r["loop_permutes"] > 0 and r["stack_bytes"] > 0 and r["mma_share"] < 0.5
        assert fails == broken, r
