"""INT8 whose codes mean something else than rows of w or W H^T: dequantised, then quantised again by rows.

The detectors of this file come before `native.int8`, which would take these layers for plain rows.
"""

import json
import os
from dataclasses import replace

from ..checkpoint import FLOAT_DTYPES, CheckpointError, Header, TensorInfo
from .markers import small_number
from .native import BIGGEST_GROUP, check_rows, check_scale_there, is_transposed, maker
from .spec import BLOCKS, LayerSpec, Stored

_QUAROT, _SIGMA = ".quarot_hadamard", ".hadanorm_sigma"
_MAX_SETTINGS_BYTES = 1 << 22


def _spec(stored: Stored, format: str, why: str, parts: dict[str, str] | None = None, **fields) -> LayerSpec:
    parts = {role: stored.layer + suffix for role, suffix in (parts or {}).items()}
    return LayerSpec(
        **{
            "kind": "int8",
            "format": format,
            "dtype": stored.weight.dtype,
            "shape": stored.weight.shape,
            "weight": stored.name,
            "scale": stored.scale,
            "extras": (*stored.extras, *parts.values()),
            "convert": why,
            "parts": tuple(parts.items()),
            **fields,
        }
    )


def _check_part(stored: Stored, suffix: str, shapes: tuple[tuple[int, ...], ...]) -> TensorInfo:
    info = stored.part(suffix)
    if info.dtype not in FLOAT_DTYPES or info.shape not in shapes:
        raise stored.stop(
            f"{info.dtype} {list(info.shape)} beside a weight {list(stored.weight.shape)}",
            f"float {' or '.join(str(list(s)) for s in shapes)} is needed",
            "use another file of this model",
            suffix,
        )
    return info


def blocks(stored: Stored) -> LayerSpec | None:
    """One scale [N/b, K/b] for each square of b rows and columns (convert_to_quant)."""
    if stored.weight.dtype != "I8" or stored.scale_info is None or len(stored.weight.shape) != 2:
        return None
    scale, (rows, columns) = stored.scale_info, stored.weight.shape
    if stored.format not in (BLOCKS, None) or scale.count == 1 or len(scale.shape) != 2 or 0 in scale.shape:
        return None
    if scale.count == rows and 1 in scale.shape and scale.shape != (rows, columns):
        # rows, whatever the marker calls them
        return None
    size = stored.option("group_size")
    found = rows // scale.shape[0] if scale.shape[0] else 0
    fits = found > 1 and (rows, columns) == (scale.shape[0] * found, scale.shape[1] * found)
    if not fits and stored.format is None:
        return None
    if not fits or (isinstance(size, int) and not isinstance(size, bool) and size != found):
        want = size if isinstance(size, int) and size > 0 else 128
        raise stored.stop(
            f"{scale.count} scales {list(scale.shape)} for blocks of {size} in a weight {list(stored.weight.shape)}",
            f"{rows // want} x {columns // want} = {(rows // want) * (columns // want)} scales are needed",
            "use another file of this model",
            stored.scale_suffix(),
        )
    check_scale_there(stored)
    return _spec(stored, BLOCKS, f"scales of blocks of {found}")


def toolkit(stored: Stored) -> LayerSpec | None:
    """Codes of (W diag(sigma)) H^T with H and sigma as buffers beside them; either may be absent."""
    if stored.weight.dtype != "I8" or len(stored.weight.shape) != 2:
        return None
    parts = {role: s for role, s in (("matrix", _QUAROT), ("divide", _SIGMA)) if stored.part(s) is not None}
    if not parts:
        return None
    check_scale_there(stored)
    columns = stored.weight.shape[1]
    group = 0
    if "matrix" in parts:
        info = stored.part(_QUAROT)
        group = info.shape[0] if len(info.shape) == 2 else 0
        if group < 2 or columns % group or group > 4096:
            raise stored.stop(
                f"{info.dtype} {list(info.shape)} for {columns} columns",
                "a square matrix whose size divides the columns is needed",
                "use another file of this model",
                _QUAROT,
            )
        _check_part(stored, _QUAROT, ((group, group),))
    if "divide" in parts:
        _check_part(stored, _SIGMA, ((columns,), (1, columns), (columns, 1)))
    name = "Toolkit HadaNorm" if "divide" in parts else "Toolkit QuaRot"
    why = " and ".join(
        text
        for role, text in (("matrix", "rotated by a matrix of its own"), ("divide", "its columns are scaled"))
        if role in parts
    )
    return _spec(stored, name, why, parts, per_row=check_rows(stored, stored.weight.shape), rotation_group=group)


