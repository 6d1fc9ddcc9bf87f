"""Doubts about a file that no marker settles: told to the user, never acted upon.

A rotation mixes the columns of a group, so rotated rows look more like a normal distribution than trained ones do. The
kurtosis of the codes, before and after turning them by ConvRot's matrix, shows it: of true rotated codes it rises, of
plain ones it falls. Weights that are close to normal show nothing, so only many layers together count.
"""

import os
import re
from collections.abc import Callable

import torch

from ....kernels.rotate import hadamard
from ..checkpoint import Header
from .spec import LayerSpec

_MIN_LAYERS = 8
_MAX_LAYERS = 24
_ROWS = 64
# of the median kurtosis after and before; synthetic heavy-tailed rows give 1.3 to 1.9
_RATIO = 1.15
_SHARE = 0.75
_CONVROT = re.compile(r"conv[-_ ]?rot", re.IGNORECASE)


def name_notes(header: Header, specs: dict[str, LayerSpec]) -> list[str]:
    """What the file's name says and its layers do not."""
    name = os.path.basename(header.path)
    rows = [s for s in specs.values() if s.kind == "int8" and len(s.shape) == 2]
    if rows and _CONVROT.search(name) and not any(s.rotation_group for s in rows):
        return [
            f"The name {name} says ConvRot and no layer of the file is marked as rotated; it was loaded as not rotated."
        ]
    return []


def rotation_notes(specs: dict[str, LayerSpec], read: Callable[[str], torch.Tensor]) -> list[str]:
    """A sentence when many layers look rotated that are not marked so, or the reverse.

    Args:
        read: name -> tensor; a few rows of at most 24 layers are looked at.
    """
    out = []
    for rotated in (False, True):
        layers = [s for s in specs.values() if _testable(s) and bool(s.rotation_group) is rotated]
        step = max(1, len(layers) // _MAX_LAYERS)
        ratios = [r for s in layers[::step][:_MAX_LAYERS] if (r := _ratio(s, read)) is not None]
        if len(ratios) < _MIN_LAYERS:
            continue
        # plain rows fall when turned, rotated ones rise
        wrong = sum((1 / r if rotated else r) > _RATIO for r in ratios)
        if wrong < _SHARE * len(ratios):
            continue
        marked, looks = ("rotated", "not to be") if rotated else ("not rotated", "to be")
        out.append(
            f"{wrong} of {len(ratios)} layers looked at are stored as {marked} and look {looks}. If the picture is noise, "
            "the file's markers are wrong: get another file."
        )
    return out


def _testable(spec: LayerSpec) -> bool:
    return (
        spec.kind == "int8" and not spec.convert and not spec.transposed and len(spec.shape) == 2 and _group(spec) > 0
    )


def _group(spec: LayerSpec) -> int:
    if spec.rotation_group:
        return spec.rotation_group
    return next((g for g in (256, 64, 16) if spec.shape[1] % g == 0), 0)


def _ratio(spec: LayerSpec, read: Callable[[str], torch.Tensor]) -> float | None:
    """Median kurtosis of some rows after turning them, over that before; None for constant rows."""
    codes = read(spec.weight)[:_ROWS].to("cpu").float()
    group = _group(spec)
    turned = (codes.reshape(-1, group) @ hadamard(group, codes.device)).reshape(codes.shape)
    before, after = (_kurtosis(values) for values in (codes, turned))
    return after / before if before > 0 and after > 0 else None


def _kurtosis(rows: torch.Tensor) -> float:
    centred = rows - rows.mean(1, keepdim=True)
    variance = centred.square().mean(1)
    sound = variance > 0
    if not bool(sound.any()):
        return 0.0
    return float((centred[sound].pow(4).mean(1) / variance[sound].square()).median())
