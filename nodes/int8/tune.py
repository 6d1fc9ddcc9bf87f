"""Measure the fastest tiles for a MODEL on the card that runs it, and keep them; the work of the node INT8 Tune Kernels."""

import logging
from collections.abc import Callable

import torch

from ...kernels.capability import detect
from ...kernels.tuning import ThrottledCard, TuningResult, is_tunable, tune
from . import tuned_tiles

log = logging.getLogger("native_int8.tune")

# what the measured operands, the reference and its scratch take at most, beside N * K and M * N
_SCRATCH_BYTES = 512 << 20


def tune_model(
    model,
    rows: tuple[int, ...],
    progress: Callable[[int, int, str], None],
    interrupted: Callable[[], bool],
) -> str:
    """Tune the INT8 Linears of `model` for these numbers of rows; returns the report. Its first line says it all.

    Does nothing, and says why, when the MODEL has no INT8 Linears, the device has no Triton kernel, or is throttled.
    """
    device = model.load_device
    facts = detect(device)
    shapes = sorted({(linear.out_features, linear.in_features) for linear in tuned_tiles.linears_of(model)})
    if not shapes:
        return (
            "Nothing was measured: this MODEL has no INT8 Linears. Connect the MODEL of Load DiT (Native INT8) or of "
            "INT8 Patch Model."
        )
    reason = is_tunable(facts)
    if reason is not None:
        return f"Nothing was measured: {reason}"
    _make_room(device, shapes, rows)
    tuned_tiles.use(device)
    try:
        result = tune(
            facts, shapes, m_rows=rows, torch_device=device, progress=progress, interrupted=interrupted
        )  # fmt: skip
    except ThrottledCard as error:
        return f"Nothing was kept: {error}"
    return "\n".join((_keep(device, result), result.report()))


def _keep(device: torch.device, result: TuningResult) -> str:
    """Write and apply the result; one line that says what came of it."""
    if not result.entries:
        return "Nothing was measured."
    faster = [entry.gain for entry in result.entries if entry.gain > 1]
    line = f"{len(result.entries)} shapes measured, {len(faster)} faster than before"
    if faster:
        line += f" (up to {max(faster):.2f} times)"
    try:
        return f"{line}, kept in {tuned_tiles.keep(device, result)}"
    except OSError as error:
        return f"{line}, used until ComfyUI ends: the file could not be written ({error})"


def _make_room(device: torch.device, shapes: list[tuple[int, int]], rows: tuple[int, ...]) -> None:
    """Ask the host for the GPU memory of the largest product: fp32 while codes are made, then int8 and outputs."""
    from comfy import model_management

    largest = max(5 * k * (n + max(rows)) + 8 * max(rows) * n for n, k in shapes)
    model_management.free_memory(largest + _SCRATCH_BYTES, device)
