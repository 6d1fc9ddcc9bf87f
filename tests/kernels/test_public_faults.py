"""Faults of kernels that users reported of other packs, named by their number in tests/FAULTS.md."""

import contextlib
import inspect
import re
import sys
from pathlib import Path

import pytest
import torch
from native_int8 import kernels
from native_int8.kernels import int8_linear, launch
from packtest.checks import assert_same
from packtest.shapes import activation, int8_in_dirty_buffer


def test_b24_a_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    other = launch.on_device(torch.device("cuda", 1))
    assert isinstance(other, torch.cuda.device) and other.idx == 1
    assert isinstance(launch.on_device(torch.device("cuda", 0)), contextlib.nullcontext)


def test_b24_every_op_enters_it(device, monkeypatch):
    x, w = activation(5, 64, torch.float32, device), int8_in_dirty_buffer(32, 64, device)
    scale, vector = torch.rand(32, device=device), torch.rand(64, device=device)
    y = activation(5, 32, torch.float32, device)
    heads, turns = torch.rand((1, 5, 1, 64), device=device), torch.rand((1, 5, 32, 2, 2), device=device)
    one = {"implementation": "triton"}
    q, row_scale = kernels.quantize_rows(x, **one)
    rows = kernels.residual_norm(x, None, kernels.Norm(vector, 1e-5, None), **one)[1]
    fused = kernels.int8_linear_fused
    ops = {
        "quantize_rows": lambda: kernels.quantize_rows(x, **one),
        "quantize_rms_norm": lambda: kernels.quantize_rms_norm(x, vector, 1e-5, **one),
        "quantize_activation": lambda: (kernels.quantize_swiglu(x, x, **one), kernels.quantize_gelu(x, **one)),
        "residual_norm": lambda: kernels.residual_norm(x, kernels.Branch(x, None, 0.0, None), **one),
        "rms_rope": lambda: kernels.rms_rope(heads, heads, turns, vector, vector, 1e-5, split_half=True, **one),
        "rotate": lambda: kernels.rotate(x, 16, **one),
        "int8_matmul": lambda: kernels.int8_matmul(q, row_scale, w, scale, out_dtype=torch.float32, **one),
        "int8_linear_fused": lambda: (
            kernels.int8_linear_swiglu(x, w, scale, w, scale, **one),
            kernels.int8_linear_residual(x, w, scale, residual=y, **one),
            fused.swiglu_of_rows(x, rows, (w, scale, None), (w, scale, None), "triton"),
        ),
        "prepared_linear": lambda: kernels.PreparedLinear(w, scale, **one)(x, w, scale),
    }
    entered = []
    modules = {
        name.rpartition(".")[2]: module
        for name, module in list(sys.modules.items())
        if name.startswith("native_int8.kernels.") and "with on_device(" in inspect.getsource(module)
    }
    # compiling ahead is no op
    assert modules.keys() - {"warmup"} == ops.keys()
    for name, module in modules.items():
        enter = lambda found, name=name: (entered.append((name, found)), contextlib.nullcontext())[1]  # noqa: E731
        monkeypatch.setattr(module, "on_device", enter)
    for name, op in ops.items():
        entered.clear()
        op()
        # a group of ops enters it once each, besides what quantises their input
        calls = {"quantize_activation": 2, "int8_linear_fused": 3}.get(name, 1)
        assert sum(module == name for module, _ in entered) == calls, (name, entered)
        assert {found for _, found in entered} == {x.device}


@pytest.mark.gpu
def test_b22_memory_of_a_weight_is_given_away_while_the_kernel_runs(device):
    x = activation(512, 1024, torch.bfloat16, device)
    home = int8_in_dirty_buffer(2048, 1024, "cpu").contiguous().pin_memory()
    scale = torch.rand((2048, 1), device=device)
    expected = int8_linear(x, home.to(device), scale)
    side = torch.cuda.Stream(device)
    for _ in range(200):
        with torch.cuda.stream(side):
            weight = home.to(device, non_blocking=True)
        torch.cuda.current_stream(device).wait_stream(side)
        weight.record_stream(torch.cuda.current_stream(device))
        y = int8_linear(x, weight, scale)
        del weight
        with torch.cuda.stream(side):
            torch.full((2048, 1024), 99, dtype=torch.int8, device=device)
        assert_same(y, expected, "y")


def test_b128_names_of_kernels_are_short():
    """They are parts of paths in Triton's cache, which Windows limits to 260 characters."""
    names = [
        name
        for path in Path(launch.__file__).parent.glob("*_triton.py")
        for name in re.findall(r"@triton\.jit\S*\s+def (\w+)", path.read_text(encoding="utf-8"))
    ]
    assert len(names) > 10
    assert max(map(len, names)) <= 40
