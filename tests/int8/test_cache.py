"""Converted copies: made, used, made again when damaged, and never in the way."""

import errno
import os
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from native_int8.nodes.int8 import cache, loader, quantize
from native_int8.nodes.int8.checkpoint import CheckpointError, read_header
from native_int8.nodes.int8.loader import LoadOptions, load_model
from native_int8.nodes.int8.native_file import NativeFile, data_hash, data_sums
from native_int8.nodes.int8.report import REPORT_KEY
from packtest.checkpoints import floats
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy

KEEP = LoadOptions(cache=True)


@pytest.fixture(autouse=True)
def user_folder(comfy, tmp_path, monkeypatch) -> Path:
    """ComfyUI's user folder, empty for each test."""
    import folder_paths

    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    return tmp_path / "user"


@pytest.fixture
def source(emoji_file, tmp_path) -> str:
    path = tmp_path / "model.safetensors"
    shutil.copy(emoji_file, path)
    return str(path)


def entries() -> list[Path]:
    return sorted(cache.folder().iterdir()) if cache.folder().is_dir() else []


def weights(model) -> dict[str, torch.Tensor]:
    return {key: value.cpu() for key, value in model.model.diffusion_model.state_dict().items()}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


@pytest.fixture
def quantisations(monkeypatch) -> list[str]:
    """The layers that were quantised, as they are."""
    done = []
    real = quantize.quantised

    def counted(decision, *args, **options):
        done.append(decision.layer)
        return real(decision, *args, **options)

    monkeypatch.setattr(quantize, "quantised", counted)
    return done


def test_second_start_quantises_nothing_and_gives_the_same(source, quantisations, forward, comfy):
    plain = load_model(source)
    quantisations.clear()
    first = load_model(source, KEEP)
    assert len(quantisations) == 28
    (entry,) = entries()
    second = load_model(source, KEEP)
    assert len(quantisations) == 28 and entries() == [entry]
    for model in (first, second):
        assert_same(weights(model), weights(plain))
        report = model.get_attachment(REPORT_KEY)
        assert report.notes == () and report.summary() == plain.get_attachment(REPORT_KEY).summary()
    assert torch.equal(forward(second), forward(plain))
    # an entry is a model file like any other
    assert_same(weights(comfy.sd.load_diffusion_model(str(entry))), weights(plain))


def test_without_the_option_nothing_is_kept(source, user_folder):
    load_model(source)
    assert not user_folder.exists()


def test_a_native_file_is_not_copied(source, tmp_path):
    native = tmp_path / "native.safetensors"
    save_file({key: value.contiguous() for key, value in weights(load_model(source)).items()}, native)
    load_model(str(native), KEEP)
    assert entries() == []


def test_each_recipe_has_its_entry(source, quantisations):
    load_model(source, KEEP)
    load_model(source, replace(KEEP, rotation=False))
    load_model(source, replace(KEEP, protect="*.linear2"))
    assert len(entries()) == 3
    quantisations.clear()
    load_model(source, replace(KEEP, device="cpu"))
    assert not quantisations and len(entries()) == 3


def test_another_version_of_the_file_replaces_its_entry(source, quantisations):
    load_model(source, KEEP)
    (old,) = entries()
    state = load_file(source)
    name = "single_blocks.0.linear1.weight"
    name = next(key for key in state if key.endswith(name))
    state[name] = state[name] * 2
    save_file(state, source)
    os.utime(source, ns=(1, 1))
    model = load_model(source, KEEP)
    (new,) = entries()
    assert new != old
    assert_same(weights(model), weights(load_model(source)))


def test_a_new_quantiser_makes_new_entries(source, monkeypatch):
    load_model(source, KEEP)
    monkeypatch.setattr(quantize, "VERSION", quantize.VERSION + 1)
    load_model(source, KEEP)
    assert len(entries()) == 2


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap_two_tensors(path: Path) -> None:
    # same length, valid JSON, another meaning
    raw = path.read_bytes()
    a, b = b'"double_blocks.0.img_mlp.0.weight"', b'"double_blocks.1.img_mlp.0.weight"'
    assert raw.count(a) == raw.count(b) == 1
    path.write_bytes(raw.replace(a, b"@" * len(a)).replace(b, a).replace(b"@" * len(a), b))


def flip_a_bit(path: Path) -> None:
    # of the largest tensor, in the middle
    header = read_header(str(path))
    info = max(header.tensors.values(), key=lambda i: i.end - i.start)
    with open(path, "r+b") as file:
        file.seek(8 + int.from_bytes(path.read_bytes()[:8], "little") + (info.start + info.end) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))


