"""Faults of kernels that users reported of other packs, named by their number in tests/FAULTS.md."""

import contextlib
import re
import sys
from pathlib import Path

import pytest
import torch
from native_int8.kernels import PreparedLinear, int8_linear, int8_matmul, launch, quantize_rows, rotate
from packtest.checks import assert_same
from packtest.shapes import activation, int8_in_dirty_buffer


def test_b24_a_launch_is_on_the_gpu_of_its_tensors(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    other = launch.on_device(torch.device("cuda", 1))
    assert isinstance(other, torch.cuda.device) and other.idx == 1
    assert isinstance(launch.on_device(torch.device("cuda", 0)), contextlib.nullcontext)


def test_b24_every_op_enters_it(device, monkeypatch):
    entered = []
    for name, module in list(sys.modules.items()):
        if name.startswith("native_int8.kernels.") and hasattr(module, "on_device"):
            monkeypatch.setattr(module, "on_device", lambda found: (entered.append(found), contextlib.nullcontext())[1])
    w, scale = int8_in_dirty_buffer(32, 64, device), torch.rand(32, device=device)
    x = activation(5, 64, torch.float32, device)
    q, row_scale = quantize_rows(x, implementation="triton")
    assert entered == [x.device]
    int8_matmul(q, row_scale, w, scale, out_dtype=torch.float32, implementation="triton")
    rotate(x, 16)
    int8_linear(x, w, scale, implementation="triton")
    before = len(entered)
    PreparedLinear(w, scale, implementation="triton")(x, w, scale)
    assert len(entered) > before >= 4 and set(entered) == {x.device}


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
