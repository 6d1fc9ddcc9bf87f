"""Which kernel each Linear of a MODEL really runs: INT8, float, or fake INT8 (dequantised, then a float product).

The MODEL may be any: on our kernels, on the host's own INT8, of another pack. One forward is made as the sampler makes it,
and what each Linear does in it is seen in two ways: our own counters, and the operators that torch dispatches while the
Linear runs. A further forward without onlookers gives the times.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from . import compare, direct_linears, host_backend, loader, short_way, trajectory

INT8, FAKE, FLOAT, UNSEEN, IDLE = "INT8", "fake INT8", "float", "not seen", "not called"
_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "addmv", "mv", "_int_mm", "_scaled_mm"})
_OWN_WAYS = {short_way.RESIDENT: "", short_way.FETCHED: ", weight fetched by the host", short_way.GENERAL: ""}


@dataclass(frozen=True)
class LayerAudit:
    """One Linear in one forward.

    stored: what its weight is kept as. verdict: INT8, FAKE, FLOAT, UNSEEN or IDLE. kernel: what multiplied. reason: why it was
    not INT8, or not the shortest way to it; may be empty. rows: of its inputs, all calls together. ms: all calls together.
    """

    name: str
    shape: tuple[int, int]
    stored: str
    verdict: str
    kernel: str
    reason: str
    rows: int
    ms: float


@dataclass(frozen=True)
class Audit:
    """What `audit` found. step_ms: the forward; layers: in the order of the model."""

    model: str
    layers: tuple[LayerAudit, ...]
    step_ms: float
    notes: tuple[str, ...] = ()

    def count(self, verdict: str) -> int:
        """How many layers have this verdict."""
        return sum(layer.verdict == verdict for layer in self.layers)

    def summary(self) -> str:
        """One line: how many layers multiply in INT8, and how many only look like it."""
        kept = [layer for layer in self.layers if layer.stored.startswith("INT8")]
        real = sum(layer.verdict == INT8 for layer in kept)
        parts = [f"{real} of {len(kept)} INT8 layers multiply in INT8" if kept else "no INT8 layer"]
        for verdict in (FAKE, UNSEEN, FLOAT, IDLE):
            if self.count(verdict):
                parts.append(f"{self.count(verdict)} {verdict}")
        share = sum(layer.ms for layer in self.layers) / self.step_ms if self.step_ms else 0.0
        return f"{self.model}: {', '.join(parts)}; Linears are {share:.0%} of a forward of {self.step_ms:.1f} ms"

    def table(self) -> str:
        """The summary, groups of layers that ran alike, and a line for each layer."""
        lines = [self.summary(), *self.notes, "", "share  layers  what ran"]
        groups: dict[tuple, list[LayerAudit]] = {}
        for layer in self.layers:
            groups.setdefault((layer.verdict, layer.stored, layer.kernel, layer.reason), []).append(layer)
        for (verdict, stored, kernel, reason), found in sorted(groups.items(), key=lambda g: -sum(x.ms for x in g[1])):
            why = f": {reason}" if reason else ""
            lines.append(
                f"{self._share(found):5.1%}  {len(found):6d}  {verdict} ({stored}) by {kernel}{why}; such as {found[0].name}"
            )
        lines += ["", "share  verdict     N x K          rows  layer, kernel"]
        for layer in self.layers:
            size = "x".join(map(str, layer.shape))
            lines.append(
                f"{self._share([layer]):5.1%}  {layer.verdict:10s}  {size:12s} {layer.rows:6d}  {layer.name}, {layer.kernel}"
            )
        return "\n".join(lines)

    def _share(self, layers: list[LayerAudit]) -> float:
        return sum(layer.ms for layer in layers) / self.step_ms if self.step_ms else 0.0


def audit(model, latent: dict, conditioning: list, progress: Callable[[float], None] | None = None) -> Audit:
    """Watch forwards of a MODEL, which stays as it is.

    Args:
        latent: as LATENT wires carry it.
        conditioning: for the forward, at cfg 1.
        progress: called with the part that is done; may raise to stop.
    """
    progress = progress or (lambda done: None)
    seen: dict[str, _Seen] = {}
    clock = _Clock(model.load_device)

    def loop(denoise, x, sigmas):
        denoise(x, sigmas[0])
        progress(0.25)
        modules = compare.linears(model)
        for name in modules:
            seen[name] = _Seen()
        # what is not called cannot be seen
        with direct_linears.called(compare.inner_of(model)):
            with _Operators() as operators, _watching(modules, lambda name: _Look(model, seen[name], operators)):
                denoise(x, sigmas[0])
            progress(0.5)
            with _watching(modules, lambda name: clock.lap(name)):
                # what the first call with these onlookers sets up is not timed
                denoise(x, sigmas[0])
                clock.start()
                denoise(x, sigmas[0])
                clock.stop()
        progress(1.0)
        return x

    trajectory.run(model, loop, conditioning, None, latent, seed=0, steps=1)
    reasons = {d.layer: d.reason for d in loader.describe(model).decisions}
    layers = [
        _judged(name, module, seen[name], reasons.get(name, ""), clock.ms.get(name, 0.0))
        for name, module in compare.linears(model).items()
    ]
    notes = []
    if any(hasattr(module, "_orig_mod") for module in model.model.diffusion_model.modules()):
        notes.append(
            "Parts of this MODEL are compiled; inside a graph nothing is seen. Audit the MODEL before the compile node."
        )
    if not host_backend.is_attached(model) and any(layer.stored.startswith("INT8") for layer in layers):
        notes.append("This MODEL does not run on native_int8. INT8 Patch Model gives it these kernels.")
    return Audit(type(model.model).__name__, tuple(layers), clock.total_ms, tuple(notes))


@dataclass
class _Seen:
    """What was seen of one Linear. own: (implementation, way) -> calls by our counters."""

    calls: int = 0
    rows: int = 0
    int8: Counter = field(default_factory=Counter)
    floats: Counter = field(default_factory=Counter)
    own: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)


class _Operators(TorchDispatchMode):
    """Calls `look` with each operator that torch dispatches, and its tensors."""

    look = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # a subclass first does what it means by the operator, and that is seen then
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        if self.look is not None:
            self.look(func, [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)])
        return func(*args, **kwargs)


class _Look:
    """Between the beginning and the end of one Linear's call."""

    def __init__(self, model, seen: _Seen, operators: _Operators):
        self.record, self.seen, self.operators = host_backend.record_of(model), seen, operators

    def begin(self, module, args) -> None:
        x = args[0]
        self.seen.calls += 1
        self.seen.rows += x.numel() // max(x.shape[-1], 1)
        self.size = {module.out_features, module.in_features}
        self.before = self._counts()
        self.operators.look = self._operator

    def end(self) -> None:
        self.operators.look = None
        calls, ways, reasons = (now - before for now, before in zip(self._counts(), self.before, strict=True))
        way = next(iter(ways), None)
        for implementation in calls:
            self.seen.own[implementation, way] += calls[implementation]
        self.seen.reasons.update(reasons)

    def _counts(self) -> tuple[Counter, Counter, Counter]:
        run = getattr(short_way._thread, "run", None)
        calls, ways, reasons = Counter(), Counter(), Counter()
        if self.record is not None:
            calls.update(self.record.calls)
            reasons.update({f"declined: {reason}": n for reason, n in self.record.declined.items()})
        if run is not None:
            calls.update(run.calls)
            ways.update(run.ways)
            reasons.update(run.reasons)
        return calls, ways, reasons

    def _operator(self, func, tensors: list[torch.Tensor]) -> None:
        space, _, name = func.name().partition("::")
        name = name.partition(".")[0]
        integers = [x for x in tensors if x.dtype in (torch.int8, torch.uint8)]
        if space == "aten":
            if name not in _PRODUCTS:
                return
            if len(integers) >= 2:
                self.seen.int8[f"aten::{name}"] += 1
            elif any(x.dim() >= 2 and set(x.shape[-2:]) == self.size for x in tensors if x.is_floating_point()):
                self.seen.floats[f"aten::{name}"] += 1
        elif integers and "quant" not in name:
            self.seen.int8[f"{space}::{name}"] += 1


