"""A ComfyUI in this process for the tests of this folder that are marked `comfy`."""

import os
import sys

import pytest
import torch


@pytest.fixture(scope="session")
def comfy_in_process():
    """ComfyUI's modules, importable, on the CPU when there is no GPU."""
    arguments, sys.argv = sys.argv, ["comfy", *([] if torch.cuda.is_available() else ["--cpu"])]
    # behind everything else: ComfyUI has top-level modules of common names
    sys.path.append(os.environ["COMFYUI_PATH"])
    import comfy.options

    comfy.options.enable_args_parsing()
    import comfy.sd

    yield comfy.sd
    sys.argv = arguments
