"""The JSON that says how a layer is stored: per layer as a tensor, or for all layers in the file's metadata."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from ..checkpoint import PREFIXES, CheckpointError, Header
from .spec import MARKER, METADATA

# longer ones were never written; a wrong key must not make a loader read a weight as text
_MAX_MARKER_BYTES = 1 << 16


def read_markers(
    header: Header, read_tensor: Callable[[str], torch.Tensor], notes: Counter
) -> dict[str, dict[str, Any]]:
    """Layer -> its marker, from the marker tensors and, where there is none, from the metadata.

    A marker that says nothing (empty, NUL bytes, not JSON) is as good as none.
    """
    markers = _metadata_markers(header, notes)
    for name, info in header.tensors.items():
        if not name.endswith(MARKER) or info.dtype not in ("U8", "I8") or info.count > _MAX_MARKER_BYTES:
            continue
        layer = name.removesuffix(MARKER)
        raw = read_tensor(name).contiguous().view(torch.uint8).cpu().numpy().tobytes()
        marker = decode(raw)
        if marker is None:
            if raw.strip(b"\0 \t\r\n"):
                notes["a marker that cannot be read; the dtype decides", header.key(layer)] += 1
            continue
        if layer in markers and markers[layer].get("format") != marker.get("format"):
            notes[
                "the marker and the file's metadata name different formats; the marker is used", header.key(layer)
            ] += 1
        markers[layer] = marker
    return markers


def decode(raw: bytes | str) -> dict[str, Any] | None:
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


def _metadata_markers(header: Header, notes: Counter) -> dict[str, dict[str, Any]]:
    """The markers of `_quantization_metadata`, under `layers`, at its top level, or as JSON in JSON."""
    text = header.metadata.get(METADATA)
    if text is None:
        return {}
    table = decode(text)
    layers = None if table is None else table.get("layers", table)
    if isinstance(layers, str):
        layers = decode(layers)
    if not isinstance(layers, dict):
        notes[f"{METADATA} of the file cannot be read; the tensors' dtypes decide", ""] += 1
        return {}
    out = {}
    for layer, fields in layers.items():
        marker = decode(fields) if isinstance(fields, str) else fields
        if not isinstance(marker, dict):
            continue
        plain = layer
        if f"{layer}.weight" not in header.tensors:
            plain = next(
                (layer.removeprefix(p) for p in (header.prefix, *PREFIXES) if p and layer.startswith(p)), layer
            )
        out[plain] = marker
    return out


def small_number(header: Header, name: str, read_tensor: Callable[[str], torch.Tensor]) -> float:
    """The value of a one-element tensor.

    Raises:
        CheckpointError: it has more or fewer elements.
    """
    info = header.tensors[name]
    if info.count != 1:
        raise CheckpointError(
            f"{header.path}: {header.key(name)}: {info.count} numbers {list(info.shape)}. One number is needed; "
            "the file was damaged when it was made: use another file of this model."
        )
    return float(read_tensor(name).reshape(()).float())
