"""Which Linears real models run: (M, K, N, bias) from shapes.json, each once, with the layers that use it.

shapes.json lists every Linear of twelve models with its number of rows M at 768 and 1024 px (batch 1, one pass) and, for
video models, at two video sizes; shapes_meta.json says which text length and configuration was assumed.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
IMAGE_COLUMNS = ("M_768", "M_1024")
VIDEO_COLUMNS = ("M_832x480x81", "M_1280x720x81", "M_768x512x121", "M_1280x704x121")
LARGE_M = 2048


@dataclass(frozen=True)
class Use:
    """A layer that has this shape: model, layer name ("*" is the block's number), how many there are, at which size."""

    model: str
    layer: str
    count: int
    column: str


@dataclass(frozen=True)
class Case:
    """x [m, k] times weight [n, k]. planned: the pack makes at least one of these layers INT8 by default."""

    m: int
    k: int
    n: int
    bias: bool
    uses: tuple[Use, ...]
    planned: bool = False

    @property
    def name(self) -> str:
        """Short form "4608x4608x13824" of M, K, N; "+b" with a bias."""
        return f"{self.m}x{self.k}x{self.n}" + ("+b" if self.bias else "")

    @property
    def flops(self) -> int:
        """Multiplications and additions of one call."""
        return 2 * self.m * self.k * self.n

    def users(self) -> list[str]:
        """ "model layer" of every use, without repetition."""
        return sorted({f"{use.model} {use.layer}" for use in self.uses})


def shapes() -> dict[str, list[dict]]:
    """shapes.json: model -> rows with name, K, N, bias, count and M per column (None: never runs at that size)."""
    return json.loads((FOLDER / "shapes.json").read_text())


def planned_layers(policy, formats) -> set[tuple[str, str]]:
    """(model, layer) that the pack makes INT8 by default, by its own plan over the bf16 weights' names and shapes."""
    found = set()
    for model, rows in shapes().items():
        specs, layer_of = {}, {}
        for row in rows:
            for index in ("0", "1") if "*" in row["name"] else ("",):
                name = row["name"].replace("*", index)
                layer_of[name] = row["name"]
                specs[name] = formats.LayerSpec("float", "bf16", "BF16", (row["N"], row["K"]), f"{name}.weight")
        found |= {(model, layer_of[d.layer]) for d in policy.plan(specs) if d.is_int8}
    return found


def cases(
    columns: tuple[str, ...] = IMAGE_COLUMNS,
    models: tuple[str, ...] | None = None,
    min_m: int = 256,
    planned: set[tuple[str, str]] | None = None,
) -> list[Case]:
    """The distinct shapes with M >= min_m, in the order of shapes.json; `models` None means all.

    Raises:
        KeyError: a name in `models` that shapes.json does not have.
    """
    table = shapes()
    uses: dict[tuple[int, int, int, bool], list[Use]] = defaultdict(list)
    for model in models or table:
        for row in table[model]:
            for column in columns:
                m = row.get(column)
                if m is not None and m >= min_m:
                    key = (m, row["K"], row["N"], row["bias"])
                    uses[key].append(Use(model, row["name"], row["count"], column))
    return [
        Case(*key, tuple(of), any((use.model, use.layer) in (planned or ()) for use in of)) for key, of in uses.items()
    ]
