"""Weights to the GPU and codes back while a file is quantised.

The driver copies between a GPU and ordinary host memory with one thread, which also has to touch every new page. Here
all threads copy to or from two pinned pieces, while the GPU reads or writes the other piece.
"""

import logging

import torch

log = logging.getLogger("native_int8.transfer")

PIECE_BYTES = 16 << 20


class Mover:
    """Moves tensors to `device` and back to the CPU, by torch's own copies."""

    def __init__(self, device: torch.device):
        self.device = device

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; itself if it is there."""
        return tensor.to(self.device)

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU, in ordinary memory; itself if it is there."""
        return tensor.cpu()


class PinnedMover(Mover):
    """The same through two pinned pieces of host memory, for CUDA."""

    def __init__(self, device: torch.device, piece_bytes: int = PIECE_BYTES):
        super().__init__(device)
        self._pieces = [self._piece(piece_bytes) for _ in range(2)]
        self._events = [self._event() for _ in range(2)]

    def _piece(self, count: int) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8, pin_memory=True)

    def _event(self):
        return torch.cuda.Event()

    def _parts(self, count: int):
        """(index of a piece, slice of the bytes) until `count` bytes are done."""
        size = self._pieces[0].numel()
        for number, start in enumerate(range(0, count, size)):
            yield number % 2, slice(start, min(start + size, count))

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the device; the copy is queued on the current stream when this returns."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return super().to_device(tensor)
        out = torch.empty_like(tensor, device=self.device)
        source, target = _bytes(tensor), _bytes(out)
        for i, part in self._parts(source.numel()):
            piece = self._pieces[i][: part.stop - part.start]
            # what the piece held is on the device
            self._events[i].synchronize()
            piece.copy_(source[part])
            target[part].copy_(piece, non_blocking=True)
            self._events[i].record()
        return out

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor on the CPU, complete when this returns."""
        if tensor.device.type == "cpu" or not tensor.is_contiguous():
            return super().to_host(tensor)
        return self._to_host(tensor)

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(tensor, device="cpu")
        source, target = _bytes(tensor), _bytes(out)
        waiting = None
        for i, part in self._parts(source.numel()):
            # the copy out of this piece two rounds ago was done by the CPU, in order
            self._pieces[i][: part.stop - part.start].copy_(source[part], non_blocking=True)
            self._events[i].record()
            if waiting is not None:
                self._collect(target, *waiting)
            waiting = i, part
        if waiting is not None:
            self._collect(target, *waiting)
        return out

    def _collect(self, target: torch.Tensor, i: int, part: slice) -> None:
        self._events[i].synchronize()
        target[part].copy_(self._pieces[i][: part.stop - part.start])


def mover(device: torch.device) -> Mover:
    """The way to move weights to `device` for one load; its pinned memory goes with it."""
    if device.type != "cuda":
        return Mover(device)
    try:
        return PinnedMover(device)
    except RuntimeError as error:
        log.warning("No pinned memory for loading (%s); weights are copied without it, which takes longer.", error)
        return Mover(device)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1).view(torch.uint8)
