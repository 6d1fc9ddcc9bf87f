"""Which tiles are worth measuring on a card: the search space, what cannot run in it, and a model that ranks the rest.

The model counts the clocks of one SM: whole waves of blocks, each as slow as the slowest of tensor cores, L2 and
shared memory, plus what a block pays once (filling the pipeline, writing its outputs). It ranks; it predicts no times.
"""

from __future__ import annotations

from .capability import Device
from .tiles import Tile, candidates, fits, sm_of

_T = Tile

# mma.sync: tiles whose machine code is clean on Triton 3.6 to 3.9, and that published tunings of sm_80 to sm_89 picked
MMA_SYNC_TILES = (
    _T(128, 128, 64, 4, 4), _T(128, 128, 64, 4, 3), _T(128, 256, 64, 8, 4), _T(256, 128, 64, 8, 4),
    _T(128, 256, 128, 8, 3), _T(256, 128, 128, 8, 3), _T(128, 128, 128, 4, 3), _T(64, 256, 64, 4, 3),
    _T(256, 64, 64, 4, 3), _T(128, 128, 64, 8, 4), _T(64, 128, 128, 4, 3), _T(128, 64, 128, 4, 3),
    _T(64, 64, 128, 4, 3), _T(64, 128, 64, 4, 4), _T(32, 128, 128, 4, 3), _T(32, 64, 128, 4, 4),
    _T(16, 64, 256, 4, 3), _T(16, 64, 128, 4, 4), _T(16, 32, 256, 4, 3),
)  # fmt: skip
# wgmma: Hopper, with and without the tensor memory accelerator
WGMMA_TILES = (
    _T(128, 128, 128, 4, 3), _T(128, 128, 128, 4, 3, 16, tma=True, split_k=True), _T(128, 128, 128, 4, 3, tma=True), _T(128, 128, 128, 8, 3), _T(128, 128, 128, 4, 4),
    _T(256, 128, 128, 8, 3), _T(256, 128, 128, 8, 3, tma=True), _T(128, 256, 128, 8, 3),
    _T(128, 256, 128, 8, 3, tma=True), _T(64, 256, 128, 4, 3), _T(64, 128, 128, 4, 3), _T(64, 128, 128, 4, 4),
    _T(128, 64, 128, 4, 4), _T(64, 64, 128, 4, 4), _T(64, 64, 256, 4, 3), _T(64, 32, 256, 4, 3),
    _T(32, 64, 128, 4, 4), _T(32, 32, 256, 4, 4), _T(16, 64, 128, 4, 5), _T(16, 32, 512, 4, 3),
)  # fmt: skip

KEEP = 8
# int8 multiply-adds and L2 bytes per clock and SM
_MACS_PER_CLOCK = {80: 2048, 90: 4096, 100: 8192, 103: 8192}
_L2_BYTES_PER_CLOCK = {80: 40, 90: 64, 100: 64, 103: 64}
_CONSUMER_MACS_PER_CLOCK, _CONSUMER_L2_BYTES_PER_CLOCK = 1024, 20
_SHARED_BYTES_PER_CLOCK = 128
_REGISTERS_PER_SM = 65536
# Triton and the driver keep this much of an SM's shared memory per block
_RESERVED_BYTES = 1024
_FILL_CLOCKS = 1500


def search_space(sm: int) -> tuple[Tile, ...]:
    """Every tile that the tuner knows for an architecture, in the order of the published winners."""
    return WGMMA_TILES if sm == 90 else MMA_SYNC_TILES


def blocks_per_sm(tile: Tile, sm: int, shared_memory_per_block_bytes: int) -> int:
    """Blocks of this tile that an SM holds at once, by shared memory and by registers; at least 1."""
    registers = min(255, tile.accumulators_per_thread() + 96) * 32 * tile.warps
    by_memory = (shared_memory_per_block_bytes + _RESERVED_BYTES) // (tile.shared_memory_bytes(sm) + _RESERVED_BYTES)
    return max(1, min(by_memory, _REGISTERS_PER_SM // registers))


def _block_clocks(tile: Tile, k: int, sm: int, blocks: int) -> float:
    """Clocks for `blocks` blocks that share an SM: the slowest unit's, and what is paid once."""
    macs = _MACS_PER_CLOCK.get(sm, _CONSUMER_MACS_PER_CLOCK)
    l2 = _L2_BYTES_PER_CLOCK.get(sm, _CONSUMER_L2_BYTES_PER_CLOCK)
    outputs, edges = tile.block_m * tile.block_n, tile.block_m + tile.block_n
    # one warp per scheduler cannot hide the barriers of a step; longer steps have fewer of them
    latency = (0.85 if blocks * tile.warps <= 4 else 0.97) * (1.0 if tile.block_k >= 128 else 0.98)
    warp_side = (outputs / tile.warps) ** 0.5
    per_k = max(
        outputs / (macs * latency),
        edges / l2,
        (outputs * 2 / warp_side + edges) / _SHARED_BYTES_PER_CLOCK if sm < 90 or sm >= 110 else 0.0,
    )
    return blocks * (per_k * k + outputs * 2 / l2) + _FILL_CLOCKS


def model_clocks(tile: Tile, m: int, n: int, k: int, device: Device) -> float:
    """Modelled clocks of an [m, n] output over k: full waves, then a last one with what is left."""
    sm, sms = sm_of(device), device.multiprocessors or 1
    blocks = blocks_per_sm(tile, sm, device.shared_memory_per_block_bytes or 99 * 1024)
    tiles = -(-m // tile.block_m) * -(-n // tile.block_n)
    waves, rest = divmod(tiles, sms * blocks)
    return waves * _block_clocks(tile, k, sm, blocks) + (_block_clocks(tile, k, sm, -(-rest // sms)) if rest else 0.0)


def worth_measuring(device: Device, m: int, n: int, k: int, keep: int = KEEP) -> tuple[Tile, ...]:
    """At most `keep` tiles for q_x [m, k] times q_w [n, k], best by the model first; the table's own come first of all.

    Dropped: more than 128 accumulators a thread; more shared memory than the device gives a block; tiles taller than
    M rounded up to a power of two; tiles of 16 and 32 rows for M > 64.
    """
    sm = sm_of(device)
    tallest = max(16, 1 << (m - 1).bit_length())
    known = candidates(sm, m, n, k, device.multiprocessors)
    known = tuple(t for t in known if fits(t, sm, device.shared_memory_per_block_bytes))[:2]
    others = [
        tile
        for tile in search_space(sm)
        if tile not in known
        and fits(tile, sm, device.shared_memory_per_block_bytes)
        and tile.block_m <= tallest
        and not (m > 64 and tile.block_m <= 32)
    ]
    others.sort(key=lambda tile: model_clocks(tile, m, n, k, device))
    return (known + tuple(others))[:keep]
