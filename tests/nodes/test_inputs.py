"""The loader's and the patch node's inputs: what is listed, and that each reaches the work and the saved file."""

import json
import os
import shutil

import pytest
from native_int8.nodes.int8 import cache, patcher, save
from native_int8.nodes.int8.checkpoint import CheckpointError, read_header
from native_int8.nodes.int8.loader import SCALE_SEARCH, LoadOptions, load_model
from packtest import ROOT
from packtest.host import import_comfy
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy

EMOJI = ROOT / "tests" / "demo" / "data" / "emoji_flux2_dit_bf16.safetensors"
INDEX = "emoji.safetensors.index.json"


@pytest.fixture(scope="module")
def comfy():
    return import_comfy("comfy.sd", "comfy.utils", "nodes")


@pytest.fixture
def folder(comfy, tmp_path, monkeypatch):
    """ComfyUI's folder of diffusion models, with one model in two files, a GGUF file and other JSON."""
    import folder_paths

    (models := tmp_path / "models" / "flux").mkdir(parents=True)
    state = load_file(EMOJI)
    halves = [dict(list(state.items())[i::2]) for i in (0, 1)]
    names = [f"emoji-{i + 1:05}-of-00002.safetensors" for i in (0, 1)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, models / name)
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    (models / INDEX).write_text(json.dumps({"weight_map": places}))
    (models / "config.json").write_text("{}")
    (models / "other.index.json").write_text("{}")
    (models / "q8.gguf").write_bytes(b"GGUF")
    monkeypatch.setitem(
        folder_paths.folder_names_and_paths,
        "diffusion_models",
        ([str(tmp_path / "models")], folder_paths.supported_pt_extensions),
    )
    monkeypatch.setattr(folder_paths, "user_directory", str(tmp_path / "user"))
    return models


@pytest.fixture
def node(comfy):
    from native_int8.nodes import load_dit_native_int8

    return load_dit_native_int8


def test_an_index_is_listed_here_and_the_hosts_list_stays(folder, node):
    import folder_paths

    before = folder_paths.get_filename_list("diffusion_models")
    listed = node.files()
    assert set(listed) - set(before) == {os.path.join("flux", INDEX), os.path.join("flux", "q8.gguf")}
    assert set(before) <= set(listed) and folder_paths.get_filename_list("diffusion_models") == before
    assert node.LoadDiTNativeINT8.define_schema().inputs[0].options == listed


def test_an_index_loads_and_a_missing_part_is_named(folder, node, monkeypatch):
    from native_int8.nodes.int8 import status

    monkeypatch.setattr(status, "show", lambda *args: None)
    monkeypatch.setattr(node.LoadDiTNativeINT8, "hidden", type("Hidden", (), {"unique_id": "1"}), raising=False)
    name = os.path.join("flux", INDEX)
    before = node.LoadDiTNativeINT8.fingerprint_inputs(name)
    (model,) = node.LoadDiTNativeINT8.execute(name).args
    assert patcher.is_int8(model)
    part = folder / "emoji-00002-of-00002.safetensors"
    os.utime(part, ns=(1, 1))
    assert node.LoadDiTNativeINT8.fingerprint_inputs(name) != before
    part.unlink()
    with pytest.raises(CheckpointError, match=r"1 of the model's 2 files are missing: emoji-00002-of-00002"):
        node.LoadDiTNativeINT8.execute(name)


@pytest.mark.parametrize("kind", ["load", "patch"])
def test_the_advanced_inputs_reach_the_work(kind, comfy, node, folder, monkeypatch):
    from native_int8.nodes import int8_patch_model
    from native_int8.nodes.int8 import loader, status, warm_up

    one = node.LoadDiTNativeINT8 if kind == "load" else int8_patch_model.INT8PatchModel
    inputs = {i.id: i for i in one.define_schema().inputs}
    for name, default in (("protect", ""), ("force", ""), ("scale_search", False)):
        assert inputs[name].advanced and inputs[name].default == default and inputs[name].tooltip
    seen = []

    def stop(source, options):
        seen.append(options)
        raise InterruptedError

    monkeypatch.setattr(loader, "load_model", stop)
    monkeypatch.setattr(patcher, "patch_model", stop)
    source = os.path.join("flux", INDEX) if kind == "load" else object()
    with pytest.raises(InterruptedError):
        one.execute(source, protect="a", force="b", scale_search=True)
    with pytest.raises(InterruptedError):
        one.execute(source)
    assert seen == [LoadOptions(protect="a", force="b", mse=True), LoadOptions()]
    assert status and warm_up


def test_copies_and_saved_files_tell_a_scale_search(folder, tmp_path):
    source = tmp_path / "model.safetensors"
    shutil.copy(EMOJI, source)
    models = {mse: load_model(str(source), LoadOptions(mse=mse, cache=True)) for mse in (False, True)}
    entries = [read_header(str(path)).metadata for path in cache.folder().iterdir()]
    assert sorted((SCALE_SEARCH in m, json.loads(m[cache.KEY])["recipe"]["mse"]) for m in entries) == [
        (False, False),
        (True, True),
    ]
    for mse, model in models.items():
        path = tmp_path / f"saved {mse}.safetensors"
        save.save_model(model, str(path))
        assert (SCALE_SEARCH in read_header(str(path)).metadata) is mse
    # searched or not, codes of a file stay
    again = load_model(str(tmp_path / "saved True.safetensors"), LoadOptions(mse=True))
    assert again.get_attachment("native_int8_report").int8_layers == 28