class _Clock:
    """Milliseconds of named laps, and of what lies between start and stop."""

    def __init__(self, device: torch.device):
        self.device, self.laps = device, []
        self.ms: dict[str, float] = {}
        self.total_ms = 0.0

    def now(self):
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def lap(self, name: str) -> _Lap:
        return _Lap(self, name)

    def start(self) -> None:
        self.laps.clear()
        self.begun = self.now()

    def stop(self) -> None:
        ended = self.now()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.total_ms = self._between(self.begun, ended)
        for name, begun, done in self.laps:
            self.ms[name] = self.ms.get(name, 0.0) + self._between(begun, done)

    def _between(self, begun, ended) -> float:
        return begun.elapsed_time(ended) if self.device.type == "cuda" else (ended - begun) * 1e3


class _Lap:
    """One Linear's call on a clock."""

    def __init__(self, clock: _Clock, name: str):
        self.clock, self.name = clock, name

    def begin(self, module, args) -> None:
        self.begun = self.clock.now()

    def end(self) -> None:
        self.clock.laps.append((self.name, self.begun, self.clock.now()))


@contextlib.contextmanager
def _watching(modules: dict[str, torch.nn.Module], onlooker: Callable):
    """Let `onlooker(name)` see the beginning and the end of each call of the modules."""
    handles = []
    try:
        for name, module in modules.items():
            look = onlooker(name)
            handles.append(module.register_forward_pre_hook(look.begin))
            handles.append(module.register_forward_hook(lambda *_, look=look: look.end()))
        yield
    finally:
        for handle in handles:
            handle.remove()


