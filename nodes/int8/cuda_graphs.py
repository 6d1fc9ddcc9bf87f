"""CUDA graphs of a MODEL's forward: the kernels of a whole step are started by one call instead of a thousand.

While a MODEL with this speed runs, its diffusion model has a seat at `forward`. The first call of a kind runs as it always
does, watched for what a graph could not repeat; the second is recorded; later ones copy their tensors into the
buffers of the graph, start it, and copy its output out. What makes two calls of one kind is in graph_facts.py, as are
the reasons for which there is no graph; each is counted and told.

A graph keeps the memory of all that its forward computes. The graphs of one model share that memory, since they never run at
once and their outputs are copied out; still it is more than without. They go with the weights: unloading, another LoRA,
running out of memory, and the end of the MODEL free them. With a LoRA beside the weights each prompt records anew, since
its matrices are put on the GPU anew.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable

import torch

from . import short_way
from .fusion import registry as fusion
from .graph_recorder import Recorder
from .model_graphs import ModelGraphs
from .seats import PerModel, Seat, Seats

log = logging.getLogger("native_int8.cuda_graphs")
_thread = threading.local()
_all: weakref.WeakSet[Graphs] = weakref.WeakSet()


def own_seats(diffusion_model: torch.nn.Module) -> set[int]:
    """The identities of all that this pack puts at `forward` of modules of `diffusion_model`."""
    both = (_seats_of(diffusion_model), fusion.seats_of(diffusion_model))
    return {id(seat.value) for seats in both for group in seats.groups for seat in group}


class _Voice:
    """Tells the user each sentence once."""

    def __init__(self, tell: Callable[[str], None] | None):
        self._tell, self._told = tell, set()

    def say(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            log.info(sentence)
            if self._tell is not None:
                self._tell(sentence)


class Graphs:
    """The graphs of one MODEL and its clones, by diffusion model; freed with the last of them.

    Args:
        tell: called with a sentence when a graph was recorded, or for the first time not.
        make_recorder: what records; for tests.
    """

    def __init__(self, tell: Callable[[str], None] | None = None, make_recorder: Callable[[], Recorder] = Recorder):
        # nothing here refers back to this object: its graphs go with it, not when garbage is collected
        say = self._say = _Voice(tell).say
        _all.add(self)
        self.of = PerModel(lambda diffusion_model: ModelGraphs(diffusion_model, say, make_recorder(), own_seats))

    def drop(self, diffusion_model: torch.nn.Module) -> None:
        """Free the graphs of `diffusion_model`."""
        self.of.forget(diffusion_model)

    @contextlib.contextmanager
    def inside(self, diffusion_model: torch.nn.Module):
        """Let calls of `diffusion_model` in this thread take graphs; entered inside short_way.inside and fusion.inside."""
        run = short_way.current_run()
        if run is None:
            yield
            return
        if hasattr(diffusion_model, "_orig_mod"):
            run.ungraphed["the MODEL is compiled with torch.compile"] += 1
            yield
            return
        seats = _seats_of(diffusion_model)
        seats.enter(run.ungraphed)
        outer, _thread.graphs = getattr(_thread, "graphs", None), self
        try:
            yield
        finally:
            _thread.graphs = outer
            seats.leave()
            for reason in run.ungraphed:
                self._say(f"CUDA graph not used: {reason}.")


def drop(diffusion_model: torch.nn.Module) -> None:
    """Free the graphs of a model whose weights move, whichever MODEL they were recorded for."""
    for graphs in list(_all):
        graphs.drop(diffusion_model)


def _seat(diffusion_model: torch.nn.Module):
    # the seat is kept for as long as the model lives, which it must not prolong
    kept = weakref.ref(diffusion_model)

    @functools.wraps(type(diffusion_model).forward)
    def forward(*args, **kwargs):
        module = kept()
        of_class = type(module).forward
        run, graphs = short_way.current_run(), getattr(_thread, "graphs", None)
        if run is None or graphs is None:
            return of_class(module, *args, **kwargs)
        return graphs.of(module).call(run, functools.partial(of_class, module), args, kwargs)

    return forward


_seats_of = PerModel(lambda model: Seats([(Seat(model.__dict__, "forward", _seat(model)),)]))
