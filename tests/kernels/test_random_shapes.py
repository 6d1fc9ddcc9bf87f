"""The random-shape check of tests/bench, on a few small shapes; the long run on a GPU is tests/bench/random_shapes.py."""

import importlib
import os
import sys
from pathlib import Path

import pytest
import torch
from native_int8 import kernels
from native_int8.kernels.compiled import interpreted

SEED = int(os.environ.get("NATIVE_INT8_RANDOM_SEED", "0"))
SHAPES = 36


@pytest.fixture(scope="module")
def bench():
    """The bench's module, imported from its own folder."""
    folder = str(Path(__file__).resolve().parents[1] / "bench")
    sys.path.insert(0, folder)
    try:
        return importlib.import_module("random_shapes")
    finally:
        sys.path.remove(folder)


def needs_triton(device):
    reason = next(i for i in kernels.implementations() if i.name == "triton").declines(kernels.detect(device), None)
    if reason:
        pytest.skip(f"triton: {reason}")


def test_random_shapes_are_bit_exact(bench, device):
    needs_triton(device)
    checker = bench.Checker(kernels, device, interpreted())
    limits = bench.Limits(70, 300, 140)
    shapes = [bench.random_shape(SEED, index, limits) for index in range(SHAPES)]
    wrong = [f"{shape.text()}: {text}" for shape in shapes for text in checker.check(shape, SEED)]
    assert not wrong, "\n".join(wrong)
    assert checker.count["outputs"] + checker.count["no rows"] == SHAPES
    assert any(shape.k % 16 for shape in shapes) and any(shape.offset % 16 for shape in shapes)


def test_one_wrong_sum_and_one_stray_write_are_seen(bench, device):
    """The check itself bites: on a sum that is off by one, and on a write beside the view."""
    needs_triton(device)
    checker = bench.Checker(kernels, device, interpreted())
    shape = bench.Shape(1, 20, 64, 24, 3, 5, 2, 0, False)
    assert checker.check(shape, SEED) == []
    real = checker.matmul

    def off_by_one(q_x, x_scale, q_w, w_scale, bias, y, *tile):
        real(q_x, x_scale, q_w, w_scale, bias, y, *tile)
        y[19, 23] += 1

    def stray(q_x, x_scale, q_w, w_scale, bias, y, *tile):
        real(q_x, x_scale, q_w, w_scale, bias, y, *tile)
        y.as_strided((1,), (1,), y.storage_offset() + 24).fill_(3)

    for broken in (off_by_one, stray):
        checker.matmul = broken
        found = checker.check(shape, SEED)
        assert any("int32 sums" in text for text in found) and any("output" in text for text in found)


def test_a_shape_can_be_run_again_alone(bench):
    limits = bench.Limits()
    assert bench.random_shape(3, 17, limits) == bench.random_shape(3, 17, limits)
    assert bench.random_shape(3, 17, limits) != bench.random_shape(4, 17, limits)
    sizes = [bench.random_shape(0, index, limits) for index in range(2000)]
    assert min(s.m for s in sizes) == 0 and max(s.m for s in sizes) > 8900
    assert {s.k % 16 == 0 for s in sizes} == {True, False} and max(s.n for s in sizes) > 4000
    assert torch.tensor([s.k for s in sizes]).float().mean() > 1000
