"""The tuner without a GPU: real (interpreted) kernels on tiny shapes, made-up cards and times."""

import itertools
import json

import pytest
import torch
from native_int8.kernels import NoImplementation, detect, device_from, tiles, tuned, tuning
from native_int8.kernels.tile_search import search_space, worth_measuring

RTX_3090 = device_from(
    name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), multiprocessors=82, driver="580.1", torch="2.11.0",
    triton="3.6.0",
)  # fmt: skip
HEALTHY = 68.0
SHAPES = [(256, 64), (128, 96)]
WINNER = tiles.Tile(64, 64, 128, 4, 3)


def prefers(winner, us=80.0):
    """A timer that gives `winner` (whatever its GROUP_M) `us` and everything else 100 us."""

    def timer(calls):
        return {name: us if name.startswith(winner.name.split(" g")[0] + " ") else 100.0 for name in calls}

    return timer


def run(device=RTX_3090, shapes=SHAPES, m_rows=(100,), refuse=lambda *_: None, **options):
    options = {"timer": prefers(WINNER), "bf16_tflops": lambda: HEALTHY, **options}
    return tuning.tune(
        device, shapes, m_rows=m_rows, torch_device="cpu", out_dtype=torch.float32, refuse=refuse, **options
    )


@pytest.fixture(autouse=True)
def clean_tiles():
    yield
    tiles.use_tuned(RTX_3090, {})
    tiles._rejected.clear()
    tiles.pick.cache_clear()


def test_the_faster_tile_wins_each_case():
    result = run(m_rows=(100, 300))
    assert [entry.key for entry in result.entries] == [
        (512, 256, 64), (512, 128, 96), (128, 256, 64), (128, 128, 96),
    ]  # fmt: skip
    for entry in result.entries:
        assert entry.tile.name.startswith("64x64x128 w4 s3") and entry.us == 80.0
        assert entry.gain == 1.0 if entry.baseline == entry.tile else entry.gain == 1.25
    assert not result.left_out and not result.interrupted


def test_a_gain_within_the_noise_keeps_the_tile_in_use():
    result = run(shapes=[(256, 64)], m_rows=(100,), timer=prefers(tiles.Tile(64, 64, 128, 4, 3), us=99.5))
    (entry,) = result.entries
    assert entry.tile == entry.baseline == tiles.pick(RTX_3090, 100, 256, 64)


def test_the_largest_m_of_a_bucket_is_measured():
    result = run(shapes=[(64, 64)], m_rows=(70, 100, 90))
    assert [(entry.m, entry.m_bucket) for entry in result.entries] == [(100, 128)]


def test_every_tile_is_really_run_and_compared_before_it_is_timed():
    device = detect("cpu")
    refused = []

    def refuse(case, tile, fake_device):
        reason = tuning._Case.refusal(case, tile, device)
        refused.append(reason)
        return reason

    result = run(shapes=[(32, 96)], m_rows=(17,), refuse=refuse)
    assert len(refused) >= 3 and set(refused) == {None}
    assert len(result.entries) == 1


def test_a_wrong_tile_is_left_out_with_the_reason():
    def refuse(case, tile, device):
        return "3 of 9 outputs differ from torch._int_mm" if tile.name.startswith("64x64x128") else None

    result = run(shapes=[(256, 64)], m_rows=(100,), refuse=refuse)
    assert not result.entries[0].tile.name.startswith("64x64x128")
    assert any("64x64x128 w4 s3 g8 was left out: 3 of 9 outputs differ" in note for note in result.left_out)


def test_comparison_sees_one_wrong_output():
    case = tuning._Case(17, 32, 96, torch.device("cpu"), torch.float32)
    assert case.refusal(tiles.Tile(16, 32, 64, 4, 3), detect("cpu")) is None
    case.expected[5, 7] += 1e-3
    assert case.refusal(tiles.Tile(16, 32, 64, 4, 3), detect("cpu")) == "1 of 544 outputs differ from torch._int_mm"


def test_a_throttled_card_is_refused_with_both_numbers():
    with pytest.raises(tuning.ThrottledCard, match=r"8\.1 TFLOPS, rated for 71\.[0-9]"):
        run(bf16_tflops=lambda: 8.1)


def test_a_card_that_throttles_during_the_run_is_refused():
    numbers = iter([68.0, 20.0])
    with pytest.raises(tuning.ThrottledCard, match=r"20\.0 TFLOPS"):
        run(bf16_tflops=lambda: next(numbers))


@pytest.mark.parametrize(
    ("name", "capability", "sms", "mhz", "tflops"),
    [
        ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, 71.2),
        ("NVIDIA A40", (8, 6), 84, 1740, 149.7),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, 1410, 312),
        ("NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, 165.2),
        ("NVIDIA H200", (9, 0), 132, 1830, 989),
        ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, 209.5),
    ],
)
def test_rated_bf16(name, capability, sms, mhz, tflops):
    device = device_from(name=name, compute_capability=capability, multiprocessors=sms)
    assert tuning.rated_bf16_tflops(device, mhz) == pytest.approx(tflops, rel=0.01)
    assert tuning.rated_bf16_tflops(device) == pytest.approx(tflops, rel=0.05)


def test_interruption_keeps_what_was_measured():
    answers = iter([False, True])
    result = run(interrupted=lambda: next(answers))
    assert result.interrupted and len(result.entries) == 1
    assert "1 of 2 shapes were not measured" in result.left_out[-1]


def test_the_budget_ends_the_run():
    result = run(budget_s=-1.0)
    assert not result.entries and "2 of 2 shapes were not measured" in result.left_out[0]


def test_progress_counts_to_the_end():
    seen = []
    run(progress=lambda done, total, text: seen.append((done, total, text)))
    assert seen == [(0, 2, "100x256x64"), (1, 2, "100x128x96"), (2, 2, "done")]


