"""Which tile an INT8 matmul uses: data and a lookup, never a measurement during somebody's image.

A tile is picked from the GPU's family, a bucket of M (powers of two) and N, K. M changes with every resolution and
prompt length, so nothing is keyed on M itself. Two rules hold for every tile, and tests check them:
- shared memory: the pipeline's buffers fit the GPU (99 KB a block on sm_86, sm_89 and sm_120);
- accumulators: BLOCK_M * BLOCK_N / warps <= 4096 (128 int32 registers a thread), else they spill.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from .capability import Device

# per block, opt-in maximum
CONSUMER_SHARED_MEMORY_BYTES = 101_376
M_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
MAX_BUCKET = 8192


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N outputs, BLOCK_K int8 per step; warps and pipeline stages; group_m tile rows share a weight tile."""

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8

    @property
    def name(self) -> str:
        """Short form for reports: "128x128x64 w4 s4 g8"."""
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages} g{self.group_m}"

    def buffers(self, family: str | None) -> int:
        """Pipeline buffers that Triton allocates: one per stage on Hopper and newer data-centre parts, one fewer before."""
        return self.stages if family in ("hopper", "blackwell-dc") else max(self.stages - 1, 1)

    def shared_memory_bytes(self, family: str | None) -> int:
        """Bytes of the pipeline's buffers; the epilogue may need its own scratch, read from the compiled kernel."""
        return self.buffers(family) * (self.block_m + self.block_n) * self.block_k

    def accumulators_per_thread(self) -> int:
        """int32 accumulators that one thread holds."""
        return self.block_m * self.block_n // (32 * self.warps)


def fits(tile: Tile, family: str | None, shared_memory_bytes: int | None) -> bool:
    """True when the tile obeys both rules on a GPU with this much shared memory per block (unknown: 99 KB)."""
    limit = shared_memory_bytes or CONSUMER_SHARED_MEMORY_BYTES
    return tile.shared_memory_bytes(family) <= limit and tile.accumulators_per_thread() <= 128


def bucket(m: int) -> int:
    """Smallest bucket that holds m rows."""
    for limit in M_BUCKETS:
        if m <= limit:
            return limit
    return MAX_BUCKET


# Small M is bound by reading the weight: narrow tiles that cover all SMs, long K steps.
_SMALL = {
    16: Tile(16, 64, 256, 4, 3),
    32: Tile(32, 64, 128, 4, 4),
    64: Tile(64, 64, 128, 4, 3),
    128: Tile(64, 128, 128, 4, 3),
    256: Tile(64, 128, 128, 4, 3),
}

# mma.sync families. Chosen from machine code and the published tunings of the same silicon, not measured here:
# 128x128x64 on 4 warps keeps two blocks on an SM with 48 KB each.
_AMPERE = {
    **_SMALL,
    512: Tile(128, 128, 64, 4, 4),
    1024: Tile(128, 128, 64, 4, 4),
    2048: Tile(128, 128, 64, 4, 4),
    4096: Tile(128, 128, 64, 4, 4),
    MAX_BUCKET: Tile(128, 128, 64, 4, 4),
}

# wgmma. H200, torch 2.11, Triton 3.6, November 2026.
_HOPPER = {
    **_SMALL,
    512: Tile(128, 128, 128, 4, 3),
    1024: Tile(128, 128, 128, 4, 3),
    2048: Tile(128, 128, 128, 8, 3),
    4096: Tile(128, 128, 128, 8, 3),
    MAX_BUCKET: Tile(128, 128, 128, 8, 3),
}

TABLES: dict[str, dict[int, Tile]] = {"ampere": _AMPERE, "ada": _AMPERE, "blackwell": _AMPERE, "hopper": _HOPPER}


def all_tiles(family: str) -> set[Tile]:
    """Every tile that the table of a family can give."""
    return set(TABLES[family].values())


@functools.lru_cache(maxsize=4096)
def _pick(device: Device, m_bucket: int, n: int, k: int) -> Tile:
    table = TABLES.get(device.family or "", _AMPERE)
    return table[m_bucket]


def pick(device: Device, m: int, n: int, k: int) -> Tile:
    """The tile for q_x [m, k] times q_w [n, k] on `device`; a dictionary lookup after the first call of a bucket."""
    return _pick(device, bucket(m), n, k)
