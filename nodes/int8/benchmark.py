"""What INT8 is worth for one MODEL on this machine: its Linears one by one, a step, memory, and the most it can give.

Each Linear is timed by itself at the rows that it has in a step of the MODEL: the float product, the INT8 kernel with the
quantisation of its input, and fp8 where the card has it. One forward of the MODEL as it is gives the step:

    rest = step - sum(Linears as they are in it),  float step = rest + sum(float),  INT8 step = rest + sum(INT8)
    share = sum(float) / float step,  Amdahl's bound = 1 / (1 - share): the gain if these Linears took no time at all
"""

from __future__ import annotations

import datetime
import logging
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels import PreparedLinear, capability, quantize_rows, tuning
from ...kernels.dispatch import Int8Error
from . import compare, direct_linears, loader, patcher, quality, save, trajectory, tuned_tiles
from .benchmark_result import BenchmarkResult, Shape, ShapeTime, SizeResult

log = logging.getLogger("native_int8.benchmark")

# multiplications and additions that a CPU may be asked for: in one Linear, where more rows are left out, and in one forward
_CPU_LINEAR, _CPU_FORWARD = 4e9, 4e11
_LEAST_COSINE = 0.99
FILE_PREFIX = "native_int8/benchmark"
_FP8_MAX = 448.0
_ROUNDS = {"cuda": 8}
_SCRATCH_BYTES = 512 << 20
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}

Progress = Callable[[float], None]


class BenchmarkError(Int8Error, RuntimeError):
    """Nothing can be measured; the message says why."""


@dataclass(frozen=True)
class Layer:
    """A Linear that is, or would become, INT8."""

    name: str
    n: int
    k: int
    rotation_group: int
    bias: bool


def benchmark(
    model,
    sizes: list[tuple[int, int, int]],
    *,
    text_tokens: int,
    conditioning: list | None = None,
    progress: Progress,
) -> BenchmarkResult:
    """Measure a MODEL, INT8 or float, at each size; the MODEL stays as it is.

    Args:
        sizes: (width, height, frames) in pixels; 1 frame for pictures.
        text_tokens: length of the made-up prompt.
        conditioning: a real one for the forward; None to make one up.
        progress: called with the part that is done, 0 to 1; may raise to stop.
    Raises:
        BenchmarkError: the MODEL has no Linear for INT8, or the kernel's result is wrong.
    """
    device = model.load_device
    facts = capability.detect(device)
    layers = layers_of(model)
    tuned_tiles.use(device)
    timer = tuning.EventTimer(device) if device.type == "cuda" else HostTimer()
    notes = [_cpu_note()] if device.type == "cpu" else []
    troubles = [health(device, facts, timer)]
    times: dict[Shape, ShapeTime] = {}
    results = []
    for number, (width, height, frames) in enumerate(sizes):

        def part(done: float, number: int = number) -> None:
            progress((number + done) / len(sizes))

        rows, step_ms, source = _forward(
            model, layers, (width, height, frames), text_tokens, conditioning, lambda done: part(done / 2)
        )
        counts: Counter[Shape] = Counter()
        for layer in layers:
            for m, calls in rows[layer.name].items():
                counts[Shape(m, layer.n, layer.k, layer.rotation_group, layer.bias)] += calls
        for done, shape in enumerate(counts):
            part(0.5 + done / len(counts) / 2)
            if shape not in times:
                times[shape] = measure_shape(shape, device, model.model.get_dtype_inference(), facts, timer)
        size = f"{width}x{height}" + (f"x{frames}" if frames > 1 else "")
        shapes = tuple((times[shape], count) for shape, count in counts.items())
        results.append(SizeResult(size, source, shapes, step_ms, patcher.is_int8(model)))
    progress(1.0)
    troubles.append(health(device, facts, timer))
    notes += [sentence for sentence in dict.fromkeys(troubles) if sentence]
    machine = {
        "device": facts.name, "architecture": facts.sm, "driver": facts.driver, "torch": facts.torch, "cuda": facts.cuda,
        "triton": facts.triton, "platform": facts.platform,
    }  # fmt: skip
    return BenchmarkResult(machine, _model_facts(model, layers), tuple(results), tuple(notes))


def parse_sizes(text: str) -> list[tuple[int, int, int]]:
    """(width, height, frames) of each size in a text such as "1024x1024, 832x480x81".

    Raises:
        BenchmarkError: a part of the text is no size.
    """
    sizes = []
    for part in re.split(r"[,;\n]", text):
        found = re.fullmatch(r"(\d{2,5})\s*[x*]\s*(\d{2,5})(?:\s*[x*]\s*(\d{1,4}))?", part.strip().lower())
        if found:
            sizes.append((int(found[1]), int(found[2]), int(found[3] or 1)))
        elif part.strip():
            raise BenchmarkError(
                f"INT8 Benchmark got the resolution {part.strip()!r}. Width x height in pixels is needed, for a video with the "
                "number of frames, separated by commas; for instance 1024x1024, 832x480x81."
            )
    if not sizes:
        raise BenchmarkError("INT8 Benchmark got no resolution. At least one is needed; for instance 1024x1024.")
    return sizes


