"""The tile tables: rules that hold for every tile, lookups for real cards, and what the guard does with a bad tile."""

import itertools
import time
from types import SimpleNamespace

import pytest
from native_int8.kernels import device_from, tiles
from native_int8.kernels.int8_matmul_triton import MAX_SPILLS, check_compiled

# name, compute capability, SMs
CARDS = {
    "3060": ("NVIDIA GeForce RTX 3060", (8, 6), 28),
    "3070": ("NVIDIA GeForce RTX 3070", (8, 6), 46),
    "3080": ("NVIDIA GeForce RTX 3080", (8, 6), 68),
    "3090": ("NVIDIA GeForce RTX 3090", (8, 6), 82),
    "A40": ("NVIDIA A40", (8, 6), 84),
    "A6000": ("NVIDIA RTX A6000", (8, 6), 84),
    "A100": ("NVIDIA A100-SXM4-80GB", (8, 0), 108),
    "4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128),
    "5090": ("NVIDIA GeForce RTX 5090", (12, 0), 170),
    "H100": ("NVIDIA H100 80GB HBM3", (9, 0), 132),
    "H200": ("NVIDIA H200", (9, 0), 132),
}
SIZES = (128, 512, 3072, 4608, 6144, 12288, 13824, 36864, 53248)
ROWS = (1, 2, 15, 16, 17, 32, 33, 64, 65, 128, 256, 257, 512, 1000, 1024, 2304, 2560, 4096, 4352, 8704, 9000, 100_000)


def card(name: str):
    full_name, capability, sms = CARDS[name]
    return device_from(name=full_name, compute_capability=capability, multiprocessors=sms, triton="3.6.0")


@pytest.fixture(autouse=True)
def nothing_rejected():
    yield
    tiles._rejected.clear()
    tiles.pick.cache_clear()


@pytest.mark.parametrize("sm", sorted(tiles.TABLES))
def test_every_tile_keeps_the_rules(sm):
    device = device_from(name="card", compute_capability=divmod(sm, 10))
    for tile in tiles.all_tiles(sm):
        assert tile.accumulators_per_thread() <= 128, tile
        assert tile.shared_memory_bytes(sm) <= device.shared_memory_per_block_bytes, tile
        assert tile.block_m >= 16 and tile.block_n >= 16 and tile.block_k >= 32, tile
        for size in (tile.block_m, tile.block_n, tile.block_k, tile.warps):
            assert size & (size - 1) == 0, tile
        assert not tile.tma or sm == 90, tile
        assert tile.shared_memory_bytes(sm) <= tiles.CONSUMER_SHARED_MEMORY_BYTES or sm not in (86, 89, 120), tile


def test_the_rules_bite():
    # spills: 256 accumulators a thread; too large: 128 KB of buffers
    assert not tiles.fits(tiles.Tile(128, 256, 64, 4, 3), 86, None)
    assert not tiles.fits(tiles.Tile(256, 128, 128, 8, 4), 86, None)
    assert tiles.fits(tiles.Tile(256, 128, 128, 8, 4), 80, 163 * 1024)


@pytest.mark.parametrize("sm", sorted(tiles.TABLES))
def test_a_table_ends_with_a_row_for_everything(sm):
    last = tiles.table_of(sm)[-1]
    assert (last.m, last.n, last.k) == (tiles.ANY,) * 3
    limits = [row.m for row in tiles.table_of(sm)]
    assert limits == sorted(limits)


def test_buckets_are_monotone_and_hold_their_rows():
    assert list(tiles.M_BUCKETS) == sorted(set(tiles.M_BUCKETS))
    buckets = [tiles.bucket(m) for m in range(1, 20_000)]
    assert buckets == sorted(buckets)
    assert all(m <= found for m, found in zip(range(1, tiles.M_BUCKETS[-1] + 1), buckets, strict=False))
    assert set(buckets) == set(tiles.M_BUCKETS)


@pytest.mark.parametrize("sm", [70, 75, 87, 88, 100, 103, 110, 121, 130, 200])
def test_an_unlisted_architecture_has_a_table_that_fits(sm):
    device = device_from(name="new card", compute_capability=divmod(sm, 10), multiprocessors=50)
    for m, n, k in itertools.product(ROWS, (4608, 13824), (4608, 12288)):
        tile = tiles.pick(device, m, n, k)
        if sm >= 80:
            assert tiles.fits(tile, sm, device.shared_memory_per_block_bytes)


def test_a_device_without_a_capability_has_a_tile():
    assert tiles.pick(device_from(name="CPU", type="cpu"), 17, 64, 64) in tiles.all_tiles(86)


@pytest.mark.parametrize("name", CARDS)
def test_each_card_gets_tiles_that_fit_it(name):
    device = card(name)
    sm = tiles.sm_of(device)
    for m, n, k in itertools.product(ROWS, SIZES, SIZES):
        tile = tiles.pick(device, m, n, k)
        assert tiles.fits(tile, sm, device.shared_memory_per_block_bytes), (m, n, k, tile)
        assert tile in tiles.all_tiles(sm)
        # a tile taller than twice M computes mostly nothing
        assert tile.block_m <= max(64, 2 * m), (m, n, k, tile)


