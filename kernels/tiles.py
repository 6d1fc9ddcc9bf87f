"""Which tile an INT8 matmul uses: data and a lookup, never a measurement during somebody's image.

A table is a list of rows, read from the top; the first whose limits hold gives the tile. Tables exist per
architecture, since the machine code differs: mma.sync on sm_80, sm_86, sm_89 and sm_120, wgmma on sm_90. Where the number
of SMs decides how well the last round of tiles is filled, a row holds several tiles and `wave_time` ranks them. What
somebody measured on their own card (tuned.py) comes before the table.

Two rules hold for every tile, and tests check them:
- shared memory: the pipeline's buffers fit the GPU (99 KB a block on sm_86, sm_89 and sm_120);
- accumulators: BLOCK_M * BLOCK_N / warps <= 4096 (128 int32 registers a thread), else they spill.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass

from .capability import Device
from .compiled import override_sm

log = logging.getLogger("native_int8.tiles")

# per block, opt-in maximum
CONSUMER_SHARED_MEMORY_BYTES = 101_376
ANY = 1 << 62
M_BUCKETS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True)
class Tile:
    """BLOCK_M x BLOCK_N outputs, BLOCK_K int8 per step; warps and pipeline stages; group_m tile rows share a weight tile.

    tma: load through Hopper's tensor memory accelerator where the operands allow it.
    split_k: split the tiles of the last round along K where that gains (int8_matmul_split_k_triton.py).
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    stages: int
    group_m: int = 8
    tma: bool = False
    split_k: bool = False

    @property
    def name(self) -> str:
        """Short form for reports: "128x128x64 w4 s4 g8"."""
        marks = (" tma" if self.tma else "") + (" splitk" if self.split_k else "")
        return f"{self.block_m}x{self.block_n}x{self.block_k} w{self.warps} s{self.stages} g{self.group_m}{marks}"

    def buffers(self, sm: int) -> int:
        """Pipeline buffers that Triton allocates: one per stage on sm_90 and sm_100, one fewer with mma.sync."""
        return self.stages if sm in (90, 100, 103) else max(self.stages - 1, 1)

    def shared_memory_bytes(self, sm: int) -> int:
        """Bytes of the pipeline's buffers; the epilogue may need its own scratch, read from the compiled kernel."""
        return self.buffers(sm) * (self.block_m + self.block_n) * self.block_k

    def accumulators_per_thread(self) -> int:
        """int32 accumulators that one thread holds."""
        return self.block_m * self.block_n // (32 * self.warps)


def fits(tile: Tile, sm: int, shared_memory_bytes: int | None) -> bool:
    """True when the tile obeys both rules on a GPU with this much shared memory per block (unknown: 99 KB)."""
    limit = shared_memory_bytes or CONSUMER_SHARED_MEMORY_BYTES
    return tile.shared_memory_bytes(sm) <= limit and tile.accumulators_per_thread() <= 128


@dataclass(frozen=True)
class Split:
    """How the last tiles of an output are split along K: those after the first `whole` ones, in `pieces` pieces each.

    gain: modelled, in the units of `wave_time`.
    """

    whole: int
    pieces: int
    gain: float = 0.0


MAX_PIECES = 8
# an SM that holds one block of 128x128 takes this many times as long for it as a full SM per tile, in a last round; H200
_ALONE = 1.43
# what splitting costs, in steps of 128 columns: a second kernel, and every piece writes and reads its sums. Fitted to an H200
_SPLIT_STEPS, _PIECE_STEPS = 8.0, 0.04


