"""The result of a benchmark: the arithmetic over what was measured, its table, plot and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass

import torch

from . import plots

# of the JSON file
FORMAT = 1
_SHOWN = 12


@dataclass(frozen=True)
class Shape:
    """x [m, k] times weight [n, k], rotated by groups of `rotation_group` columns (0 for none)."""

    m: int
    n: int
    k: int
    rotation_group: int
    bias: bool

    @property
    def name(self) -> str:
        """Short form "4352x13824x4608" of M, N, K."""
        return f"{self.m}x{self.n}x{self.k}"


@dataclass(frozen=True)
class ShapeTime:
    """Microseconds of one call of a shape; measured with `measured_rows` rows and scaled to all where they differ.

    int8_us: with the quantisation of the input. fp8_us: None where the card or the shape has no fp8.
    """

    shape: Shape
    float_us: float
    int8_us: float
    fp8_us: float | None
    implementation: str
    measured_rows: int


@dataclass(frozen=True)
class SizeResult:
    """One resolution.

    rows_from: how the numbers of rows are known.
    shapes: each with its calls in a step.
    step_ms: one forward of the MODEL as it is; None where none could be made.
    is_int8: the MODEL that ran was the INT8 one.
    """

    size: str
    rows_from: str
    shapes: tuple[tuple[ShapeTime, int], ...]
    step_ms: float | None
    is_int8: bool

    @property
    def float_ms(self) -> float:
        """Sum over the float Linears of a step."""
        return sum(time.float_us * count for time, count in self.shapes) / 1e3

    @property
    def int8_ms(self) -> float:
        """Sum over the INT8 Linears of a step."""
        return sum(time.int8_us * count for time, count in self.shapes) / 1e3

    @property
    def fp8_ms(self) -> float | None:
        """Sum over the fp8 Linears of a step; None unless every shape has fp8."""
        if any(time.fp8_us is None for time, _ in self.shapes):
            return None
        return sum((time.fp8_us or 0.0) * count for time, count in self.shapes) / 1e3

    @property
    def rest_ms(self) -> float | None:
        """What a step does beside these Linears: at least 0."""
        if self.step_ms is None:
            return None
        return max(self.step_ms - (self.int8_ms if self.is_int8 else self.float_ms), 0.0)

    @property
    def fp8_step_ms(self) -> float | None:
        """A step whose Linears are fp8, from the rest of the measured one; None without either."""
        return None if self.rest_ms is None or self.fp8_ms is None else self.rest_ms + self.fp8_ms

    def amdahl(self) -> dict[str, float] | None:
        """float_step_ms, int8_step_ms, gain, share (of the Linears in the float step), bound; None without a step."""
        if self.rest_ms is None:
            return None
        float_step, int8_step = self.rest_ms + self.float_ms, self.rest_ms + self.int8_ms
        return {
            "float_step_ms": float_step,
            "int8_step_ms": int8_step,
            "gain": float_step / int8_step,
            "share": self.float_ms / float_step,
            "bound": float_step / self.rest_ms if self.rest_ms > 0 else math.inf,
        }


@dataclass(frozen=True)
class BenchmarkResult:
    """A whole run: facts of machine and model, the sizes, and sentences for the user."""

    machine: Mapping[str, str | None]
    model: Mapping[str, object]
    sizes: tuple[SizeResult, ...]
    notes: tuple[str, ...] = ()

    def summary(self) -> str:
        """One line for the node: warnings first, then the gain and its bound at each size."""
        parts = list(self.notes)
        for result in self.sizes:
            found = result.amdahl()
            if found is None:
                linears = result.float_ms / result.int8_ms
                parts.append(f"{result.size}: Linears {linears:.2f} times as fast in INT8, no step was measured")
            else:
                parts.append(
                    f"{result.size}: a step is {found['gain']:.2f} times as fast in INT8; at most {found['bound']:.2f}"
                )
        return "\n".join(parts)

    def table(self) -> str:
        """The text for a person."""
        told = self.machine
        kind = self.model["float_type"]
        lines = [
            *self.notes,
            f"{told['device']} ({told['architecture']}), driver {told['driver'] or '-'}, torch {told['torch']}, "
            f"Triton {told['triton'] or 'none'}",
            f"{self.model['class']}, {'INT8' if self.model['int8'] else 'float'} MODEL, {self.model['linears']} Linears that "
            f"{'are' if self.model['int8'] else 'would be'} INT8; weights {_mib(self.model['weights_bytes'])} as it is, "
            f"{_mib(self.model['weights_bytes_bf16'])} in bf16, {_mib(self.model['weights_bytes_int8'])} in INT8",
        ]
        for result in self.sizes:
            lines += ["", *_size_lines(result, str(kind))]
        return "\n".join(lines)

    def plot(self) -> torch.Tensor:
        """The picture for a person, [1, height, width, 3] in 0..1."""
        panels: list[plots.Panel] = []
        kind = str(self.model["float_type"])
        for result in self.sizes:
            most = sorted(result.shapes, key=lambda pair: -pair[0].float_us * pair[1])[:_SHOWN]
            labels = tuple(f"{time.shape.name}, {count} times" for time, count in most)
            series = {
                kind: tuple(time.float_us for time, _ in most),
                "INT8": tuple(time.int8_us for time, _ in most),
            }
            if any(time.fp8_us is not None for time, _ in most):
                series["fp8"] = tuple(math.nan if time.fp8_us is None else time.fp8_us for time, _ in most)
            title = f"{self.machine['device']}, {self.model['class']}, {result.size}: one Linear, M x N x K"
            panels.append(plots.Bars(title, labels, series, "microseconds, less is better"))
            panels.append(_step_bars(result, kind))
        return plots.draw(panels)

    def to_json(self, date: str) -> str:
        """Everything measured; holds no path and no name of a user."""
        sizes = [
            {
                **asdict(result),
                "shapes": [
                    {**asdict(time.shape), **{k: v for k, v in asdict(time).items() if k != "shape"}, "count": count}
                    for time, count in result.shapes
                ],
                "float_ms": result.float_ms,
                "int8_ms": result.int8_ms,
                "fp8_ms": result.fp8_ms,
                "fp8_step_ms": result.fp8_step_ms,
                "amdahl": _finite(result.amdahl()),
            }
            for result in self.sizes
        ]
        body = {
            "format": FORMAT, "date": date, "machine": dict(self.machine), "model": dict(self.model), "sizes": sizes,
            "notes": list(self.notes),
        }  # fmt: skip
        return json.dumps(body, indent=1, allow_nan=False)


def _size_lines(result: SizeResult, kind: str) -> list[str]:
    lines = [
        f"{result.size}; rows {result.rows_from}",
        f"{'M':>7} {'N':>6} {'K':>6} {'group':>5} {'calls':>5} {kind + ' us':>10} {'INT8 us':>10} {'gain':>6} {'fp8 us':>10}",
    ]
    for time, count in sorted(result.shapes, key=lambda pair: -pair[0].float_us * pair[1]):
        shape, fp8 = time.shape, f"{time.fp8_us:>10.1f}" if time.fp8_us is not None else f"{'-':>10}"
        lines.append(
            f"{shape.m:>7} {shape.n:>6} {shape.k:>6} {shape.rotation_group or '-':>5} {count:>5} {time.float_us:>10.1f} "
            f"{time.int8_us:>10.1f} {time.float_us / time.int8_us:>6.2f} {fp8}"
            + (f"  from {time.measured_rows} rows" if time.measured_rows != shape.m else "")
        )
    ways = "/".join(sorted({time.implementation for time, _ in result.shapes}))
    fp8 = "" if result.fp8_ms is None else f", fp8 {result.fp8_ms:.2f}"
    lines.append(
        f"all these Linears of a step, ms: {kind} {result.float_ms:.2f}, INT8 ({ways}) {result.int8_ms:.2f}{fp8}; each INT8 "
        "Linear quantises its input here, where in a step those that read one tensor share that, and fused blocks save more"
    )
    found = result.amdahl()
    if found is None:
        return [*lines, "no step was measured, so no bound can be given"]
    ran, other = ("INT8", kind) if result.is_int8 else (kind, "INT8")
    computed = found["float_step_ms"] if result.is_int8 else found["int8_step_ms"]
    fp8 = "" if result.fp8_step_ms is None else f", fp8 {result.fp8_step_ms:.2f}"
    lines.append(
        f"one forward: {ran} {result.step_ms:.2f} ms measured, {other} {computed:.2f}{fp8} ms computed from it: INT8 is "
        f"{found['gain']:.2f} times as fast"
    )
    if result.rest_ms == 0:
        return [*lines, "the Linears alone took longer than the forward, so no bound can be given"]
    return [
        *lines,
        f"Amdahl: these Linears take {found['share']:.0%} of the {kind} step; if they took no time it would be "
        f"{found['bound']:.2f} times as fast, and no quantisation of them can give more",
    ]


def _step_bars(result: SizeResult, kind: str) -> plots.Bars:
    found = result.amdahl()
    has_fp8 = result.fp8_ms is not None
    labels = (kind, "INT8", "fp8") if has_fp8 else (kind, "INT8")
    linears = (result.float_ms, result.int8_ms, result.fp8_ms)[: len(labels)]
    if found is None:
        return plots.Bars(f"{result.size}: these Linears of a step", labels, {"Linears": linears}, "milliseconds")
    title = f"{result.size}: one step, {found['gain']:.2f} times as fast; at most {found['bound']:.2f}"
    steps = (found["float_step_ms"], found["int8_step_ms"], result.fp8_step_ms)[: len(labels)]
    return plots.Bars(title, labels, {"step": steps, "these Linears": linears}, "milliseconds")


def _mib(count: object) -> str:
    return f"{float(str(count)) / 2**20:.1f} MiB"


def _finite(found: dict[str, float] | None) -> dict[str, float | None] | None:
    if found is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in found.items()}