def other_source(path: Path) -> None:
    tensors = {f"layer.{i}.weight": torch.zeros(8) for i in range(3)}
    with NativeFile(path, tensors, {cache.KEY: "{}"}, cache.TABLE) as file:
        file.update(tensors)


@pytest.mark.parametrize("damage", [cut, empty, swap_two_tensors, flip_a_bit, other_source])
def test_a_damaged_entry_is_made_again_with_a_note(damage, source, quantisations):
    load_model(source, KEEP)
    (entry,) = entries()
    whole = entry.read_bytes()
    damage(entry)
    quantisations.clear()
    model = load_model(source, KEEP)
    assert len(quantisations) == 28
    assert_same(weights(model), weights(load_model(source)))
    (note,) = model.get_attachment(REPORT_KEY).notes
    assert "damaged and has been made again" in note and str(entry) in note
    assert entry.read_bytes() == whole


def test_disk_full_loads_in_memory_and_leaves_nothing(source, monkeypatch):
    real = NativeFile._write

    def full(self, name, tensor):
        if self._position > 1_000_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(self, name, tensor)

    monkeypatch.setattr(NativeFile, "_write", full)
    model = load_model(source, KEEP)
    (note,) = model.get_attachment(REPORT_KEY).notes
    assert "No space left on device" in note and str(cache.folder()) in note
    assert entries() == []
    assert_same(weights(model), weights(load_model(source)))


def test_a_folder_that_cannot_be_written_is_told(source, user_folder):
    # root may write anywhere, so a file stands where the folder should be
    user_folder.mkdir()
    (user_folder / "native_int8").write_text("")
    model = load_model(source, KEEP)
    (note,) = model.get_attachment(REPORT_KEY).notes
    assert "No converted copy could be kept" in note and "keep_copy" in note
    assert model.get_attachment(REPORT_KEY).int8_layers == 28


def test_two_starts_at_once_leave_one_whole_entry(source):
    together, errors = threading.Barrier(2), []
    header = loader.shards.read_header(source)
    tensors = {"a.weight": torch.arange(4096, dtype=torch.int32)}

    def start():
        def convert(sink):
            # both are in the middle of writing
            together.wait(30)
            sink.update(tensors)
            together.wait(30)

        try:
            native, notes = cache.fetch(header, KEEP, convert, load_file, {})
            assert_same(native, tensors)
            assert notes == []
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    key = cache.key_of(header, KEEP)
    assert entries() == [cache.path_of(key)] and cache.fault(key) is None


def test_an_interrupt_leaves_nothing_and_is_passed_on(source, comfy, monkeypatch):
    count = 0

    def interrupt():
        nonlocal count
        count += 1
        if count == 10:
            raise comfy.model_management.InterruptProcessingException

    monkeypatch.setattr(comfy.model_management, "throw_exception_if_processing_interrupted", interrupt)
    with pytest.raises(comfy.model_management.InterruptProcessingException):
        load_model(source, KEEP)
    assert entries() == []


def test_a_bad_source_is_the_sources_error(source):
    state = load_file(source)
    name = next(key for key in state if key.endswith("single_blocks.0.linear1.weight"))
    state[name][0, 0] = float("nan")
    save_file(state, source)
    with pytest.raises(CheckpointError, match="NaN or Inf"):
        load_model(source, KEEP)
    assert entries() == []


def test_what_a_crash_left_is_removed_later(source):
    cache.folder().mkdir(parents=True)
    old, young = cache.folder() / ".a.safetensors.1-ab.part", cache.folder() / ".b.safetensors.2-cd.part"
    for path in (old, young):
        path.write_bytes(b"half")
    os.utime(old, (0, 0))
    load_model(source, KEEP)
    assert not old.exists() and young.exists()


def test_sums_tell_every_bit_and_the_place_of_a_megabyte():
    values = floats(700, 1001, dtype=torch.bfloat16)
    raw = values.view(torch.uint8).reshape(-1)
    before = data_sums(values)
    for place in (0, 7, 8, 1 << 20, raw.numel() - 1):
        raw[place] ^= 1
        assert data_sums(values) != before, place
        raw[place] ^= 1
    assert data_sums(values) == before
    two = torch.cat([torch.zeros(1 << 17, dtype=torch.int64), torch.ones(1 << 17, dtype=torch.int64)])
    assert data_sums(two) != data_sums(two.flip(0))
    assert (
        data_hash({"a": two, "b": values}) == data_hash({"b": values, "a": two}) != data_hash({"b": two, "a": values})
    )
    assert data_sums(torch.zeros(0)) != data_sums(torch.zeros(1))
    assert data_sums(torch.tensor(0.5)) != data_sums(torch.tensor(0.25))