def smoothed(stored: Stored) -> LayerSpec | None:
    """SmoothQuant: y = (x / s) (W diag(s))^T, so the codes hold W diag(s) and are divided by s here."""
    if stored.weight.dtype != "I8" or stored.part(".smooth") is None or len(stored.weight.shape) != 2:
        return None
    check_scale_there(stored)
    columns = stored.weight.shape[1]
    _check_part(stored, ".smooth", ((columns,), (1, columns), (columns, 1)))
    return _spec(
        stored,
        maker(stored),
        "its columns are smoothed",
        {"divide": ".smooth"},
        per_row=check_rows(stored, stored.weight.shape),
        scale_divisor=127.0 if stored.scale_suffix() == ".SCB" else 1.0,
    )


def sdnq(stored: Stored) -> LayerSpec | None:
    """w = q * scale + zero_point (+ svd_up svd_down), each optional, by rows or by groups of columns [N, K/g, 1].

    With its quantised product switched on SDNQ stores all of these transposed; then the scale is [1, N].
    """
    info, scale = stored.weight, stored.scale_info
    if info.dtype not in ("I8", "U8") or stored.scale_suffix() != ".scale" or scale is None:
        return None
    parts = {
        role: s
        for role, s in (("zero", ".zero_point"), ("up", ".svd_up"), ("down", ".svd_down"))
        if stored.part(s) is not None
    }
    grouped = len(info.shape) == 3
    if not parts and not grouped and info.dtype == "I8":
        return None
    check_scale_there(stored)
    if info.dtype == "U8" and "zero" not in parts:
        raise stored.stop(
            f"U8 {list(info.shape)} without a zero_point", "a `.zero_point` is needed", "use another file of this model"
        )
    if ("up" in parts) != ("down" in parts):
        raise stored.stop(
            "one of svd_up and svd_down is missing", "both or none are needed", "use another file of this model"
        )
    transposed = is_transposed(stored)
    shape = info.shape
    if grouped:
        shape = (shape[0], shape[1] * shape[2])
        _check_part(stored, ".scale", ((*info.shape[:2], 1),))
    elif len(shape) == 2:
        shape = (shape[1], shape[0]) if transposed else shape
        check_rows(stored, shape)
    else:
        raise stored.stop(
            f"a weight of {len(shape)} dimensions {list(shape)}",
            "a matrix is needed",
            "use the float file of this model",
        )
    if "zero" in parts:
        _check_part(stored, ".zero_point", (scale.shape,))
    if "up" in parts:
        shapes = [stored.part(s).shape for s in (".svd_up", ".svd_down")]
        rank = min((min(s) for s in shapes if len(s) == 2), default=0)
        up, down = ((rank, shape[0]), (shape[1], rank)) if transposed else ((shape[0], rank), (rank, shape[1]))
        _check_part(stored, ".svd_up", (up,))
        _check_part(stored, ".svd_down", (down,))
    why = ", ".join(
        text
        for there, text in (("zero" in parts, "a zero point"), ("up" in parts, "a low-rank part"), (grouped, "groups"))
        if there
    )
    return _spec(stored, "SDNQ", why, parts, shape=shape, transposed=transposed, per_row=scale.count > 1)


