"""Tuning results on disk: one readable JSON file per card, used only while everything it depends on is the same.

A file names the card, driver, torch, Triton and a hash of the matmul's source. Another card, another version, a
changed kernel or a damaged file make it count for nothing, with one sentence that says why; never an error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from .capability import Device
from .tiles import M_BUCKETS, Tile, fits, sm_of
from .tuning import Entry, TuningResult

log = logging.getLogger("native_int8.tuned")

FORMAT = "native_int8 tiles 1"
_TILE = re.compile(r"(\d+)x(\d+)x(\d+) w(\d+) s(\d+) g(\d+)( tma)?( splitk)?")
_HINT = "Run INT8 Tune Kernels again to measure this machine."


@dataclass(frozen=True)
class Tuned:
    """What a file gave: tiles by (M bucket, N, K), and, when it gives none, one sentence that says why."""

    entries: Mapping[tuple[int, int, int], Tile]
    ignored: str | None = None


@functools.cache
def kernel_hash() -> str:
    """16 hex digits over the source of the matmul kernels; a changed kernel makes old measurements void."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("int8_matmul*_triton.py")):
        digest.update(path.read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def key_of(device: Device) -> dict[str, str]:
    """Everything that a measurement depends on, as text."""
    return {
        "device": device.name,
        "architecture": f"sm_{sm_of(device)}",
        "compute_capability": device.sm.removeprefix("sm_"),
        "multiprocessors": str(device.multiprocessors),
        "driver": str(device.driver),
        "torch": device.torch,
        "triton": str(device.triton),
        "kernels": kernel_hash(),
    }


def slug(device: Device) -> str:
    """The card's name as part of a file name: "nvidia-geforce-rtx-3090-sm86"."""
    return f"{re.sub(r'[^a-z0-9]+', '-', device.name.lower()).strip('-')}-sm{sm_of(device)}"


def tile_from(name: str) -> Tile:
    """The tile that `Tile.name` describes. Raises ValueError when the text is no such name."""
    found = _TILE.fullmatch(name)
    if found is None:
        raise ValueError(f"{name!r} is not a tile; needed: a text such as '128x128x64 w4 s4 g8'")
    return Tile(
        *(int(found.group(i)) for i in range(1, 7)), tma=found.group(7) is not None, split_k=found.group(8) is not None
    )


def write(path: Path, device: Device, result: TuningResult, merge: bool = True) -> None:
    """Write a result, under another name first, so that a reader sees the old file or the new one.

    Args:
        merge: keep the entries of a valid file at `path` that this result does not replace.
    """
    rows = {entry.key: _row(entry) for entry in result.entries}
    if merge:
        rows = {**{_row_key(row): row for row in _rows(path, device)[0]}, **rows}
    body = {"format": FORMAT, "key": key_of(device)}
    body["bf16_tflops"], body["bf16_rated_tflops"] = round(result.bf16_tflops, 1), round(result.bf16_rated_tflops, 1)
    head = json.dumps(body, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(rows[key]) for key in sorted(rows))
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_text(f'{head},\n "entries": [\n{lines}\n ]\n}}\n', encoding="utf-8")
    os.replace(temporary, path)


def read(path: Path, device: Device) -> Tuned:
    """The tiles that were measured on `device` with the software that runs now; else none, and why. Never raises."""
    if not path.is_file():
        return Tuned({})
    rows, ignored = _rows(path, device)
    if ignored is not None:
        log.warning("%s", ignored)
    return Tuned({_row_key(row): tile_from(row["tile"]) for row in rows}, ignored)


def _row(entry: Entry) -> dict:
    return {
        "m_bucket": entry.m_bucket, "n": entry.n, "k": entry.k, "m": entry.m, "tile": entry.tile.name,
        "us": round(entry.us, 1), "baseline": entry.baseline.name, "baseline_us": round(entry.baseline_us, 1),
    }  # fmt: skip


def _row_key(row: Mapping) -> tuple[int, int, int]:
    return row["m_bucket"], row["n"], row["k"]


def _rows(path: Path, device: Device) -> tuple[list[dict], str | None]:
    """The entries of a file, all checked, or none and the reason."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError) as error:
        return [], f"The tile file {path} is ignored: it cannot be read ({error}). {_HINT}"
    if not isinstance(body, dict) or body.get("format") != FORMAT or not isinstance(body.get("key"), dict):
        return [], f"The tile file {path} is ignored: it is not of the format {FORMAT!r}. {_HINT}"
    for name, here in key_of(device).items():
        found = body["key"].get(name)
        if found != here:
            return (
                [],
                f"The tile file {path} is ignored: it was measured with {name} {found}, here it is {here}. {_HINT}",
            )
    entries = body.get("entries")
    reason = _damage(entries, device) if isinstance(entries, list) else "it has no list of entries"
    return ([], f"The tile file {path} is ignored: {reason}. {_HINT}") if reason else (entries, None)


def _damage(entries: Iterable, device: Device) -> str | None:
    """None when every entry is whole and its tile fits the device."""
    for number, row in enumerate(entries):
        try:
            bucket, n, k = _row_key(row)
            tile = tile_from(row["tile"])
        except (KeyError, TypeError, ValueError) as error:
            return f"entry {number} is damaged ({error})"
        # bool is an int in Python
        if bucket not in M_BUCKETS or not all(type(size) is int and size > 0 for size in (bucket, n, k)):
            return f"entry {number} has the sizes {bucket}, {n}, {k}"
        sizes = (tile.block_m, tile.block_n, tile.block_k, tile.warps)
        if any(size & (size - 1) or size == 0 for size in sizes) or tile.group_m == 0 or tile.block_m < 16:
            return f"entry {number} has a tile that no kernel takes, {tile.name}"
        if not fits(tile, sm_of(device), device.shared_memory_per_block_bytes):
            return f"the tile {tile.name} of entry {number} does not fit {device.name}"
    return None
