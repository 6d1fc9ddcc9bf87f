"""The CUDA graphs of one diffusion model: which call gets which, and when they go. See cuda_graphs.py."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

import torch

from . import short_way
from .fusion import registry as fusion
from .graph_facts import (
    OPTIONS,
    VOLATILE,
    Modules,
    Refused,
    WatchedOperators,
    WatchedOptions,
    options_signature,
    signature,
    with_tensors,
)
from .graph_recorder import Recorder, Recording

# of one model at once; the least recently used goes
KEPT = 4
# after so many kinds of calls in a row of which none came twice, the arguments seem to change from call to call
MAX_NEW, MAX_MET = 8, 64
REPLAYED, RECORDED, FIRST = "replayed", "recorded", "first of its kind"


class _Graph(NamedTuple):
    inputs: list[torch.Tensor]
    recording: Recording
    counted: short_way.Run


class ModelGraphs:
    """The graphs of one diffusion model, which is not kept alive.

    Args:
        say: called with a sentence for the user.
        own_seats: gives the identities of `forward`s of modules that are this pack's.
    """

    def __init__(
        self,
        diffusion_model: torch.nn.Module,
        say: Callable[[str], None],
        recorder: Recorder,
        own_seats: Callable[[torch.nn.Module], set[int]],
    ):
        self._model, self._say, self._recorder, self._own_seats = weakref.ref(diffusion_model), say, recorder, own_seats
        # two threads cannot use the same buffers
        self._lock = threading.Lock()
        self._forget()

    def _forget(self) -> None:
        self.graphs: OrderedDict[tuple, _Graph] = OrderedDict()
        self._seen: set[tuple] = set()
        self._refused: dict[tuple, str] = {}
        self._fit: list[int] | None = None
        self._modules: Modules | None = None
        # kinds that were met and not watched
        self._met: set[tuple] = set()
        self._new_in_a_row = 0
        self._recorder.forget()

    @property
    def held_bytes(self) -> int:
        """Bytes of GPU memory that the graphs hold beside the model."""
        buffers = sum(x.numel() * x.element_size() for graph in self.graphs.values() for x in graph.inputs)
        return buffers + sum(graph.recording.held_bytes for graph in self.graphs.values())

    def call(self, run: short_way.Run, forward: Callable, args: tuple, kwargs: dict):
        """What `forward(*args, **kwargs)` returns; by a graph where there is one."""
        if not self._lock.acquire(blocking=False):
            run.ungraphed["another thread runs the MODEL at the same time"] += 1
            return forward(*args, **kwargs)
        run.facts = {}
        try:
            try:
                return self._call(run, forward, args, kwargs)
            except Refused as refused:
                run.ungraphed[str(refused)] += 1
            return forward(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            if not self.graphs:
                raise
        finally:
            self._lock.release()
        # only here is nothing of what failed held any more
        self._forget()
        self._recorder.free()
        run.ungraphed["the GPU ran out of memory, and the graphs were freed"] += 1
        return forward(*args, **kwargs)

    def _call(self, run, forward, args, kwargs):
        import comfy.model_management

        if torch.is_grad_enabled() or comfy.model_management.in_training:
            raise Refused("the MODEL is in training")
        if kwargs.get("control") is not None:
            raise Refused("a ControlNet takes part")
        options = kwargs.get(OPTIONS) or {}
        plain = {name: value for name, value in kwargs.items() if name != OPTIONS}
        tensors: list[torch.Tensor] = []
        kind = (
            options_signature(options),
            signature((args, plain), tensors),
            torch.is_inference_mode_enabled(),
        )
        if not tensors or any(x.device != tensors[0].device for x in tensors):
            raise Refused("not all arguments of the model are on one device")
        device = tensors[0].device
        reason = self._recorder.why_not(device)
        if reason is not None:
            raise Refused(reason)
        self._let_go_of_what_no_longer_fits()
        run.facts = fusion.facts(self._model(), plain)
        kind = (*kind, tuple(run.facts.items()))
        reason = self._refused.get(kind)
        if reason is not None:
            raise Refused(reason)
        graph = self.graphs.get(kind)
        if graph is not None:
            self.graphs.move_to_end(kind)
            comfy.model_management.throw_exception_if_processing_interrupted()
            run.graphed[REPLAYED] += 1
            return self._replay(graph, tensors, run)
        if kind not in self._seen:
            return self._first(kind, run, forward, args, kwargs, device)
        self._new_in_a_row = 0
        return self._record(kind, run, forward, args, kwargs, tensors)

    def _let_go_of_what_no_longer_fits(self) -> None:
        if self._modules is None:
            model = self._model()
            self._modules = Modules(model, self._own_seats(model))
        fit = self._modules.facts()
        if self._fit is not None and fit != self._fit:
            self._forget()
            # a replaced module has others inside
            self._let_go_of_what_no_longer_fits()
            return
        self._fit = fit

    def _first(self, kind, run, forward, args, kwargs, device):
        """Run as always, and see what a graph could not repeat."""
        reason = self._modules.why_not_on(device)
        if self._new_in_a_row >= MAX_NEW and kind not in self._met:
            if len(self._met) >= MAX_MET:
                self._met.clear()
            self._met.add(kind)
            reason = reason or "the model is called with other values each time"
        if reason is not None:
            raise Refused(reason)
        self._new_in_a_row += 1
        watched = WatchedOptions(kwargs.get(OPTIONS) or {}, set())
        with WatchedOperators(self._recorder.device_type) as operators:
            output = forward(*args, **_with_options(kwargs, watched))
        self._seen.add(kind)
        read = sorted(watched.read & VOLATILE)
        reason = operators.reason
        if read:
            reason = f"the model reads {' and '.join(read)}, which change from call to call"
        if reason is None:
            run.graphed[FIRST] += 1
        else:
            self._refused[kind] = reason
            run.ungraphed[reason] += 1
        return output

    def _record(self, kind, run, forward, args, kwargs, tensors):
        while len(self.graphs) >= KEPT:
            self.graphs.popitem(last=False)
        found = self._recorded(run, forward, args, kwargs, tensors)
        if isinstance(found, str):
            # only here is nothing of what failed held any more
            self._recorder.free()
            self._refused[kind] = found
            raise Refused(found)
        self.graphs[kind] = found
        shape = "x".join(map(str, found.inputs[0].shape))
        self._say(
            f"CUDA graph recorded for input {shape}; {len(self.graphs)} of up to {KEPT} kept, "
            f"{self.held_bytes / 2**20:.0f} MiB of GPU memory."
        )
        run.graphed[RECORDED] += 1
        run.add(found.counted)
        # it ran once already, with the tensors of this call
        return _copied(found.recording.output)

    def _recorded(self, run, forward, args, kwargs, tensors) -> _Graph | str:
        counts = []

        def call():
            args_, kwargs_ = with_tensors((args, _with_options(kwargs, None)), iter(inputs))
            # the class may write into its options
            options = dict(kwargs.get(OPTIONS) or {})
            with short_way.counting(run.facts) as counted:
                output = forward(*args_, **_with_options(kwargs_, options))
            counts.append(counted)
            return output

        try:
            # usable by a caller outside inference mode, too
            with torch.inference_mode(False), torch.no_grad():
                inputs = [torch.empty_like(x) for x in tensors]
            _fill(inputs, tensors)
            recording = self._recorder.record(call, tensors[0].device)
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                self.graphs.clear()
                self._recorder.forget()
            return f"recording failed: {(str(error).strip() or type(error).__name__).splitlines()[0]}"
        return _Graph(inputs, recording, counts[0])

    def _replay(self, graph: _Graph, tensors: list[torch.Tensor], run):
        _fill(graph.inputs, tensors)
        graph.recording.replay()
        run.add(graph.counted)
        return _copied(graph.recording.output)


def _with_options(kwargs: dict, options) -> dict:
    return kwargs | {OPTIONS: options} if OPTIONS in kwargs else kwargs


@torch.no_grad()
def _fill(inputs: list[torch.Tensor], tensors: list[torch.Tensor]) -> None:
    for buffer, given in zip(inputs, tensors, strict=True):
        buffer.copy_(given)


def _copied(output):
    if isinstance(output, torch.Tensor):
        return output.clone()
    if isinstance(output, (list, tuple)):
        return type(output)(_copied(part) for part in output)
    return output