def _stored(module: torch.nn.Module) -> str:
    weight = getattr(module, "weight", None)
    layout = getattr(weight, "_layout_cls", None)
    if layout is not None:
        codes = getattr(weight, "_qdata", None)
        return f"INT8, {layout}" if codes is not None and codes.dtype == torch.int8 else str(layout)
    held = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    if any(x.dtype == torch.int8 and x.dim() >= 2 for x in held):
        return "INT8 codes of another pack"
    return "nothing" if weight is None else str(weight.dtype).removeprefix("torch.")


def _judged(name: str, module, seen: _Seen, decision: str, ms: float) -> LayerAudit:
    stored = _stored(module)
    is_int8 = stored.startswith("INT8")
    reason = "; ".join(seen.reasons)
    if seen.own:
        kernels = {f"native_int8 {implementation}{_OWN_WAYS.get(way, '')}" for implementation, way in seen.own}
        complete = sum(seen.own.values()) >= seen.calls
        verdict, kernel = INT8 if complete else FAKE, ", ".join([*sorted(kernels), *([] if complete else seen.floats)])
    elif seen.int8 and not seen.floats:
        verdict, kernel = INT8, ", ".join(seen.int8)
    elif seen.floats:
        verdict, kernel = FAKE if is_int8 else FLOAT, ", ".join(seen.floats)
        if is_int8 and not reason and hasattr(module, "weight_function"):
            reason = short_way._why_not_int8(module)
        elif not is_int8:
            reason = decision
    elif seen.rows:
        verdict, kernel = UNSEEN, "a kernel that torch does not dispatch"
    else:
        verdict, kernel, reason = (
            IDLE,
            "nothing",
            "not called in this forward, or its weight was used without calling it",
        )
    return LayerAudit(name, (module.out_features, module.in_features), stored, verdict, kernel, reason, seen.rows, ms)
