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