@pytest.mark.parametrize("name", CARDS)
def test_reachable_names_every_tile_that_pick_can_give(name):
    device = card(name)
    for n, k in itertools.product(SIZES, SIZES):
        picked = {tiles.pick(device, m, n, k) for m in (*ROWS, *range(50, 9000, 177))}
        assert picked <= set(tiles.reachable(device, n, k))


def test_the_number_of_sms_decides_on_consumer_cards():
    # 4096 x 4608 fills whole waves of 128x128 tiles on 84 SMs, and leaves a tail on 82
    tile, wide = tiles.Tile(128, 128, 64, 4, 4), tiles.Tile(128, 256, 64, 8, 4)
    assert tiles.wave_time(tile, 4096, 4608, 4608, 84) < tiles.wave_time(tile, 4096, 4608, 4608, 82)
    assert tiles.wave_time(wide, 4096, 4608, 4608, 84) < tiles.wave_time(wide, 4096, 4608, 4608, 82)
    cheapest = tiles.pick(card("3090"), 4096, 4608, 4608)
    times = {t: tiles.wave_time(t, 4096, 4608, 4608, 82) for t in tiles.table_of(86)[-1].tiles}
    assert times[cheapest] == min(times.values())


@pytest.mark.fault("B141", "B143")
def test_pick_is_deterministic_and_fast():
    device = card("3090")
    asked = list(itertools.product(range(1, 9000, 97), (4608, 13824), (4608, 12288)))
    first = [tiles.pick(device, *sizes) for sizes in asked]
    tiles.pick.cache_clear()
    assert first == [tiles.pick(device, *sizes) for sizes in asked]
    start = time.perf_counter()
    for sizes in asked:
        tiles.pick(device, *sizes)
    # measured 1 us; a per-call lookup must not be seen beside a launch
    assert (time.perf_counter() - start) / len(asked) < 20e-6


# ---- the guard


def compiled(spills, registers=255):
    """What the guard reads of a compiled kernel."""
    return SimpleNamespace(n_spills=spills, n_regs=registers)


def test_a_tile_that_spills_is_replaced_by_the_next(caplog):
    device = card("3090")
    first = tiles.pick(device, 4352, 4608, 4608)
    check_compiled(compiled(MAX_SPILLS + 8), 86, first, 4608)
    second = tiles.pick(device, 4352, 4608, 4608)
    assert second != first and second in tiles.all_tiles(86)
    reason = f"{MAX_SPILLS + 8} bytes of registers spilled with 255 registers"
    assert tiles.rejected(86) == {f"{first.name}, even K": reason}
    assert first.name in caplog.text and "sm_86" in caplog.text
    assert first not in tiles.reachable(device, 4608, 4608)
    # K of another kind, and another architecture, have other machine code
    assert tiles.pick(device, 4352, 4608, 4600) == first and first in tiles.reachable(device, 4608, 4600)
    assert tiles.pick(card("A100"), 4352, 4608, 4608) == tiles.table_of(80)[-1].tiles[0]


@pytest.mark.parametrize("spills", [0, None, MAX_SPILLS])
def test_a_tile_that_does_not_spill_stays(spills):
    device = card("3090")
    first = tiles.pick(device, 4352, 4608, 4608)
    check_compiled(compiled(spills), 86, first, 4608)
    assert tiles.pick(device, 4352, 4608, 4608) == first and not tiles.rejected(86)


def test_a_reason_is_kept_and_logged_once(caplog):
    tile = tiles.table_of(86)[-1].tiles[0]
    for spills in (100, 200):
        check_compiled(compiled(spills), 86, tile, 4608)
    assert len(caplog.records) == 1 and "100 bytes" in tiles.rejected(86)[f"{tile.name}, even K"]


@pytest.mark.parametrize("sm", sorted(tiles.TABLES))
def test_something_is_picked_even_when_every_tile_was_rejected(sm):
    device = device_from(name="card", compute_capability=divmod(sm, 10), multiprocessors=100)
    for tile in tiles.all_tiles(sm):
        tiles.reject(sm, tile, "for the test")
    for m in ROWS:
        assert tiles.pick(device, m, 4608, 4608) in tiles.all_tiles(sm)
    assert tiles.reachable(device, 4608, 4608)


def test_a_rejected_tuned_tile_gives_way_to_the_table():
    device = card("3090")
    tuned = tiles.Tile(256, 128, 64, 8, 4)
    tiles.use_tuned(device, {(8192, 4608, 4608): tuned})
    try:
        assert tiles.pick(device, 4352, 4608, 4608) == tuned
        tiles.reject(86, tuned, "for the test")
        assert tiles.pick(device, 4352, 4608, 4608) in tiles.all_tiles(86)
    finally:
        tiles.use_tuned(device, {})