def test_a_device_without_triton_says_so():
    card = device_from(
        name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), triton_missing="Triton is not installed."
    )
    with pytest.raises(NoImplementation, match="Triton is not installed"):
        run(device=card)
    assert "Triton is not installed" in tuning.is_tunable(card)
    assert tuning.is_tunable(RTX_3090) is None


@pytest.mark.parametrize("sm", [80, 86, 89, 90, 120])
def test_the_search_space_is_small_and_runs(sm):
    device = device_from(name="card", compute_capability=(sm // 10, sm % 10), multiprocessors=100)
    for m, (n, k) in itertools.product((1, 16, 64, 300, 4352, 9000), ((4608, 4608), (13824, 4608), (3072, 12288))):
        found = worth_measuring(device, m, n, k)
        assert 2 <= len(found) <= 8 and len(set(found)) == len(found)
        assert tiles.pick(device, m, n, k) in found
        for tile in found:
            assert tiles.fits(tile, sm, device.shared_memory_per_block_bytes)
            assert m <= 64 or tile.block_m >= 64
    assert len(set(search_space(sm))) == len(search_space(sm))


# ---- the file


def test_a_file_round_trips_and_applies(tmp_path):
    path = tmp_path / "deep" / "tiles.json"
    result = run()
    tuned.write(path, RTX_3090, result)
    found = tuned.read(path, RTX_3090)
    assert found.ignored is None and found.entries == result.table()
    assert [file.name for file in path.parent.iterdir()] == ["tiles.json"]
    tiles.use_tuned(RTX_3090, found.entries)
    for (bucket, n, k), tile in found.entries.items():
        assert tiles.pick(RTX_3090, bucket, n, k) == tile
        assert tile in tiles.reachable(RTX_3090, n, k)
    other = device_from(name="NVIDIA GeForce RTX 3060", compute_capability=(8, 6), multiprocessors=28)
    assert tiles.pick(other, 128, 256, 64) == tiles.pick(RTX_3090, 128, 999, 64)


def test_a_second_run_adds_to_the_file(tmp_path):
    path = tmp_path / "tiles.json"
    tuned.write(path, RTX_3090, run(shapes=[(256, 64)]))
    tuned.write(path, RTX_3090, run(shapes=[(128, 96)]))
    assert set(tuned.read(path, RTX_3090).entries) == {(128, 256, 64), (128, 128, 96)}


def test_the_file_is_readable_one_entry_a_line(tmp_path):
    path = tmp_path / "tiles.json"
    tuned.write(path, RTX_3090, run())
    text = path.read_text()
    assert json.loads(text)["key"]["device"] == "NVIDIA GeForce RTX 3090"
    assert sum('"tile"' in line for line in text.splitlines()) == 2


def test_a_missing_file_is_no_event(tmp_path):
    assert tuned.read(tmp_path / "none.json", RTX_3090) == tuned.Tuned({})


def edited(path, change):
    body = json.loads(path.read_text())
    change(body)
    path.write_text(json.dumps(body))


@pytest.mark.parametrize(
    "key",
    ["device", "architecture", "compute_capability", "multiprocessors", "driver", "torch", "triton", "kernels"],
)
def test_a_stale_or_foreign_file_is_ignored_with_the_reason(tmp_path, key, caplog):
    path = tmp_path / "tiles.json"
    tuned.write(path, RTX_3090, run())
    edited(path, lambda body: body["key"].update({key: "other"}))
    found = tuned.read(path, RTX_3090)
    assert not found.entries
    assert f"measured with {key} other" in found.ignored and found.ignored in caplog.text


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda body: body.update(format="something"), "format"),
        (lambda body: body.pop("key"), "format"),
        (lambda body: body.update(entries={}), "no list of entries"),
        (lambda body: body["entries"].append({}), "entry 2 is damaged"),
        (lambda body: body["entries"].append(5), "entry 2 is damaged"),
        (lambda body: body["entries"][0].update(tile="large"), "not a tile"),
        (lambda body: body["entries"][0].update(tile=7), "damaged"),
        (lambda body: body["entries"][0].update(tile="100x128x64 w4 s4 g8"), "no kernel takes"),
        (lambda body: body["entries"][0].update(tile="128x128x64 w4 s4 g0"), "no kernel takes"),
        (lambda body: body["entries"][0].update(tile="256x256x128 w16 s4 g8"), "does not fit"),
        (lambda body: body["entries"][0].update(m_bucket=100), "sizes"),
        (lambda body: body["entries"][0].update(n=-1), "sizes"),
        (lambda body: body["entries"][0].update(n=True), "sizes"),
    ],
)
def test_a_damaged_file_is_ignored_with_the_reason(tmp_path, change, reason):
    path = tmp_path / "tiles.json"
    tuned.write(path, RTX_3090, run())
    edited(path, change)
    found = tuned.read(path, RTX_3090)
    assert not found.entries and reason in found.ignored and str(path) in found.ignored


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "\x00\x01"])
def test_a_file_that_is_no_json_object_is_ignored(tmp_path, text):
    path = tmp_path / "tiles.json"
    path.write_text(text)
    assert tuned.read(path, RTX_3090).ignored
    tuned.write(path, RTX_3090, run())
    assert tuned.read(path, RTX_3090).entries


def test_tile_names_round_trip():
    for tile in (*search_space(86), *search_space(90)):
        assert tuned.tile_from(tile.name) == tile
    with pytest.raises(ValueError, match="not a tile"):
        tuned.tile_from("128x128")


def test_slug_is_a_file_name():
    assert tuned.slug(RTX_3090) == "nvidia-geforce-rtx-3090-sm86"
