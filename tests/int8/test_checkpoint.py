import json
import struct

import pytest
import torch
from native_int8.nodes.int8.checkpoint import PREFIXES, CheckpointError, header_of, read_header
from packtest.checkpoints import floats
from safetensors.torch import save_file

WORDS = "incomplete or not a safetensors file"


def write(path, header: dict | bytes, data: bytes = b"") -> str:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return str(path)


def entry(shape=(2, 2), dtype="F32", start=0, end=16) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


@pytest.fixture
def sound(tmp_path):
    path = tmp_path / "sound.safetensors"
    save_file({"blocks.0.a.weight": floats(8, 16), "blocks.0.a.bias": floats(8)}, path, metadata={"k": "v"})
    return path


def test_reads_dtype_shape_and_metadata_without_the_data(sound):
    header = read_header(str(sound))
    assert header.tensors["blocks.0.a.weight"].dtype == "F32"
    assert header.tensors["blocks.0.a.weight"].shape == (8, 16)
    assert header.metadata == {"k": "v"}
    assert header.prefix == ""


@pytest.mark.parametrize(
    "content, said",
    [
        (b"", "0 bytes"),
        (b"abc", "3 bytes"),
        (b"<!DOCTYPE html><html>login</html>", "web page"),
        (b"\n <html><body>404</body></html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "Git LFS pointer"),
        (b"GGUF\x03\x00\x00\x00" + bytes(40), "GGUF"),
        (b"PK\x03\x04" + bytes(60), "pickled"),
        (b"\xff" * 64, "header claims"),
    ],
    ids=["empty", "short", "html", "html-blank", "lfs", "gguf", "pickle", "noise"],
)
def test_names_what_another_file_is(tmp_path, content, said):
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(str(path))
    for part in (str(path), WORDS, said):
        assert part in str(caught.value)


def test_names_the_first_tensor_that_a_cut_file_lacks(sound):
    content = sound.read_bytes()
    sound.write_bytes(content[:-5])
    with pytest.raises(CheckpointError, match=WORDS) as caught:
        read_header(str(sound))
    assert "blocks.0.a." in str(caught.value) and "cut short" in str(caught.value)
    sound.write_bytes(content[:20])
    with pytest.raises(CheckpointError, match=WORDS):
        read_header(str(sound))


def test_every_cut_of_a_file_is_found(sound):
    content = sound.read_bytes()
    for length in range(len(content)):
        sound.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_header(str(sound))


@pytest.mark.parametrize(
    "header",
    [
        b"{not json",
        b"\xff\xfe\x00\x01",
        b"[1, 2]",
        b"[" * 50_000,
        b"{}",
        {"a": 3},
        {"a": entry(dtype="I3")},
        {"a": entry(dtype=["F32"])},
        {"a": entry(shape=(-2, -2))},
        {"a": entry(shape=(2, True))},
        {"a": entry(shape=(2**40, 2**40))},
        {"a": entry(start=8)},
        {"a": {**entry(), "data_offsets": [0]}},
        {"a": entry(), "b": entry()},
        b'{"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}, "a": {}}',
        {"__metadata__": [], "a": entry(start=16, end=32)},
    ],
    ids=range(16),
)
def test_a_damaged_header_is_a_clear_error(tmp_path, header):
    with pytest.raises(CheckpointError, match=WORDS):
        read_header(write(tmp_path / "model.safetensors", header, bytes(16)))


def test_no_length_of_a_header_is_taken_for_another_kind_of_file(tmp_path):
    for padding in range(2600):
        header = json.dumps({"a": entry()}).encode() + b" " * padding
        if len(header) % 256 in (0x3C, 0x47, 0x50, 0x80, 0x09, 0x20):
            assert read_header(write(tmp_path / "model.safetensors", header, bytes(16))).tensors


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(CheckpointError, match="no such file"):
        read_header(str(tmp_path / "none.safetensors"))


@pytest.mark.parametrize("prefix", ["", *PREFIXES])
def test_strips_the_prefix_and_names_the_rest(prefix):
    state = {f"{prefix}blocks.{i}.a.weight": floats(4, 4) for i in range(2)}
    state["vae.decoder.conv_in.weight"] = floats(4, 4)
    header = header_of(state)
    assert set(header.tensors) == {"blocks.0.a.weight", "blocks.1.a.weight"}
    assert header.prefix == prefix
    assert header.rest == ("vae.decoder.conv_in.weight",)
    assert header.key("blocks.0.a.weight") in state


def test_two_models_in_one_file_stop_and_name_a_key_of_each():
    state = {"model.diffusion_model.blocks.0.a.weight": floats(4, 4), "transformer.blocks.0.a.weight": floats(4, 4)}
    with pytest.raises(CheckpointError) as caught:
        header_of(state)
    assert all(key in str(caught.value) for key in state)


def test_a_file_without_a_diffusion_model_names_its_parts():
    with pytest.raises(CheckpointError, match="vae"):
        header_of({"vae.decoder.conv_in.weight": floats(4, 4)})


def test_header_of_tensors_equals_the_header_of_their_file(tmp_path):
    tensors = {
        "a.weight": floats(4, 6, dtype=torch.bfloat16),
        "b.weight": floats(4, 6).to(torch.float8_e4m3fn),
        "c.weight": torch.zeros(4, 6, dtype=torch.int8),
        "d": torch.zeros(3, dtype=torch.uint8),
    }
    save_file(tensors, tmp_path / "x.safetensors")
    from_file = read_header(str(tmp_path / "x.safetensors")).tensors
    from_memory = header_of(tensors).tensors
    assert {n: (i.dtype, i.shape) for n, i in from_file.items()} == {
        n: (i.dtype, i.shape) for n, i in from_memory.items()
    }
