"""Moving weights through two pinned pieces: every byte arrives, whatever the size, dtype and strides."""

import pytest
import torch
from native_int8.nodes.int8 import transfer
from native_int8.nodes.int8.transfer import Mover, PinnedMover, mover
from packtest.checkpoints import floats

CPU = torch.device("cpu")


class Event:
    """In place of a CUDA event."""

    def record(self):
        """Ordinary memory is written at once."""

    def synchronize(self):
        """Nothing is under way."""


class Plain(PinnedMover):
    """The same pieces in ordinary memory, so that it runs without a GPU."""

    def _piece(self, count):
        return torch.zeros(count, dtype=torch.uint8)

    def _event(self):
        return Event()

    def to_host(self, tensor):
        return self._to_host(tensor)


TENSORS = {
    "bf16": floats(300, 1001, dtype=torch.bfloat16),
    "fp8": floats(64, 64).to(torch.float8_e4m3fn),
    "codes": torch.arange(-128, 128, dtype=torch.int8).repeat(40).reshape(-1, 32),
    "one piece": torch.arange(512, dtype=torch.int64),
    "scalar": torch.tensor(0.25),
    "empty": torch.zeros(0, 4),
}


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float().cpu(), b.float().cpu())


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize("piece", [4096, 4095, 1 << 20])
def test_every_byte_arrives(piece, name):
    way = Plain(CPU, piece)
    for _ in range(2):
        there = way.to_device(TENSORS[name])
        assert same(there, TENSORS[name])
        assert there.numel() == 0 or there.data_ptr() != TENSORS[name].data_ptr()
        back = way.to_host(there)
        assert same(back, TENSORS[name])


def test_strides_and_tensors_that_are_there_take_the_plain_way():
    turned = TENSORS["bf16"].t()
    assert same(Plain(CPU, 4096).to_device(turned), turned)
    assert isinstance(mover(CPU), Mover) and not isinstance(mover(CPU), PinnedMover)
    tensor = TENSORS["scalar"]
    assert mover(CPU).to_device(tensor) is tensor and mover(CPU).to_host(tensor) is tensor


def test_without_pinned_memory_it_is_told(monkeypatch, caplog):
    def refuse(self, device):
        raise RuntimeError("no memory to pin")

    monkeypatch.setattr(PinnedMover, "__init__", refuse)
    with caplog.at_level("WARNING", "native_int8.transfer"):
        assert type(transfer.mover(torch.device("cuda"))) is Mover
    assert "no memory to pin" in caplog.text


@pytest.mark.gpu
@pytest.mark.parametrize("name", TENSORS)
def test_every_byte_arrives_on_a_gpu(name):
    way = PinnedMover(torch.device("cuda"), 4096)
    for _ in range(3):
        there = way.to_device(TENSORS[name])
        assert there.is_cuda and same(there, TENSORS[name])
        back = way.to_host(there)
        assert not back.is_cuda and not back.is_pinned() and same(back, TENSORS[name])
