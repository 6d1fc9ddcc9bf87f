"""Which layers become INT8, and why: one `Decision` with a reason for each stored weight.

The rule: the weight of a Linear inside a repeated block, [N, K] with K % 16 == 0, N % 8 == 0 and min(N, K) >= 256, whose
name is not that of a modulation, embedder, time, guidance, router or adapter layer. Those see one or a few rows per
forward, where INT8 gains nothing, or feed every block, where an error does most harm. A projection outside the blocks
is taken too when it is as large as several blocks' layers together (Ideogram 4's text projection, 245 million weights). What a file already keeps as INT8
is adopted; what an INT8 file keeps in float stays float, because its maker chose so.
"""

import fnmatch
import logging
import re
from collections import defaultdict
from dataclasses import dataclass

from .formats import LayerSpec

log = logging.getLogger("native_int8.policy")

MIN_FEATURES = 256
# the host's ConvRot needs a power of 4; larger groups spread an outlier over more columns
ROTATION_GROUPS = (256, 64, 16)

# outside the blocks; published INT8 files of Ideogram 4 quantise its llm_cond_proj, the only layer above this
LARGE_PROJECTION = 128 << 20

# words of a layer name (split at dots and underscores, lower case) that keep the layer in float
_KEPT_WORDS = {
    "a modulation layer: one row per image, read by the whole block": (
        "mod", "modulation", "adaln", "adanorm", "ada", "modc", "modx", "modf", "adalnmodulation",
    ),
    "an embedder": (
        "embed", "embedder", "embedding", "embeddings", "emb", "patchify", "rope", "pos",
    ),
    "a time or guidance layer: few rows per image": (
        "time", "timestep", "temb", "tmlp", "tproj", "guidance",
    ),
    "a router or gate of a few numbers": ("router", "logit", "logits", "register", "temperature"),
    "an adapter beside the blocks": ("adapter", "connector"),
    "a final or head layer": ("final", "head", "last"),
    "text fusion ahead of the blocks: published INT8 files of its family keep it": ("txtfusion",),
}  # fmt: skip
_KEPT_WORD_REASON = {word: reason for reason, words in _KEPT_WORDS.items() for word in words}
_KEPT_PHRASES = {"scale_shift": "a modulation layer: one row per image, read by the whole block"}
_BLOCK_LIST = re.compile(r"(block|layer|refiner)s?$")


@dataclass(frozen=True)
class Decision:
    """What happens to one stored weight.

    action: "adopt" (INT8 in the file, used as it is), "convert" (INT8 of another kind in the file), "quantise" (float, fp8
        or GGUF in the file); INT8 in the model after each of these; or "keep" (float in the model).
    shape: of the weight, (N, K) for a Linear.
    rotation_group: of the resulting INT8 weight; 0 for none.
    in_block: the weight is a matrix inside a repeated block.
    """

    layer: str
    action: str
    spec: LayerSpec
    reason: str
    shape: tuple[int, ...]
    rotation_group: int = 0
    in_block: bool = False

    @property
    def is_int8(self) -> bool:
        """The layer's weight is INT8 in the model."""
        return self.action in ("adopt", "convert", "quantise")


def plan(specs: dict[str, LayerSpec], *, rotation: bool = True, protect: str = "", force: str = "") -> list[Decision]:
    """Decide for every stored weight of two or more dimensions, in the order of `specs`.

    Args:
        specs: layer -> how it is stored, from `formats.detect`.
        rotation: rotate the weights that are quantised here (ConvRot), by the largest group that divides K.
        protect: patterns (comma or line separated, * and ? allowed, else a part of the name) of layers to keep in float.
        force: patterns of layers to quantise although their name or place would keep them; their size still counts.
    """
    protected, forced = _patterns(protect), _patterns(force)
    lists = _block_lists(specs)
    prequantised = any(spec.kind == "int8" for spec in specs.values())
    decisions = []
    for layer, spec in specs.items():
        if len(spec.shape) < 2:
            continue
        in_block = len(spec.shape) == 2 and _block_of(layer, lists) is not None
        group = spec.rotation_group
        if spec.kind == "int8":
            action, reason, group = _stored_int8(layer, spec, rotation, protected)
        else:
            reason = _keep_reason(layer, spec, in_block, prequantised, protected, forced)
            action = "keep" if reason else "quantise"
            if action == "quantise":
                group = rotation_group(spec.shape[1]) if rotation else 0
                place = "forced by a pattern" if _matches(layer, forced) else _place(spec, in_block)
                reason = f"{place}, {'rotated by ' + str(group) if group else 'not rotated'}"
        decisions.append(Decision(layer, action, spec, reason, spec.shape, group, in_block))
    for pattern in (*protected, *forced):
        if not any(_matches(layer, (pattern,)) for layer in specs):
            log.warning("the pattern %r matches no layer of this model", pattern)
    return decisions


