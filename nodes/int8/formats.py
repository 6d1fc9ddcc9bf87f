"""How each Linear of a file is stored: which tensor holds the weight, which its scale, and what they mean.

A format is one function in `DETECTORS`, asked in order; the first that recognises a layer describes it with a
`LayerSpec`. Adding a format is adding a function and a line. Every format that is adopted means
w = q * scale (scale = absmax / 127 of the row or tensor), with `rotation_group` > 0 when q holds the rows of W H^T.

The dtype of a weight is believed before its marker: an I8 weight is INT8 whatever a marker says.
On-disk words (tensorwise, convrot, comfy_quant) are spelled here and nowhere else.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .checkpoint import FLOAT_DTYPES, FP8_DTYPES, PREFIXES, CheckpointError, Header, TensorInfo

log = logging.getLogger("native_int8.formats")

NATIVE = "int8_tensorwise"
MARKER = ".comfy_quant"
METADATA = "_quantization_metadata"
# the file-wide marker of the older scaled fp8 files
SCALED_FP8 = "scaled_fp8"
SCALE_SUFFIXES = (".weight_scale", ".scale_weight")
INPUT_SCALE_SUFFIXES = (".input_scale", ".scale_input")
DEFAULT_GROUP = 256

_FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")
# formats that exist and are not read, with what to use instead
_REFUSED = {
    "int8_blockwise": "use the float or fp8 file of this model, which is quantised while loading",
    "convrot_w4a4": "use ComfyUI's own loader for this file, or the model's int8, fp8 or bf16 file here",
    "asym_w4a8_int8": "use ComfyUI's own loader for this file, or the model's int8, fp8 or bf16 file here",
    "w6a8_int8": "use the model's int8, fp8 or bf16 file",
    "nvfp4": "use ComfyUI's own loader for this file, or the model's int8, fp8 or bf16 file here",
    "mxfp8": "use ComfyUI's own loader for this file, or the model's int8, fp8 or bf16 file here",
}


@dataclass(frozen=True)
class LayerSpec:
    """One stored weight.

    kind: "int8", "fp8_scaled" or "float" (which covers fp8 without a scale).
    shape: of the weight; [N, K] for a Linear.
    rotation_group: columns per rotated group, 0 when the rows are stored as they are.
    per_row: the scale holds one number for each of the N rows (else one for the tensor).
    extras: names of further tensors that belong to the layer and are used up with it.
    """

    kind: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    weight: str
    scale: str | None = None
    rotation_group: int = 0
    per_row: bool = False
    full_precision: bool = False
    extras: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Stored:
    """A layer as the detectors see it."""

    layer: str
    weight: TensorInfo
    scale: str | None
    scale_info: TensorInfo | None
    marker: dict[str, Any] | None
    header: Header
    extras: tuple[str, ...] = ()

    def stop(self, got: str, needed: str, todo: str, suffix: str = ".weight") -> CheckpointError:
        return CheckpointError(f"{self.header.path}: {self.header.key(self.layer + suffix)}: {got}. {needed}; {todo}.")

    def option(self, *names: str) -> Any:
        """A marker field, at the top or inside `params`; None when absent."""
        marker = self.marker or {}
        params = marker.get("params")
        for place in (marker, params if isinstance(params, dict) else {}):
            for name in names:
                if name in place:
                    return place[name]
        return None


def detect(header: Header, read_tensor: Callable[[str], torch.Tensor]) -> dict[str, LayerSpec]:
    """Describe every `<layer>.weight` of a file.

    Args:
        header: of the file or state dict.
        read_tensor: name (without prefix) -> tensor; called for the few bytes of marker tensors only.
    Returns:
        layer name (without prefix and `.weight`) -> spec.
    Raises:
        CheckpointError: an INT8 weight has no scale or an unknown storage, a marker names a format that is not read,
            or a scale belongs to no quantised weight.
    """
    tensors = header.tensors
    markers = _markers(header, read_tensor)
    specs: dict[str, LayerSpec] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        if not name.endswith(".weight"):
            continue
        layer = name.removesuffix(".weight")
        scale = next((layer + s for s in SCALE_SUFFIXES if layer + s in tensors), None)
        extras = tuple(layer + s for s in (*INPUT_SCALE_SUFFIXES, *SCALE_SUFFIXES, MARKER) if layer + s in tensors)
        stored = _Stored(
            layer, info, scale, tensors[scale] if scale else None, markers.get(layer), header,
            tuple(e for e in extras if e != scale),
        )  # fmt: skip
        spec = next((s for s in (detector(stored) for detector in DETECTORS) if s is not None), None)
        if spec is None:
            raise stored.stop(
                f"{info.dtype} {list(info.shape)} is a storage this loader does not know"
                f" (beside it: {', '.join(_beside(header, layer)) or 'nothing'})",
                "INT8 with a scale, fp8, or a 16 or 32 bit float is needed",
                "use another file of this model",
            )
        specs[layer] = spec
        used.update((name, *((scale,) if scale else ()), *spec.extras))
    _check_leftovers(header, used)
    return specs


def _beside(header: Header, layer: str) -> list[str]:
    return [n for n in header.tensors if n.startswith(layer + ".") and n != layer + ".weight"][:6]


def _check_leftovers(header: Header, used: set[str]) -> None:
    """No INT8 tensor and no scale may be left that nothing reads: dropping it would give noise, not an error."""
    for name, info in header.tensors.items():
        if name in used:
            continue
        if info.dtype == "I8":
            raise CheckpointError(
                f"{header.path}: {header.key(name)}: an INT8 tensor {list(info.shape)} under a name this loader does not "
                f"read. INT8 weights are needed as `<layer>.weight` with `<layer>.weight_scale`; use a file in ComfyUI's "
                f"native {NATIVE} format, or the float file of this model."
            )
        if name.endswith(SCALE_SUFFIXES):
            raise CheckpointError(
                f"{header.path}: {header.key(name)}: a scale without its weight. `{header.key(name).rsplit('.', 1)[0]}"
                ".weight` is needed in the same file; the file is incomplete: get it again."
            )


def _markers(header: Header, read_tensor: Callable[[str], torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Layer -> its marker, from the marker tensors and, where there is none, from the metadata."""
    markers = _metadata_markers(header)
    for name in header.tensors:
        if not name.endswith(MARKER):
            continue
        layer = name.removesuffix(MARKER)
        marker = _decode(read_tensor(name).contiguous().view(torch.uint8).cpu().numpy().tobytes())
        if marker is None:
            continue
        if layer in markers and markers[layer].get("format") != marker.get("format"):
            log.warning(
                "%s: its marker says %s and the metadata %s; the marker is used",
                header.key(layer),
                marker,
                markers[layer],
            )
        markers[layer] = marker
    return markers


