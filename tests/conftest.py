"""Loads the pack under its alias, so that tests write `from native_int8.kernels import quantize_rows`."""

import os
from pathlib import Path

import packtest
import pytest
import torch

packtest.load_pack()


def pytest_collection_modifyitems(items):
    """Skip, with the reason, what this machine cannot run."""
    comfy_path = os.environ.get("COMFYUI_PATH")
    if not comfy_path:
        no_comfy = "needs ComfyUI: set COMFYUI_PATH to its folder"
    elif not (Path(comfy_path) / "main.py").is_file():
        no_comfy = f"COMFYUI_PATH is {comfy_path}, which holds no main.py"
    else:
        no_comfy = None
    for item in items:
        if no_comfy and "comfy" in item.keywords:
            item.add_marker(pytest.mark.skip(reason=no_comfy))
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="session")
def pack_server(tmp_path_factory):
    """A real ComfyUI server with this pack, the demo pack and the emoji model, for tests that change nothing in it."""
    from packtest import server

    base = tmp_path_factory.mktemp("server")
    models = base / "models" / "diffusion_models"
    models.mkdir(parents=True)
    model = "emoji_flux2_dit_bf16.safetensors"
    (models / model).symlink_to(packtest.ROOT / "tests" / "demo" / "data" / model)
    packs = {"native-int8-dit": packtest.ROOT, "emoji_pack": packtest.ROOT / "tests" / "demo" / "emoji_pack"}
    with server.start(base, packs) as running:
        yield running


@pytest.fixture(scope="session")
def schemas(pack_server):
    """The server's /object_info: node id -> inputs, outputs and texts as the frontend sees them."""
    return pack_server.get("/object_info")