def _rounds_of_split(rest: int, pieces: int, multiprocessors: int) -> float:
    """Time of `rest` tiles in pieces, in rounds of one tile on every SM."""
    if rest * pieces <= multiprocessors:
        return _ALONE / pieces
    return -(-rest * pieces // multiprocessors) / pieces


@functools.lru_cache(maxsize=16384)
def split_of(tile: Tile, m: int, n: int, k: int, multiprocessors: int) -> Split | None:
    """The best split of an [m, n] output's last tiles, None where splitting gains nothing.

    An SM holds two blocks at once. What is left after whole waves of two tiles an SM is split when it is at most one tile
    an SM: those tiles would each run alone on an SM, and many SMs would have none.
    """
    tiles, steps = -(-m // tile.block_m) * -(-n // tile.block_n), -(-k // tile.block_k)
    rest = tiles % (2 * multiprocessors)
    if rest > multiprocessors:
        return None
    best, best_gain = None, 0.0
    for pieces in range(2, min(MAX_PIECES, steps) + 1):
        if not 0 < rest * pieces <= 2 * multiprocessors:
            break
        saved = (_ALONE - _rounds_of_split(rest, pieces, multiprocessors)) * k / 128
        gain = saved - _SPLIT_STEPS - _PIECE_STEPS * rest * pieces
        if gain > best_gain:
            best, best_gain = Split(tiles - rest, pieces, gain), gain
    return best


@dataclass(frozen=True)
class Row:
    """Used for M <= m, N <= n and K <= k. `tiles` are in order of preference; several with `by_wave` are ranked by wave_time."""

    m: int
    n: int
    k: int
    tiles: tuple[Tile, ...]
    by_wave: bool = False


_T = Tile

# wgmma. Measured: NVIDIA H200 (132 SMs), torch 2.11, Triton 3.6.0, November 2026.
_SM90 = (
    Row(16, ANY, ANY, (_T(16, 32, 512, 4, 3), _T(16, 64, 128, 4, 5))),
    Row(32, ANY, ANY, (_T(32, 32, 256, 4, 4), _T(32, 64, 128, 4, 4))),
    Row(64, 8192, ANY, (_T(64, 32, 256, 4, 3), _T(64, 64, 128, 4, 4))),
    Row(64, ANY, ANY, (_T(64, 64, 256, 4, 3), _T(64, 64, 128, 4, 4))),
    Row(128, 8192, ANY, (_T(64, 32, 256, 4, 3), _T(64, 64, 128, 4, 4))),
    Row(128, ANY, ANY, (_T(128, 64, 128, 4, 4), _T(64, 128, 128, 4, 3))),
    Row(ANY, ANY, ANY, (
        _T(128, 128, 128, 4, 3, 16, tma=True, split_k=True), _T(64, 128, 128, 4, 3, 16, tma=True),
        _T(128, 64, 128, 4, 4, 16, tma=True), _T(64, 64, 128, 4, 4, 16, tma=True),
        _T(128, 128, 128, 4, 3, 16, tma=True), _T(128, 128, 128, 4, 3, 16), _T(128, 128, 128, 8, 3),
    ), by_wave=True),
)  # fmt: skip

# mma.sync with 163 KB of shared memory: A100. Modelled: ranked on the mma.sync path of an H200, not on an A100, whose SMs
# also hold two blocks of the last row's first tile.
_SM80 = (
    Row(16, ANY, ANY, (_T(16, 32, 256, 4, 3), _T(16, 64, 128, 4, 4))),
    Row(32, ANY, ANY, (_T(32, 64, 128, 4, 4),)),
    Row(64, ANY, ANY, (_T(64, 64, 128, 4, 3),)),
    Row(512, 8192, ANY, (_T(64, 128, 128, 4, 3),)),
    Row(ANY, ANY, ANY, (
        _T(128, 128, 128, 4, 3, 16, split_k=True), _T(128, 128, 128, 4, 3, 16), _T(128, 128, 64, 4, 4),
    )),
)  # fmt: skip

# mma.sync with 99 KB: RTX 30, 40 and 50, A10, A40, RTX A6000, L40. Modelled: from the machine code and from published
# tunings of the same silicon; 128x128x64 on 4 warps keeps two blocks on an SM with 48 KB each.
_SM86 = (
    Row(16, ANY, ANY, (_T(16, 32, 256, 4, 3), _T(16, 64, 128, 4, 4))),
    Row(32, ANY, ANY, (_T(32, 64, 128, 4, 4),)),
    Row(64, ANY, ANY, (_T(64, 64, 128, 4, 3),)),
    Row(256, ANY, ANY, (_T(64, 128, 128, 4, 3), _T(64, 64, 128, 4, 3))),
    Row(ANY, ANY, ANY, (_T(128, 128, 64, 4, 4), _T(128, 256, 64, 8, 4), _T(64, 128, 128, 4, 3)), by_wave=True),
)

TABLES: dict[int, tuple[Row, ...]] = {80: _SM80, 86: _SM86, 89: _SM86, 90: _SM90, 120: _SM86}
# speed of an SM that holds 1, 2, ... blocks of a tile, relative to one full of the largest tile; blocks beyond the last
# number wait for a place. Modelled: an SM is as fast with one block as with more.
_RATES = {(128, 128, 64): (1.0,), (64, 128, 128): (0.93,), (128, 256, 64): (1.0,)}
# Fitted to 124 times on an H200: these tiles on 31 outputs of 256 to 1024 rows, to 7 %. Over those and 86 larger outputs its
# picks were within 0.1 % of the best of them on average.
_RATES_SM90 = {
    (128, 128, 128): (0.59, 1.0),
    (64, 128, 128): (0.37, 0.70, 0.87),
    (128, 64, 128): (0.48, 0.78),
    (64, 64, 128): (0.34, 0.51, 0.66),
}


def wave_time(tile: Tile, m: int, n: int, k: int, multiprocessors: int, sm: int = 86) -> float:
    """Relative time of an [m, n] output over k columns: that of the SM that gets most blocks, ceil(blocks / SMs) of them.

    Blocks that share an SM share its speed. The unit is 128 columns of a 128x128 tile on a full SM.
    """
    blocks = -(-m // tile.block_m) * -(-n // tile.block_n)
    rates = (_RATES_SM90 if sm == 90 else _RATES).get((tile.block_m, tile.block_n, tile.block_k), (1.0,))
    full, left = divmod(-(-blocks // multiprocessors), len(rates))
    rounds = full * len(rates) / rates[-1] + (left / rates[left - 1] if left else 0.0)
    time = rounds * tile.block_m * tile.block_n / (128 * 128) * k / 128
    split = split_of(tile, m, n, k, multiprocessors) if tile.split_k else None
    return time - split.gain if split else time


def sm_of(device: Device) -> int:
    """Architecture that kernels are compiled for, as in 86: the device's, unless TRITON_OVERRIDE_ARCH says otherwise."""
    major, minor = device.compute_capability or (8, 6)
    return override_sm() or major * 10 + minor


def table_of(sm: int) -> tuple[Row, ...]:
    """The table of an architecture; an unlisted one takes the closest that is not newer, else the consumer table."""
    if sm in TABLES:
        return TABLES[sm]
    return _SM86 if sm // 10 in (8, 11, 12) or sm < 80 else _SM80


def all_tiles(sm: int) -> set[Tile]:
    """Every tile that the table of an architecture can give."""
    return {tile for row in table_of(sm) for tile in row.tiles}


def default_large_tiles(sm: int) -> set[Tile]:
    """The tiles of the last row, which does the work of an image at 768 px and more."""
    return set(table_of(sm)[-1].tiles)


def bucket(m: int) -> int:
    """Smallest bucket that holds m rows; rows past the last bucket share it."""
    return next((limit for limit in M_BUCKETS if m <= limit), M_BUCKETS[-1])


_tuned: dict[tuple, Tile] = {}
_rejected: dict[tuple[int, Tile, str | None], str] = {}


def _tuned_key(device: Device) -> tuple:
    """Two cards of one architecture may want different tiles, so both name and number of SMs count."""
    return sm_of(device), device.name, device.multiprocessors


def use_tuned(device: Device, entries: Mapping[tuple[int, int, int], Tile]) -> None:
    """Prefer these tiles on `device`, keyed by (M bucket, N, K); replaces what was set for it before."""
    owner = _tuned_key(device)
    for key in [key for key in _tuned if key[:3] == owner]:
        del _tuned[key]
    _tuned.update({(*owner, *key): tile for key, tile in entries.items()})
    pick.cache_clear()


def k_kind(tile: Tile, k: int) -> str:
    """What of K changes a tile's machine code: "even", "masked" (a last step that is not full) or "odd" (unaligned too)."""
    if k % 16:
        return "odd"
    return "masked" if k % tile.block_k else "even"


def reject(sm: int, tile: Tile, reason: str, kind: str | None = None) -> None:
    """Never give this tile again in this process; the reason is logged and kept for reports.

    kind: of K (`k_kind`), when only that machine code is bad; None for all.
    """
    if (sm, tile, kind) not in _rejected:
        where = f" for {kind} K" if kind else ""
        log.warning("tile %s on sm_%d is not used%s: %s", tile.name, sm, where, reason)
        _rejected[sm, tile, kind] = reason
        pick.cache_clear()


def rejected(sm: int) -> dict[str, str]:
    """Names of the tiles that were rejected on an architecture, and why."""
    return {
        tile.name + (f", {kind} K" if kind else ""): reason
        for (arch, tile, kind), reason in _rejected.items()
        if arch == sm
    }


def candidates(sm: int, m: int, n: int, k: int, multiprocessors: int | None) -> tuple[Tile, ...]:
    """Tiles of the first row that holds, best first."""
    row = next(row for row in table_of(sm) if m <= row.m and n <= row.n and k <= row.k)
    if row.by_wave and multiprocessors:
        return tuple(sorted(row.tiles, key=lambda tile: wave_time(tile, m, n, k, multiprocessors, sm)))
    return row.tiles


@functools.lru_cache(maxsize=16384)
def pick(device: Device, m: int, n: int, k: int) -> Tile:
    """The tile for q_x [m, k] times q_w [n, k] on `device`: a pure function of its arguments, so it is cached.

    A new M compiles and measures nothing: it only chooses among the tiles of the table.
    """
    sm = sm_of(device)
    tuned = _tuned.get((*_tuned_key(device), bucket(m), n, k))
    options = ((tuned,) if tuned else ()) + candidates(sm, m, n, k, device.multiprocessors)
    usable = _usable(device, options, k)
    return usable[0] if usable else options[-1]


def _usable(device: Device, options: tuple[Tile, ...], k: int) -> list[Tile]:
    sm = sm_of(device)
    return [
        tile
        for tile in options
        if (sm, tile, None) not in _rejected
        and (sm, tile, k_kind(tile, k)) not in _rejected
        and fits(tile, sm, device.shared_memory_per_block_bytes)
    ]


def reachable(device: Device, n: int, k: int) -> tuple[Tile, ...]:
    """Every tile that `pick` can give for an [N, K] weight, whatever M is; those of the largest M first."""
    owner = _tuned_key(device)
    tuned = [tile for key, tile in _tuned.items() if key[:3] == owner and key[4:] == (n, k)]
    found = _usable(device, tuple(tuned), k)
    for row in reversed(table_of(sm_of(device))):
        if n <= row.n and k <= row.k:
            usable = _usable(device, row.tiles, k) or [row.tiles[-1]]
            if row.by_wave:
                # of tiles with equal blocks the first one wins or ties
                first_of: dict[tuple[int, int, int], Tile] = {}
                for tile in usable:
                    first_of.setdefault((tile.block_m, tile.block_n, tile.block_k), tile)
                found += first_of.values()
            else:
                found.append(usable[0])
    return tuple(dict.fromkeys(found))