def _decode(raw: bytes | str) -> dict[str, Any] | None:
    """A marker's fields; None when it holds nothing (empty, NUL bytes, not JSON)."""
    if isinstance(raw, bytes):
        try:
            # json would guess an encoding from NUL bytes
            raw = raw.decode("utf-8").strip("\x00 \t\r\n")
        except UnicodeDecodeError:
            return None
    value: Any = raw
    # some writers store JSON inside a JSON string, or the bare name of the format
    for _ in range(3):
        if not isinstance(value, str):
            break
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            value = {"format": value} if value.replace("_", "").isalnum() else None
    return value if isinstance(value, dict) else None


def _metadata_markers(header: Header) -> dict[str, dict[str, Any]]:
    """The markers of `_quantization_metadata`, under `layers`, at its top level, or as JSON in JSON."""
    text = header.metadata.get(METADATA)
    if text is None:
        return {}
    table = _decode(text)
    if table is None:
        log.warning("%s: its %s cannot be read; the tensors' dtypes decide", header.path, METADATA)
        return {}
    layers = table.get("layers", table)
    if isinstance(layers, str):
        layers = _decode(layers)
    if not isinstance(layers, dict):
        log.warning("%s: the layers in its %s cannot be read; the tensors' dtypes decide", header.path, METADATA)
        return {}
    out = {}
    for layer, fields in layers.items():
        marker = _decode(fields) if isinstance(fields, str) else fields
        if not isinstance(marker, dict):
            continue
        plain = layer
        if f"{layer}.weight" not in header.tensors:
            plain = next((layer.removeprefix(p) for p in PREFIXES if layer.startswith(p)), layer)
        out[plain] = marker
    return out


def _refuse_named_formats(stored: _Stored) -> LayerSpec | None:
    name = (stored.marker or {}).get("format")
    if name is None or name == NATIVE or name in _FP8_FORMATS:
        return None
    raise stored.stop(
        f"the marker names the format {name!r}",
        f"{NATIVE}, {' or '.join(_FP8_FORMATS)} is needed",
        _REFUSED.get(name, "use the int8, fp8 or bf16 file of this model"),
        MARKER,
    )


def _int8(stored: _Stored) -> LayerSpec | None:
    """INT8 rows: the host's native format, and the same tensors with a marker that lacks `format` or with none."""
    if stored.weight.dtype != "I8":
        return None
    shape, scale = stored.weight.shape, stored.scale_info
    if scale is None:
        raise stored.stop(
            f"an INT8 weight {list(shape)} without a scale (beside it: "
            f"{', '.join(_beside(stored.header, stored.layer)) or 'nothing'})",
            f"a scale `{stored.header.key(stored.layer)}.weight_scale` is needed",
            "use another file: without its scale an INT8 weight is noise",
        )
    if scale.dtype not in FLOAT_DTYPES:
        raise stored.stop(f"the scale is {scale.dtype}", "a float scale is needed", "use another file", ".weight_scale")
    per_row = _check_scale(stored)
    group = _rotation_group(stored)
    name = (stored.marker or {}).get("format")
    return LayerSpec(
        kind="int8",
        format=NATIVE if name == NATIVE else "INT8 without format name" if stored.marker else "INT8 without marker",
        dtype="I8",
        shape=shape,
        weight=stored.layer + ".weight",
        scale=stored.scale,
        rotation_group=group,
        per_row=per_row,
        full_precision=stored.option("full_precision_matrix_mult") is True,
        extras=stored.extras,
    )


