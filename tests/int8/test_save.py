"""INT8 Save Model's work: what is written, how it survives, and what comes back from it."""

import json
import logging
import os

import pytest
import torch
from native_int8.nodes.int8 import bake, save
from native_int8.nodes.int8.checkpoint import read_header
from native_int8.nodes.int8.loader import LoadOptions, load_model
from native_int8.nodes.int8.native_file import NativeFile
from packtest.checkpoints import floats
from safetensors import safe_open
from safetensors.torch import load_file, save_file


def plain(tensors: dict) -> dict:
    return {name: value.cpu() for name, value in tensors.items()}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


def weights(model) -> dict[str, torch.Tensor]:
    return plain(model.model.diffusion_model.state_dict())


def with_lora(model, strength: float = 0.8):
    """A clone of the emoji MODEL with a LoRA on an INT8 Linear, a float Linear and a norm."""
    twin = model.clone()
    state = model.model.state_dict()
    keys = [
        "diffusion_model.double_blocks.0.img_attn.qkv.weight",
        "diffusion_model.single_blocks.3.linear2.weight",
        "diffusion_model.img_in.weight",
    ]
    patches = {key: ("diff", (floats(*state[key].shape, seed=i),)) for i, key in enumerate(keys)}
    assert set(twin.add_patches(patches, strength)) == set(keys)
    return twin


@pytest.mark.fault("B149")
def test_every_dtype_stride_and_tied_tensor_is_stored(tmp_path):
    base = floats(6, 10, seed=3)
    tensors = {
        "transposed": base.t(),
        "every other": base[:, ::2],
        "expanded": base[:1].expand(4, 10),
        "tied": base,
        "tied again": base,
        "scalar": torch.tensor(0.25),
        "empty": torch.zeros(0, 4),
        "odd bytes": torch.arange(7, dtype=torch.uint8),
        "half": base.to(torch.bfloat16)[:1, :3],
        "float8": base.to(torch.float8_e4m3fn),
        "codes": torch.arange(-64, 64, dtype=torch.int8).reshape(8, 16),
        "name with \"quotes\" and \u00e9": base.half(),
    }  # fmt: skip
    path = tmp_path / "all.safetensors"
    with NativeFile(path, tensors, {"author": "somebody \u00e9"}) as file:
        file.update(tensors)
    assert_same(load_file(path), tensors)
    header = read_header(str(path))
    assert header.metadata == {"author": "somebody \u00e9"}
    with safe_open(path, "pt") as stored:
        assert stored.metadata() == header.metadata
    sizes = {name: value.element_size() for name, value in tensors.items()}
    assert all(info.start % sizes[name] == 0 for name, info in header.tensors.items())