def write(result: BenchmarkResult, folder: str) -> Path:
    """Write the JSON file of a result into `folder` under a new name, and return its path."""
    path = save.free_name(folder, FILE_PREFIX, ".json")
    date = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    path.write_text(result.to_json(date), encoding="utf-8")
    return path


def layers_of(model) -> list[Layer]:
    """The Linears of an INT8 MODEL that are INT8; of a float MODEL those that the loader would quantise.

    Raises:
        BenchmarkError: there are none.
    """
    modules = compare.linears(model)
    if patcher.is_int8(model):
        groups = {name: compare.rotation_group(module) for name, module in compare.int8_linears(model).items()}
    else:
        groups = {d.layer: d.rotation_group for d in loader.describe(model).decisions if d.is_int8}
    layers = [
        Layer(name, modules[name].out_features, modules[name].in_features, group, modules[name].bias is not None)
        for name, group in groups.items()
        if name in modules
    ]
    if not layers:
        raise BenchmarkError(
            f"INT8 Benchmark: {type(model.model).__name__} has no Linear that is INT8 or would become it. A diffusion "
            "transformer is needed; connect one from Load DiT (Native INT8) or Load Diffusion Model."
        )
    return layers


class HostTimer:
    """Median microseconds of calls on a CPU, each round running every call once; half a second each at most."""

    def __call__(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median microseconds by name."""
        slowest = max(self._once(call) for call in calls.values())
        rounds = int(min(max(5e5 / max(slowest, 1.0), 1), 15))
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(self._once(call))
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}

    @staticmethod
    def _once(call: Callable[[], object]) -> float:
        before = time.perf_counter()
        call()
        return (time.perf_counter() - before) * 1e6


def _forward(model, layers, size, text_tokens, conditioning, progress: Progress):
    """({layer: {rows: calls}} of one forward, its milliseconds or None, where the rows come from)."""
    from comfy import model_management

    width, height, frames = size
    estimate = {layer.name: {_rows(model, size, text_tokens): 1} for layer in layers}
    device = model.load_device
    work = sum(2 * m * layer.n * layer.k for layer in layers for m in estimate[layer.name])
    if device.type == "cpu" and work > _CPU_FORWARD:
        return estimate, None, "estimated: a forward of this size takes too long on a CPU"
    latent = trajectory.empty_latent(model, width, height, frames, 1)
    try:
        positive = conditioning or trajectory.made_up_conditioning(model, text_tokens)
        seen, step_ms = timed_forward(model, {layer.name for layer in layers}, positive, latent, progress)
    except (model_management.InterruptProcessingException, torch.OutOfMemoryError):
        raise
    # a model may raise anything at an input that was made up; a user's own conditioning is not excused
    except Exception as error:
        if conditioning is not None:
            raise
        log.info("no forward of %s with a made-up input", type(model.model).__name__, exc_info=True)
        told = str(error).strip().splitlines()
        why = told[0] if told else type(error).__name__
        return (
            estimate,
            None,
            f"estimated: no forward could be made with a made-up input ({why}); connect a conditioning",
        )
    rows = {layer.name: seen.get(layer.name) or estimate[layer.name] for layer in layers}
    source = "seen in a forward of this MODEL" + ("" if conditioning else " with a made-up prompt")
    lost = sum(layer.name not in seen for layer in layers)
    return (
        rows,
        step_ms,
        source + (f"; of {lost} layers estimated, since they were not called one by one" if lost else ""),
    )


def timed_forward(model, names: set[str], positive: list, latent: dict, progress: Progress):
    """({layer: {rows: calls}} of one forward, median milliseconds), as the sampler calls the MODEL at cfg 1.

    Args:
        names: the Linears to watch.
        progress: as for `benchmark`.
    """
    seen: dict[str, Counter] = {}
    device = model.load_device

    def hook(name: str):
        def look(_, args) -> None:
            x = args[0]
            seen.setdefault(name, Counter())[x.numel() // x.shape[-1]] += 1

        return look

    samples: list[float] = []
    rounds = _ROUNDS.get(device.type, 2)

    def loop(denoise, x, sigmas):
        modules = compare.linears(model)
        handles = (modules[name].register_forward_pre_hook(hook(name)) for name in names)
        with compare.hooks(handles), direct_linears.called(compare.inner_of(model)):
            denoise(x, sigmas[0])
        progress(1 / (rounds + 2))
        for i in range(rounds + 1):
            _synchronise(device)
            before = time.perf_counter()
            denoise(x, sigmas[0])
            _synchronise(device)
            samples.append((time.perf_counter() - before) * 1e3)
            progress((i + 2) / (rounds + 2))
        return x

    trajectory.run(model, loop, positive, None, latent, seed=0, steps=1)
    # the first one warms up
    return seen, sorted(samples[1:])[rounds // 2]


def _rows(model, size: tuple[int, int, int], text_tokens: int) -> int:
    """Tokens of a picture or video and its prompt."""
    width, height, frames = size
    side = tuned_tiles.pixels_per_token(model)
    latent_format = model.get_model_object("latent_format")
    depth = (frames - 1) // latent_format.temporal_downscale_ratio + 1 if latent_format.latent_dimensions == 3 else 1
    return -(-width // side) * -(-height // side) * depth + text_tokens


def measure_shape(shape: Shape, device: torch.device, dtype: torch.dtype, facts, timer) -> ShapeTime:
    """Time one shape; on a CPU with fewer rows where it would take long, which is then scaled.

    Raises:
        BenchmarkError: the INT8 kernel's result is not close to the float product.
    """
    from comfy import model_management

    m, n, k = shape.m, shape.n, shape.k
    measured = m
    if device.type == "cpu":
        measured = max(1, min(m, int(_CPU_LINEAR / (2 * n * k))))
    else:
        model_management.free_memory(8 * (n * k + m * k + m * n) + _SCRATCH_BYTES, device)
    generator = torch.Generator(device).manual_seed(0)

    def normal(*dims: int) -> torch.Tensor:
        return torch.randn(dims, device=device, dtype=torch.float32, generator=generator)

    x, w = normal(measured, k).to(dtype), (normal(n, k) * k**-0.5).to(dtype)
    bias = normal(n).to(dtype) if shape.bias else None
    codes, scale = quantize_rows(w, rotation_group=shape.rotation_group)
    prepared = PreparedLinear(codes, scale, rotation_group=shape.rotation_group)
    calls: dict[str, Callable[[], torch.Tensor]] = {
        "float": lambda: torch.nn.functional.linear(x, w, bias),
        "int8": lambda: prepared(x, codes, scale, bias),
    }
    close = quality.cosine(calls["int8"](), calls["float"]())
    if not close >= _LEAST_COSINE:
        raise BenchmarkError(
            f"INT8 Benchmark: the INT8 product of {shape.name} by {prepared.implementation} has cosine {close:.4f} to the "
            f"float one on {facts.name}. At least {_LEAST_COSINE} is needed, so no times are given. Please report this card."
        )
    fp8 = _fp8_call(x, w, bias, facts)
    if fp8 is not None:
        calls["fp8"] = fp8
    factor = m / measured
    us = {name: value * factor for name, value in timer(calls).items()}
    return ShapeTime(shape, us["float"], us["int8"], us.get("fp8"), prepared.implementation, measured)


def _fp8_call(x, w, bias, facts) -> Callable[[], torch.Tensor] | None:
    """fp8 as ComfyUI's `--fast fp8_matrix_mult` multiplies: one scale of 1, the input clamped and cast; None where it cannot."""
    if facts.type != "cuda" or facts.hip or (facts.compute_capability or (0, 0)) < (8, 9):
        return None
    if x.shape[1] % 16 or w.shape[0] % 16 or x.dtype == torch.float32:
        return None
    one = torch.ones((), device=x.device, dtype=torch.float32)
    weight = w.to(torch.float8_e4m3fn).t()

    def call() -> torch.Tensor:
        codes = torch.clamp(x, -_FP8_MAX, _FP8_MAX).to(torch.float8_e4m3fn)
        return torch._scaled_mm(codes, weight, one, one, bias=bias, out_dtype=x.dtype)

    try:
        call()
    except RuntimeError as error:
        log.info("no fp8 product here: %s", error)
        return None
    return call


def health(device: torch.device, facts, timer) -> str:
    """What is wrong with the card's speed in bf16; empty when nothing is, or it cannot be told."""
    if device.type != "cuda" or facts.hip or (facts.compute_capability or (0, 0)) < (8, 0):
        return ""
    measured = tuning.measured_bf16_tflops(device, timer)
    rated = tuning.rated_bf16_tflops(facts, tuning.boost_mhz(device))
    if measured >= tuning.HEALTHY_PART * rated:
        return ""
    return (
        f"THROTTLED: {facts.name} runs bf16 at {measured:.0f} TFLOPS, rated for {rated:.0f}. The card is hot, limited or busy, "
        "and the times mislead. Let it cool, close other programs that use it, lift a power limit, and run again."
    )


def _cpu_note() -> str:
    return (
        "This is a CPU: the times say nothing about a GPU. INT8 on a CPU saves memory, not time. Where a Linear has more rows "
        "than a CPU does quickly, fewer are measured and the time is scaled."
    )


def _model_facts(model, layers: list[Layer]) -> dict:
    numbers, rows = sum(layer.n * layer.k for layer in layers), sum(layer.n for layer in layers)
    here, is_int8 = model.model_size(), patcher.is_int8(model)
    dtype = model.model.get_dtype_inference()
    modules = compare.linears(model)
    as_float, as_int8 = 2 * numbers, numbers + 4 * rows
    now = as_int8 if is_int8 else sum(modules[layer.name].weight.nbytes for layer in layers)
    return {
        "class": type(model.model).__name__,
        "int8": is_int8,
        "float_type": _DTYPES.get(dtype, str(dtype).removeprefix("torch.")),
        "linears": len(layers),
        "weights_bytes": here,
        "weights_bytes_bf16": here - now + as_float,
        "weights_bytes_int8": here - now + as_int8,
    }


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        getattr(torch, device.type).synchronize()