def _check_scale(stored: _Stored) -> bool:
    """True for one scale per row, False for one per tensor."""
    shape, scale = stored.weight.shape, stored.scale_info
    suffix = stored.scale.removeprefix(stored.layer)
    if len(shape) == 3 and stored.marker is not None:
        # a bank of experts; the host checks it against its module
        return scale.count != 1
    if len(shape) != 2:
        raise stored.stop(
            f"an INT8 weight of {len(shape)} dimensions {list(shape)}",
            "a two-dimensional [out, in] weight is needed",
            "use the float file of this model",
        )
    rows, columns = shape
    if scale.count == 1:
        return False
    long_axes = [n for n in scale.shape if n != 1]
    if long_axes == [rows]:
        return True
    hint = "use another file"
    if long_axes == [columns]:
        hint = "the weight looks stored as [in, out]: use a file that stores [out, in]"
    elif len(long_axes) == 2:
        hint = f"this is a scale per block: {_REFUSED['int8_blockwise']}"
    raise stored.stop(
        f"{scale.count} scales {list(scale.shape)} for a weight of {rows} rows {list(shape)}",
        f"1 or {rows} scales are needed",
        hint,
        suffix,
    )


def _rotation_group(stored: _Stored) -> int:
    """Columns per rotated group; 0 when the marker says nothing of a rotation."""
    flag = stored.option("convrot", "quarot")
    if flag is None or flag is False:
        return 0
    group = stored.option("convrot_groupsize", "quarot_groupsize")
    group = DEFAULT_GROUP if group is None else group
    columns = stored.weight.shape[-1]
    if flag is not True or not isinstance(group, int) or isinstance(group, bool):
        raise stored.stop(
            f"the marker says convrot {flag!r} with group size {group!r}",
            "true or false and a whole number are needed",
            "ask the file's publisher",
            MARKER,
        )
    # a power of four: one bit set, in an even place
    power_of_four = group >= 4 and group & (group - 1) == 0 and group.bit_length() % 2 == 1
    if not power_of_four or columns % group:
        raise stored.stop(
            f"the rotation group {group} for {columns} columns",
            "a power of 4 that divides the columns is needed",
            "use another file: no other rotation is ConvRot",
            MARKER,
        )
    return group


def _fp8(stored: _Stored) -> LayerSpec | None:
    """fp8, with one scale per tensor or row, or none."""
    if stored.weight.dtype not in FP8_DTYPES:
        return None
    if (stored.marker or {}).get("format") == NATIVE:
        raise _marker_conflict(stored)
    scale, rows = stored.scale_info, (stored.weight.shape or (1,))[0]
    if scale is not None and (scale.dtype not in FLOAT_DTYPES or scale.count not in (1, rows)):
        raise stored.stop(
            f"{scale.count} scales {list(scale.shape)} of {scale.dtype} for an fp8 weight {list(stored.weight.shape)}",
            f"1 or {rows} float scales are needed",
            "use the bf16 file of this model",
            stored.scale.removeprefix(stored.layer),
        )
    if scale is None and (stored.marker or {}).get("format") in _FP8_FORMATS:
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
        weight=stored.layer + ".weight",
        scale=stored.scale,
        per_row=scale is not None and scale.count > 1,
        extras=stored.extras,
    )


def _float(stored: _Stored) -> LayerSpec | None:
    if stored.weight.dtype not in FLOAT_DTYPES:
        return None
    if stored.scale is not None or (stored.marker or {}).get("format") is not None:
        raise _marker_conflict(stored)
    names = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16"}
    return LayerSpec(
        kind="float",
        format=names[stored.weight.dtype],
        dtype=stored.weight.dtype,
        shape=stored.weight.shape,
        weight=stored.layer + ".weight",
        extras=stored.extras,
    )


def _marker_conflict(stored: _Stored) -> CheckpointError:
    hint = f"a scale {stored.scale!r}" if stored.scale else f"the marker {stored.marker}"
    return stored.stop(
        f"the weight is {stored.weight.dtype} and {hint} says it is quantised",
        "a weight whose dtype fits its marker is needed",
        "use another file: this one was damaged when it was converted",
    )


def _unused_integers(stored: _Stored) -> LayerSpec | None:
    """Whole-number tables that are no weights of a product (masks, indices) pass as they are."""
    if stored.weight.dtype in ("I64", "I32", "BOOL") and stored.scale is None and len(stored.weight.shape) < 2:
        return LayerSpec(
            "float", stored.weight.dtype, stored.weight.dtype, stored.weight.shape, stored.layer + ".weight"
        )
    return None


DETECTORS: tuple[Callable[[_Stored], LayerSpec | None], ...] = (
    _refuse_named_formats,
    _int8,
    _fp8,
    _float,
    _unused_integers,
)
