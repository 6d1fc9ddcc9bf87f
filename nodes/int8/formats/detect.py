"""From a header to a description of every stored layer; no weight is read."""

from collections import Counter
from collections.abc import Callable

import torch

from ..checkpoint import CheckpointError, Header
from . import converted, floats, gguf, native, refused
from .markers import read_markers
from .spec import (
    FILE_MARKERS,
    INPUT_SCALE_SUFFIXES,
    INT8_SCALE_SUFFIXES,
    MARKER,
    NATIVE,
    SCALE_SUFFIXES,
    WEIGHT_SUFFIXES,
    LayerSpec,
    Stored,
)

# asked in this order; the first that recognises a layer describes it
DETECTORS: tuple[Callable[[Stored], LayerSpec | None], ...] = (
    refused.refuse,
    converted.toolkit,
    converted.smoothed,
    converted.sdnq,
    converted.blocks,
    native.int8,
    floats.fp8,
    floats.plain,
    floats.unused_integers,
    gguf.blocks,
)


def detect(
    header: Header, read_tensor: Callable[[str], torch.Tensor], notes: Counter | None = None
) -> dict[str, LayerSpec]:
    """Describe every stored weight of a file.

    Args:
        header: of the file or state dict.
        read_tensor: name (without prefix) -> tensor; called for the few bytes of marker tensors only.
        notes: gets (sentence, layer) for each doubt that was settled; see `sentences`.
    Returns:
        layer name (without prefix and `.weight`) -> spec.
    Raises:
        CheckpointError: an INT8 weight has no scale or an unknown storage, a marker names a format that is not read,
            or a scale belongs to no quantised weight.
    """
    tensors = header.tensors
    notes = Counter() if notes is None else notes
    markers = read_markers(header, read_tensor, notes)
    specs: dict[str, LayerSpec] = {}
    used: set[str] = set()
    for name, info in tensors.items():
        layer = _layer_of(name, info.dtype)
        if layer is None:
            continue
        if layer in specs:
            raise CheckpointError(
                f"{header.path}: {header.key(name)}: a second weight of {layer!r}, beside {specs[layer].weight!r}. One "
                "weight per layer is needed; use another file of this model."
            )
        suffixes = (*SCALE_SUFFIXES, *(INT8_SCALE_SUFFIXES if info.dtype in ("I8", "U8") else ()))
        scale = next((layer + s for s in suffixes if layer + s in tensors), None)
        others = (*INPUT_SCALE_SUFFIXES, *suffixes, MARKER, ".weight_format")
        extras = tuple(layer + s for s in others if layer + s in tensors and layer + s != scale)
        stored = Stored(
            layer, name, info, scale, tensors[scale] if scale else None, markers.get(layer), header, extras, notes
        )
        converted.bitsandbytes_layout(stored, read_tensor)
        spec = next((s for s in (detector(stored) for detector in DETECTORS) if s is not None), None)
        if spec is None:
            raise stored.stop(
                f"{info.dtype} {list(info.shape)} is a storage this loader does not know (beside it: {stored.beside()})",
                "INT8 with a scale, fp8, or a 16 or 32 bit float is needed",
                "use another file of this model",
            )
        specs[layer] = spec
        used.update(spec.names())
    _check_leftovers(header, used)
    if any(spec.format == "SDNQ" for spec in specs.values()):
        specs = converted.sdnq_rotated(header, specs)
    return specs


def sentences(notes: Counter) -> list[str]:
    """The notes of `detect` for the user, one line per kind with the number of layers."""
    kinds: dict[str, list[str]] = {}
    for sentence, layer in notes:
        kinds.setdefault(sentence, []).append(layer)
    out = []
    for sentence, layers in kinds.items():
        places = [layer for layer in layers if layer]
        where = f" ({len(places)} layers, such as {places[0]})" if places else ""
        out.append(f"{sentence[0].upper()}{sentence[1:]}{where}.")
    return out


def _layer_of(name: str, dtype: str) -> str | None:
    """The layer whose weight this tensor is; `.wq` and the like are names of modules in float models."""
    for suffix in WEIGHT_SUFFIXES:
        if name.endswith(suffix) and (suffix == ".weight" or dtype == "I8"):
            return name.removesuffix(suffix)
    return None


def _check_leftovers(header: Header, used: set[str]) -> None:
    """No INT8 tensor and no scale may be left that nothing reads: dropping it would give noise, not an error."""
    for name, info in header.tensors.items():
        if name in used or name in FILE_MARKERS or name.endswith(MARKER):
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
