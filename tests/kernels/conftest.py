"""Fixtures of the kernel tests: the device they run on, and fresh tensors that are poisoned."""

import sys

import pytest
import torch
from native_int8.kernels import Implementation, detect, implementations
from packtest.checks import POISON_INT8


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first GPU, else the CPU, where Triton kernels are interpreted."""
    return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")


@pytest.fixture(params=[implementation.name for implementation in implementations()])
def impl(request, device) -> str:
    """Each implementation of an op; one that this machine lacks is skipped with its reason."""
    chosen: Implementation = next(i for i in implementations() if i.name == request.param)
    reason = chosen.declines(detect(device), None)
    if reason:
        pytest.skip(f"{request.param}: {reason}")
    return request.param


@pytest.fixture(autouse=True)
def poisoned_allocations(monkeypatch):
    """torch.empty called by the pack returns NaN (floats) or -128 (int8), so that an unwritten output shows."""
    real_empty = torch.empty

    def empty(*args, **kwargs):
        out = real_empty(*args, **kwargs)
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("native_int8"):
            return out
        if out.is_floating_point():
            return out.fill_(float("nan"))
        return out.fill_(POISON_INT8) if out.dtype == torch.int8 else out

    monkeypatch.setattr(torch, "empty", empty)
