"""Recording a call as a CUDA graph, with the memory that this costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch


class Recording(NamedTuple):
    """A recorded call: what starts it, the output that this writes, and the bytes of GPU memory that it holds."""

    replay: Callable[[], None]
    output: object
    held_bytes: int


class Recorder:
    """Records calls on one CUDA device as graphs that share their memory."""

    device_type = "cuda"

    def __init__(self):
        self._pool = None
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """Whether calls on `device` can be recorded now, or one sentence."""
        from comfy.cli_args import args

        # newer hosts record graphs of their own, and have an option against it
        if getattr(args, "disable_cuda_graphs", False):
            return "ComfyUI was started with --disable-cuda-graphs"
        if device.type != "cuda":
            return f"the MODEL runs on {device.type}, and only CUDA has graphs"
        if torch.cuda.is_current_stream_capturing():
            return "another graph is being recorded"
        if torch.cuda.current_stream(device) != torch.cuda.default_stream(device):
            return "the MODEL runs on a stream of its own"
        return None

    def record(self, call: Callable[[], object], device: torch.device) -> Recording:
        """Run `call` once on another stream, so that its libraries are set up there, then record it and run the graph.

        Raises RuntimeError when it cannot be recorded; the current stream is what it was then.
        """
        with torch.cuda.device(device):
            current = torch.cuda.current_stream()
            stream = self._streams.setdefault(device, torch.cuda.Stream())
            try:
                stream.wait_stream(current)
                with torch.cuda.stream(stream):
                    call()
                current.wait_stream(stream)
                before = _held(device)
                graph = torch.cuda.CUDAGraph()
                # other threads may do as they like, such as a preview or another GPU's model
                mode = {"capture_error_mode": "thread_local"}
                with torch.cuda.graph(graph, pool=self._pool, stream=stream, **mode):
                    output = call()
                graph.replay()
                self._pool = graph.pool()
                return Recording(graph.replay, output, max(_held(device) - before, 0))
            finally:
                # torch leaves the stream current when it cannot end the recording
                torch.cuda.set_stream(current)

    def forget(self) -> None:
        """Start with new memory; the old is freed with the last graph in it."""
        self._pool = None

    @staticmethod
    def free() -> None:
        """Give what no tensor and no graph holds back to the GPU."""
        torch.cuda.empty_cache()


def _held(device: torch.device) -> int:
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    if torch.cuda.get_allocator_backend() == "native":
        return torch.cuda.memory_reserved(device)
    # the memory of graphs is not in the statistics of cudaMallocAsync
    free, total = torch.cuda.mem_get_info(device)
    return total - free
