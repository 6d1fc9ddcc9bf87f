"""Float and fp8 weights: what is quantised while it is loaded, or kept."""

from ..checkpoint import FLOAT_DTYPES, FP8_DTYPES, CheckpointError
from .spec import FP8_FORMATS, NATIVE, LayerSpec, Stored


def fp8(stored: Stored) -> LayerSpec | None:
    """fp8, with one scale per tensor or row, or none."""
    if stored.weight.dtype not in FP8_DTYPES:
        return None
    if stored.format == NATIVE:
        raise marker_conflict(stored)
    scale, rows = stored.scale_info, (stored.weight.shape or (1,))[0]
    if scale is not None and (scale.dtype not in FLOAT_DTYPES or scale.count not in (1, rows)):
        raise stored.stop(
            f"{scale.count} scales {list(scale.shape)} of {scale.dtype} for an fp8 weight {list(stored.weight.shape)}",
            f"1 or {rows} float scales are needed",
            "use the bf16 file of this model",
            stored.scale_suffix(),
        )
    if scale is None and stored.format in FP8_FORMATS:
        raise stored.stop(
            f"an fp8 weight {list(stored.weight.shape)} is marked as scaled and has no scale",
            f"a scale `{stored.header.key(stored.layer)}.weight_scale` is needed",
            "use another file: without its scale the weight is wrong",
        )
    return LayerSpec(
        kind="fp8_scaled" if scale is not None else "float",
        format="fp8 scaled" if scale is not None else "fp8",
        dtype=stored.weight.dtype,
        shape=stored.weight.shape,
        weight=stored.name,
        scale=stored.scale,
        per_row=scale is not None and scale.count > 1,
        extras=stored.extras,
    )


def plain(stored: Stored) -> LayerSpec | None:
    """fp64, fp32, fp16 or bf16."""
    if stored.weight.dtype not in FLOAT_DTYPES:
        return None
    if stored.scale is not None or stored.format is not None:
        raise marker_conflict(stored)
    names = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
    return LayerSpec(
        kind="float",
        format=names[stored.weight.dtype],
        dtype=stored.weight.dtype,
        shape=stored.weight.shape,
        weight=stored.name,
        extras=stored.extras,
    )


def unused_integers(stored: Stored) -> LayerSpec | None:
    """Whole-number tables that are no weights of a product (masks, indices) pass as they are."""
    if stored.weight.dtype in ("I64", "I32", "BOOL") and stored.scale is None and len(stored.weight.shape) < 2:
        return LayerSpec("float", stored.weight.dtype, stored.weight.dtype, stored.weight.shape, stored.name)
    return None


def marker_conflict(stored: Stored) -> CheckpointError:
    """The error of a weight whose dtype does not fit what its marker or scale says."""
    hint = f"a scale {stored.scale!r}" if stored.scale else f"the marker {stored.marker}"
    return stored.stop(
        f"the weight is {stored.weight.dtype} and {hint} says it is quantised",
        "a weight whose dtype fits its marker is needed",
        "use another file: this one was damaged when it was converted",
    )