def sdnq_rotated(header: Header, specs: dict[str, LayerSpec]) -> dict[str, LayerSpec]:
    """The specs with the rotation that SDNQ's settings, in the metadata or beside the file, say; the tensors tell nothing.

    SDNQ stores W H, by groups of columns; a low-rank part and a zero point are of W H too. The group of a layer is the largest power of 2 up to `hadamard_group_size` that divides its columns. H is ConvRot's
    for powers of 4 from version 0.2.1 on, else Sylvester's; 0.2.0 was either.

    Raises:
        CheckpointError: the settings do not say which rotation it is.
    """
    settings = next((s for s in _sdnq_settings(header) if s.get("use_hadamard") is True), None)
    if settings is None:
        return specs
    most, version = settings.get("hadamard_group_size"), _version(settings.get("sdnq_version"))
    overrides = settings.get("modules_quant_config") or {}
    if not isinstance(most, int) or most not in (1 << n for n in range(2, 13)) or "hadamard" in json.dumps(overrides):
        raise _unknown_rotation(
            header, f"hadamard_group_size {most!r} and settings for single layers {overrides!r:.100}"
        )
    return {
        layer: _sdnq_rotated(header, spec, most, version) if spec.format == "SDNQ" else spec
        for layer, spec in specs.items()
    }


def _sdnq_rotated(header: Header, spec: LayerSpec, most: int, version: tuple[int, ...] | None) -> LayerSpec:
    if len(spec.shape) != 2:
        raise _unknown_rotation(header, f"a rotated weight {list(spec.shape)} ({spec.weight})")
    columns = spec.shape[1]
    # the largest power of 2 that divides the columns is columns & -columns
    group = min(most, columns & -columns)
    if group < 4:
        return spec
    power_of_four = group.bit_length() % 2 == 1
    if power_of_four and version in (None, (0, 2, 0)):
        told = "no sdnq_version" if version is None else "sdnq_version 0.2.0, whose matrix was one or the other"
        raise _unknown_rotation(header, f"groups of {group} and {told}")
    sylvester = not power_of_four or version < (0, 2, 0)
    undone = "rotated" if spec.convert or group > BIGGEST_GROUP else ""
    why = [spec.convert, "rotated by the Sylvester matrix" if sylvester else undone]
    return replace(spec, rotation_group=group, sylvester=sylvester, convert=", ".join(text for text in why if text))


def _version(text: object) -> tuple[int, ...] | None:
    numbers = text.split(".")[:3] if isinstance(text, str) else []
    return tuple(int(n) for n in numbers) if len(numbers) == 3 and all(n.isdecimal() for n in numbers) else None


def _unknown_rotation(header: Header, got: str) -> CheckpointError:
    return CheckpointError(
        f"{header.path}: its SDNQ settings say use_hadamard with {got}, which does not say how its weights are rotated. A "
        "file of SDNQ 0.2.1 or newer, or one without that rotation, is needed; use SDNQ's own loader, or the model's bf16 "
        "or fp8 file."
    )


def _sdnq_settings(header: Header) -> list[dict]:
    """SDNQ's settings in the metadata and in the two JSON files that lie beside a diffusers model."""
    folder = os.path.dirname(header.path)
    texts = [header.metadata.get("quantization_config", ""), header.metadata.get("config", "")]
    for name in ("quantization_config.json", "config.json"):
        place = os.path.join(folder, name)
        if os.path.isfile(header.path) and os.path.isfile(place) and os.path.getsize(place) < _MAX_SETTINGS_BYTES:
            with open(place, encoding="utf-8", errors="replace") as file:
                texts.append(file.read())
    found = []
    for text in texts:
        try:
            settings = json.loads(text) if text else None
        except (ValueError, RecursionError):
            continue
        settings = settings.get("quantization_config", settings) if isinstance(settings, dict) else None
        if isinstance(settings, dict):
            found.append(settings)
    return found


def bitsandbytes_layout(stored: Stored, read_tensor) -> None:
    """Raises: CheckpointError when a bitsandbytes weight is stored in the tile order of one GPU family."""
    name = stored.layer + ".weight_format"
    if name in stored.header.tensors and stored.scale_suffix() == ".SCB":
        value = small_number(stored.header, name, read_tensor)
        if value != 0:
            raise stored.stop(
                f"the layout {value:g} of an old bitsandbytes",
                "layout 0 (rows) is needed",
                "save the model again with bitsandbytes 0.45 or newer, or use its bf16 file",
                ".weight_format",
            )