def rotation_group(in_features: int) -> int:
    """The largest of 256, 64 and 16 that divides `in_features`; 0 when none does."""
    return next((group for group in ROTATION_GROUPS if in_features % group == 0), 0)


def _stored_int8(layer: str, spec: LayerSpec, rotation: bool, protected) -> tuple[str, str, int]:
    """(action, reason, rotation group) of a weight that is INT8 in the file."""
    if not spec.convert:
        return "adopt", f"INT8 in the file ({spec.format})", spec.rotation_group
    told = f"{spec.format} in the file, {spec.convert}"
    if len(spec.shape) != 2:
        return "keep", told, 0
    if _matches(layer, protected):
        return "keep", f"{told}; protected by a pattern", 0
    n, k = spec.shape
    if k % 16 or n % 8:
        return "keep", f"{told}; {n} x {k} is not a multiple of 8 x 16", 0
    group = rotation_group(k) if rotation else 0
    return "convert", f"{told}; again by rows, {'rotated by ' + str(group) if group else 'not rotated'}", group


def _keep_reason(layer, spec, in_block, prequantised, protected, forced) -> str:
    """Why a float layer stays float; empty when it does not."""
    if len(spec.shape) != 2:
        return f"not a Linear: its weight has {len(spec.shape)} dimensions"
    n, k = spec.shape
    if spec.kind == "float" and spec.format not in ("fp64", "fp32", "fp16", "bf16", "fp8"):
        return f"whole numbers ({spec.format})"
    if _matches(layer, protected):
        return "protected by a pattern"
    if k % 16:
        return f"in_features {k} is not a multiple of 16"
    if n % 8:
        return f"out_features {n} is not a multiple of 8"
    if min(n, k) < MIN_FEATURES:
        return f"too small: min({n}, {k}) is below {MIN_FEATURES}"
    if _matches(layer, forced):
        return ""
    if prequantised:
        return "the INT8 file keeps it in float"
    inside = in_block or n * k >= LARGE_PROJECTION
    return _name_reason(layer) or ("" if inside else "outside the repeated blocks")


def _place(spec: LayerSpec, in_block: bool) -> str:
    """Why the rule takes a layer."""
    if in_block:
        return "a Linear of a repeated block"
    return f"a projection of {spec.shape[0] * spec.shape[1] / 1e6:.0f} million weights, read in full at every step"


def _name_reason(layer: str) -> str:
    lowered = layer.lower()
    for phrase, reason in _KEPT_PHRASES.items():
        if phrase in lowered:
            return reason
    for word in re.split(r"[._]", lowered):
        if word in _KEPT_WORD_REASON:
            return f"{_KEPT_WORD_REASON[word]} ({word!r} in its name)"
    return ""


def _patterns(text: str) -> tuple[str, ...]:
    return tuple(p.strip() for p in re.split(r"[,\n]", text) if p.strip())


def _matches(layer: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch.fnmatchcase(layer, p) if set(p) & set("*?[") else p in layer for p in patterns)


def _indexed(layer: str) -> list[tuple[str, str, str]]:
    """(list, index, name within the entry) for each numbered component that has a name after it."""
    parts = layer.split(".")
    return [
        (".".join(parts[:i]), part, ".".join(parts[i + 1 :]))
        for i, part in enumerate(parts[:-1])
        if part.isdigit() and i > 0
    ]


def _block_lists(specs: dict[str, LayerSpec]) -> set[str]:
    """Lists of blocks: named so, or with the same matrix in at least two entries."""
    entries = defaultdict(set)
    for layer, spec in specs.items():
        if len(spec.shape) == 2:
            for name, index, inner in _indexed(layer):
                entries[name, inner].add(index)
    return {name for (name, _), indices in entries.items() if len(indices) > 1 or _BLOCK_LIST.search(name)}


def _block_of(layer: str, lists: set[str]) -> str | None:
    """`blocks.3` for `blocks.3.attn.q`; None outside the block lists."""
    return next((f"{name}.{index}" for name, index, _ in _indexed(layer) if name in lists), None)
