"""Models in several files: every part is opened, by any spelling, and a missing one is named."""

import json

import pytest
import torch
from native_int8.nodes.int8 import shards
from native_int8.nodes.int8.checkpoint import CheckpointError
from native_int8.nodes.int8.loader import load_model
from packtest.checkpoints import int8_layer
from safetensors.torch import load_file, save_file


def write(folder, parts: list[dict], index: bool = True, stem: str = "model") -> list[str]:
    """The parts as a publisher would write them; the paths."""
    names = [f"{stem}-{i + 1:05}-of-{len(parts):05}.safetensors" for i in range(len(parts))]
    for name, tensors in zip(names, parts, strict=True):
        save_file(tensors, folder / name, {"part": name})
    if index:
        places = {key: name for name, tensors in zip(names, parts, strict=True) for key in tensors}
        (folder / f"{stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return [str(folder / name) for name in names]


def layer(name: str, prefix: str = "") -> dict:
    return {
        prefix + key: value for key, value in int8_layer(name, {"format": "int8_tensorwise"}, torch.ones(24, 1)).items()
    }


def test_any_part_and_the_index_stand_for_all(tmp_path):
    files = write(tmp_path, [layer("a"), layer("b"), layer("c")])
    for path in [*files, str(tmp_path / "model.safetensors.index.json")]:
        assert list(shards.files_of(path)) == files
        header = shards.read_header(path)
        assert set(header.tensors) == {
            f"{n}.{k}" for n in "abc" for k in ("weight", "weight_scale", "comfy_quant")
        }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["one.safetensors", "a-00002-of-00001.safetensors", "a-00000-of-00002.safetensors", "x-1-of-2.safetensors"]
)
def test_other_names_are_single_files(name, tmp_path):
    save_file(layer("a"), tmp_path / name)
    assert shards.files_of(str(tmp_path / name)) == (str(tmp_path / name),)


def test_weight_and_scale_in_two_files_meet(tmp_path):
    whole = layer("blocks.0.attn", "model.diffusion_model.")
    first = {key: value for key, value in whole.items() if key.endswith(".weight")}
    second = {key: value for key, value in whole.items() if key not in first}
    files = write(tmp_path, [first, second])
    header = shards.read_header(files[1])
    assert header.prefix == "model.diffusion_model."
    assert set(header.tensors) == {"blocks.0.attn.weight", "blocks.0.attn.weight_scale", "blocks.0.attn.comfy_quant"}


def test_a_missing_part_is_named(tmp_path):
    files = write(tmp_path, [layer("a"), layer("b"), layer("c")])
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    for path in (files[0], str(tmp_path / "model.safetensors.index.json")):
        with pytest.raises(
            CheckpointError, match=r"1 of the model's 3 files are missing: model-00002-of-00003"
        ) as caught:
            shards.read_header(path)
        assert "All of them are needed in the folder" in str(caught.value) and "download the rest" in str(caught.value)


def test_a_part_that_is_cut_is_named(tmp_path):
    files = write(tmp_path, [layer("a"), layer("b")])
    raw = (tmp_path / "model-00002-of-00002.safetensors").read_bytes()
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(raw[:-5])
    with pytest.raises(CheckpointError, match=r"00002-of-00002.*incomplete or not a safetensors file"):
        shards.read_header(files[0])


def test_one_tensor_in_two_parts_is_refused(tmp_path):
    files = write(tmp_path, [layer("a"), layer("a")])
    with pytest.raises(CheckpointError, match=r"'a.*is in model-00001-of-00002.* and in model-00002-of-00002"):
        shards.read_header(files[0])


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", '{"weight_map": {}}', '{"weight_map": {"a": 1}}', '{"weight_map": {"a": "../../b.safetensors"}}',
        '{"weight_map": {"a": "/etc/b.safetensors"}}', '{"weight_map": {"a": "b.bin"}}', "\x00\x00", "[" * 100_000,
    ],
    ids=range(10),
)  # fmt: skip
def test_a_bad_index_is_refused(content, tmp_path):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(content)
    with pytest.raises(CheckpointError, match=r"not an index of a model in several files.*is needed"):
        shards.read_header(str(path))


def test_an_index_that_promises_more_is_refused(tmp_path):
    write(tmp_path, [layer("a"), layer("b")])
    path = tmp_path / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    content["weight_map"]["c.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=r"1 tensors of the index are in none of its files, such as 'c.weight'"):
        shards.read_header(str(path))


@pytest.mark.comfy
def test_a_sharded_model_loads_like_the_single_file(comfy, emoji_file, tmp_path):
    state = load_file(emoji_file)
    names = list(state)
    files = write(tmp_path, [{name: state[name] for name in names[i::3]} for i in range(3)])
    expected = load_model(emoji_file).model.diffusion_model.state_dict()
    for path in (files[1], str(tmp_path / "model.safetensors.index.json")):
        found = load_model(path).model.diffusion_model.state_dict()
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected)
