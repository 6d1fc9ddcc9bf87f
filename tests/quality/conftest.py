"""ComfyUI's classes for the real models, in inference mode as nodes run."""

import contextlib

import pytest
import torch
from packtest.host import import_comfy


@pytest.fixture(scope="session")
def comfy():
    """ComfyUI's `comfy` package, imported as its own main program would."""
    return import_comfy(
        "comfy.sd", "comfy.sample", "comfy.samplers", "comfy.utils", "comfy.ops", "comfy.quant_ops",
        "comfy.text_encoders.bert", "comfy.text_encoders.llama",
    )  # fmt: skip


@pytest.fixture(autouse=True)
def like_a_node(request):
    """ComfyUI runs nodes in inference mode; so do these tests."""
    with torch.inference_mode() if "comfy" in request.keywords else contextlib.nullcontext():
        yield
