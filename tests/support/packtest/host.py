"""ComfyUI inside the test process."""

import importlib
import os
import sys
from pathlib import Path

import torch


def import_comfy(*modules: str):
    """ComfyUI's `comfy` package from COMFYUI_PATH, imported as its own main program would, with `modules` of it.

    Its list of nodes is imported as well, since packs see it too.
    """
    arguments = sys.argv
    sys.argv = ["main.py"] + ([] if torch.cuda.is_available() else ["--cpu"])
    sys.path.insert(0, str(Path(os.environ["COMFYUI_PATH"]).resolve()))
    try:
        importlib.import_module("comfy.options").enable_args_parsing()
        for name in (*modules, "nodes"):
            importlib.import_module(name)
    finally:
        sys.argv = arguments
    return sys.modules["comfy"]