def test_both_kinds_of_markers_say_the_same(tmp_path):
    marker = json.dumps({"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}).encode()
    path = tmp_path / "marked.safetensors"
    with NativeFile(path, ["a.weight"], {"_quantization_metadata": "of the source", "kept": "yes"}) as file:
        file["a.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
        file["a.weight"] = torch.zeros(8, 64, dtype=torch.int8)
    metadata = read_header(str(path)).metadata
    twin = json.loads(metadata["_quantization_metadata"])
    assert twin == {"format_version": "1.0", "layers": {"a": json.loads(marker)}}
    assert metadata["kept"] == "yes"


def test_an_interrupted_file_leaves_the_old_one_and_nothing_else(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({"old": torch.ones(3)}, path)
    before = path.read_bytes()
    with pytest.raises(KeyboardInterrupt), NativeFile(path, ["new"]) as file:
        file["new"] = torch.zeros(1000)
        raise KeyboardInterrupt
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]
    with NativeFile(path, ["new"]) as file:
        file["new"] = torch.zeros(1000)
    assert set(load_file(path)) == {"new"}
    assert os.listdir(tmp_path) == ["model.safetensors"]


@pytest.mark.parametrize("name", ["model", "name with a very long tail " * 8])
def test_the_header_holds_what_names_may_grow_to(name, tmp_path):
    path, count = tmp_path / "many.safetensors", 60
    names = [f"{name}.{i}.weight" for i in range(count)]
    marker = torch.tensor(list(b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}')).to(
        torch.uint8
    )
    with NativeFile(path, names) as file:
        for i in range(count):
            layer = f"{name}.{i}"
            file.update(
                {f"{layer}.weight": torch.zeros(2, 4, dtype=torch.int8), f"{layer}.weight_scale": torch.ones(2, 1)}
            )
            file[f"{layer}.comfy_quant"] = marker
    assert len(read_header(str(path)).tensors) == 3 * count


@pytest.mark.comfy
@pytest.mark.fault("B148")
def test_a_model_saved_before_and_after_it_ran_gives_one_file(comfy, emoji_file, forward, tmp_path):
    model = load_model(emoji_file)
    fresh, ran, partly = (tmp_path / f"{name}.safetensors" for name in ("fresh", "ran", "partly"))
    assert save.save_model(model, str(fresh)) == 0
    expected = forward(model)
    save.save_model(model, str(ran))
    model.partially_unload(model.offload_device, model.model_size() // 2)
    save.save_model(model, str(partly))
    assert fresh.read_bytes() == ran.read_bytes() == partly.read_bytes()
    for loaded in (load_model(str(fresh)), comfy.sd.load_diffusion_model(str(fresh))):
        assert_same(weights(loaded), weights(model))
        assert torch.equal(forward(loaded), expected)


@pytest.mark.comfy
@pytest.mark.parametrize("loaded", [False, True], ids=["not loaded", "loaded"])
@pytest.mark.fault("B145")
def test_a_lora_is_baked_as_it_runs(loaded, comfy, emoji_file, forward, tmp_path):
    model = load_model(emoji_file)
    patched = with_lora(model)
    expected = forward(patched)
    live = weights(patched)
    if not loaded:
        forward(model)
    path = tmp_path / "baked.safetensors"
    assert save.save_model(patched, str(path)) == 3
    again = load_model(str(path))
    assert_same(weights(again), live)
    assert torch.equal(forward(again), expected)
    assert not torch.equal(forward(model), expected)
    clean = tmp_path / "clean.safetensors"
    save.save_model(model, str(clean), "refuse")
    assert_same(weights(load_model(str(clean))), weights(load_model(emoji_file)))


@pytest.mark.comfy
def test_a_lora_is_refused_when_asked(comfy, emoji_file, tmp_path):
    patched = with_lora(load_model(emoji_file))
    with pytest.raises(save.SaveError, match=r"on 3 weights.*set loras to bake"):
        save.save_model(patched, str(tmp_path / "no.safetensors"), "refuse")
    assert not list(tmp_path.iterdir())


@pytest.mark.comfy
def test_a_float_model_is_refused(comfy, emoji_file, tmp_path):
    with pytest.raises(save.SaveError, match=r"without INT8 weights.*INT8 Patch Model"):
        save.save_model(comfy.sd.load_diffusion_model(emoji_file), str(tmp_path / "no.safetensors"))


@pytest.mark.comfy
def test_metadata_of_the_source_is_kept(comfy, emoji_file, tmp_path):
    source, first, second = (str(tmp_path / f"{name}.safetensors") for name in ("source", "first", "second"))
    save_file(load_file(emoji_file), source, {"config": '{"transformer": {}}', "author": "somebody"})
    save.save_model(load_model(source), first)
    save.save_model(comfy.sd.load_diffusion_model(first), second)
    for path in (first, second):
        metadata = read_header(path).metadata
        assert metadata["author"] == "somebody" and metadata["config"] == '{"transformer": {}}'
        layers = json.loads(metadata["_quantization_metadata"])["layers"]
        assert len(layers) == 28
        markers = {k: bytes(v.tolist()) for k, v in load_file(path).items() if k.endswith(".comfy_quant")}
        assert {k.removesuffix(".comfy_quant"): json.loads(v) for k, v in markers.items()} == layers


@pytest.mark.comfy
def test_another_packs_hook_on_saving_changes_nothing(comfy, emoji_file, tmp_path, monkeypatch):
    model = load_model(emoji_file)
    expected, hooked = (tmp_path / f"{name}.safetensors" for name in ("expected", "hooked"))
    save.save_model(model, str(expected))
    monkeypatch.setattr(comfy.utils, "save_torch_file", lambda *args, **options: None)
    monkeypatch.setattr(type(model.model), "state_dict_for_saving", lambda *args, **options: {})
    save.save_model(model, str(hooked))
    assert hooked.read_bytes() == expected.read_bytes()


@pytest.mark.comfy
@pytest.mark.parametrize(
    "prefix", ["../out", "a/../../out", "/etc/out", "..\\out", "C:\\out", "", "models/", "..", "a/..", "nul\0"]
)
def test_names_that_lead_out_of_the_folder_are_refused(prefix, comfy, tmp_path):
    with pytest.raises(save.SaveError, match="inside the output folder is needed"):
        save.free_name(str(tmp_path / "output"), prefix)
    assert not list(tmp_path.iterdir())


@pytest.mark.comfy
def test_a_link_out_of_the_folder_is_refused(comfy, tmp_path):
    output, elsewhere = tmp_path / "output", tmp_path / "elsewhere"
    output.mkdir()
    elsewhere.mkdir()
    (output / "link").symlink_to(elsewhere, target_is_directory=True)
    with pytest.raises(save.SaveError, match="leads out"):
        save.free_name(str(output), "link/model")


@pytest.mark.comfy
def test_a_name_that_is_taken_is_not_used(comfy, tmp_path):
    first = save.free_name(str(tmp_path), "diffusion_models/mine")
    assert first == tmp_path / "diffusion_models" / "mine_00001_.safetensors"
    first.write_bytes(b"somebody's")
    second = save.free_name(str(tmp_path), "diffusion_models/mine")
    assert second.name == "mine_00002_.safetensors"


@pytest.mark.comfy
def test_scheduled_loras_are_told(comfy, emoji_file, tmp_path, caplog):
    model = load_model(emoji_file)
    model.hook_patches = {"hook": {}}
    with caplog.at_level(logging.WARNING, "native_int8.save"):
        save.save_model(model, str(tmp_path / "model.safetensors"))
    assert "scheduled by hooks" in caplog.text


def lora_of_two_matrices(comfy, model, rank: int = 8, strength: float = 0.7):
    """A clone with a LoRA of two factors on every INT8 Linear of a block, and a plain difference on top of one."""
    twin = model.clone()
    patches = {}
    for key, value in model.model.state_dict().items():
        if key.startswith("diffusion_model.double_blocks.0.") and key.endswith(("mlp.0.weight", "qkv.weight")):
            n, k = value.shape
            factors = (floats(n, rank, seed=1), floats(rank, k, seed=2), 4.0, None, None, None)
            patches[key] = comfy.weight_adapter.lora.LoRAAdapter(set(), factors)
    assert len(patches) == 4
    assert set(twin.add_patches(patches, strength)) == set(patches)
    first = next(iter(patches))
    twin.add_patches({first: ("diff", (floats(*model.model.state_dict()[first].shape, seed=5),))}, 0.1)
    return twin


@pytest.mark.comfy
def test_rows_are_baked_as_the_host_bakes_the_whole(comfy, emoji_file, tmp_path, monkeypatch):
    import comfy.weight_adapter.lora

    patched = lora_of_two_matrices(comfy, load_model(emoji_file, LoadOptions(device="cpu")))
    monkeypatch.setattr(bake, "CHUNK_NUMBERS", 100 * 256)
    whole, real = [], bake._whole
    monkeypatch.setattr(bake, "_whole", lambda *args: whole.append(args[3]) or real(*args))
    by_rows, at_once = tmp_path / "rows.safetensors", tmp_path / "whole.safetensors"
    assert save.save_model(patched, str(by_rows)) == 4 and not whole
    monkeypatch.setattr(bake, "_by_rows", lambda *args: None)
    assert save.save_model(patched, str(at_once)) == 4 and len(whole) == 4
    assert_same(load_file(by_rows), load_file(at_once))


@pytest.mark.comfy
def test_patches_that_need_all_rows_are_left_to_the_host(comfy):
    import comfy.weight_adapter.lora

    rows, shape = slice(0, 2), torch.Size((8, 6))
    adapter = comfy.weight_adapter.lora.LoRAAdapter
    up, down, diff = torch.ones(8, 3), torch.ones(3, 6), torch.ones(8, 6)
    plain = (up, down, 1.0, None, None, None)
    for value in (adapter(set(), plain), ("diff", (diff,)), (diff,)):
        assert bake._patch_of_rows((1.0, value, 1.0, None, None), rows, shape) is not None
        assert bake._patch_of_rows((1.0, value, 1.0, (0, 0, 4), None), rows, shape) is None
        assert bake._patch_of_rows((1.0, value, 1.0, None, torch.abs), rows, shape) is None
    for other in (
        adapter(set(), (up, down, 1.0, None, torch.ones(8, 1), None)),
        adapter(set(), (up[:4], down, 1.0, None, None, None)),
        ("diff", (diff, {"pad_weight": True})),
        ("set", (diff,)),
        (diff[:4],),
    ):
        assert bake._patch_of_rows((1.0, other, 1.0, None, None), rows, shape) is None


@pytest.mark.comfy
def test_rows_are_left_to_a_host_that_rounds_otherwise(comfy, emoji_file, tmp_path, monkeypatch):
    patched = with_lora(load_model(emoji_file, LoadOptions(device="cpu")))
    save.save_model(patched, str(tmp_path / "host.safetensors"))
    wrong = lambda values, group, generator: (values.round().to(torch.int8), values[:, :1])  # noqa: E731
    monkeypatch.setattr(bake, "_rounded", wrong)
    save.save_model(patched, str(tmp_path / "again.safetensors"))
    assert_same(load_file(tmp_path / "again.safetensors"), load_file(tmp_path / "host.safetensors"))
