"""A measurement of a few seconds for the capability check: does INT8 pay on this card, and is the card as fast as it should be?

The Linears are measured as INT8 Benchmark measures them, with the quantisation of their inputs; a whole step, with what is
not a Linear, is for INT8 Benchmark to tell.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import torch

from ...kernels.capability import Device, detect
from ...kernels.dispatch import Int8Error
from ...kernels.tuning import EventTimer
from . import benchmark, tuned_tiles
from .benchmark_result import Shape, ShapeTime

BUDGET_S = 5.0
# of a picture of 1024 px with its prompt, in diffusion transformers of 9 to 12 billion parameters
TYPICAL = tuple(
    Shape(m, n, k, 256, False)
    for m, n, k in (
        (4608, 13824, 4608),
        (4608, 4608, 4608),
        (4608, 12288, 4608),
        (4608, 4608, 12288),
        (4608, 3072, 3072),
        (512, 3072, 3072),
    )
)
_PIXELS, _TEXT_TOKENS = 1024, 256


def measure(
    torch_device: torch.device, model=None, progress: Callable[[float], None] = lambda done: None, budget_s=BUDGET_S
) -> list[str]:
    """Lines of text: a verdict, what is wrong with the card if anything is, and each Linear in the float type and in INT8.

    Args:
        torch_device: what runs.
        model: measure the Linears of this MODEL that take the most work, at 1024 px; None for `TYPICAL`.
        progress: called with the part that is done, 0 to 1; may raise to stop.
        budget_s: seconds after which no further Linear is begun. The first measurement of a card also compiles kernels.
    """
    facts = detect(torch_device)
    reason = reason_not_to(facts)
    if reason is not None:
        return [f"Nothing was measured: {reason}"]
    # RTX 20 has no bf16
    dtype = torch.bfloat16 if facts.compute_capability >= (8, 0) else torch.float16
    try:
        shapes = TYPICAL if model is None else heaviest(model)
        timer, start = EventTimer(torch_device), time.perf_counter()
        troubles = [benchmark.health(torch_device, facts, timer)]
        found: list[ShapeTime] = []
        for done, shape in enumerate(shapes):
            if found and time.perf_counter() - start > budget_s:
                break
            progress(done / len(shapes))
            found.append(benchmark.measure_shape(shape, torch_device, dtype, facts, timer))
        troubles.append(benchmark.health(torch_device, facts, timer))
    except Int8Error as error:
        return [f"Nothing was measured: {error}"]
    except torch.OutOfMemoryError as error:
        return [
            f"Nothing was measured: the GPU's memory is full ({str(error).splitlines()[0]}). Free some and queue again."
        ]
    progress(1.0)
    # a card that throttles half-way is named once
    trouble = next((sentence for sentence in troubles if sentence), "")
    return lines(found, trouble, len(shapes) - len(found), "bf16" if dtype == torch.bfloat16 else "fp16")


def reason_not_to(facts: Device) -> str | None:
    """One sentence that says why this device is not measured; None when it can be."""
    if facts.type != "cuda":
        return (
            f"{facts.name} is no CUDA device, and torch has no fast INT8 product for it. INT8 saves memory here, not time; "
            "INT8 Benchmark measures it all the same."
        )
    if facts.compute_capability is None:
        return f"{facts.name} is no NVIDIA card, and the fused kernel and this timer are written for those."
    if not facts.int8_tensor_cores:
        return f"{facts.name} has no tensor cores for int8, so there is no time to gain."
    return None


def heaviest(model, most: int = 6) -> tuple[Shape, ...]:
    """The shapes of the MODEL's INT8 Linears that take the most work in a step at 1024 px, the heaviest first.

    Raises:
        BenchmarkError: the MODEL has none.
    """
    work: Counter[Shape] = Counter()
    # the most are those of both branches of the guidance in one batch
    m = max(tuned_tiles.rows_of(model, _PIXELS, _PIXELS, 1, _TEXT_TOKENS)) // 2
    for layer in benchmark.layers_of(model):
        work[Shape(m, layer.n, layer.k, layer.rotation_group, layer.bias)] += m * layer.n * layer.k
    return tuple(shape for shape, _ in work.most_common(most))


def lines(found: list[ShapeTime], trouble: str, left_out: int, float_type: str) -> list[str]:
    """The text of what was measured; the first line is the verdict."""
    gains = [entry.float_us / entry.int8_us for entry in found]
    mean = math.exp(sum(map(math.log, gains)) / len(gains))
    if trouble:
        verdict = trouble
    elif mean >= 1.05:
        verdict = f"INT8 Linears run {mean:.2f} times as fast as {float_type} here (geometric mean); a step gains less."
    else:
        verdict = f"INT8 Linears run {mean:.2f} times as fast as {float_type} here (geometric mean): no gain in time."
    text = [verdict]
    for entry, gain in zip(found, gains, strict=True):
        fp8 = "" if entry.fp8_us is None else f", fp8 {entry.fp8_us:.0f} us"
        text.append(
            f"- {entry.shape.name} (rows x out x in): {float_type} {entry.float_us:.0f} us, INT8 {entry.int8_us:.0f} us "
            f"by {entry.implementation}, {gain:.2f}x{fp8}"
        )
    if left_out:
        text.append(f"- {left_out} more were left out: the time was over. A second run needs no time to compile.")
    return text
