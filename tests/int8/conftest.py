"""ComfyUI inside the test process, and small real models to load."""

import contextlib

import pytest
import torch
from packtest import ROOT
from packtest.checkpoints import floats
from packtest.host import import_comfy
from safetensors.torch import save_file

EMOJI = ROOT / "tests" / "demo" / "data" / "emoji_flux2_dit_bf16.safetensors"


@pytest.fixture(scope="session")
def comfy():
    """ComfyUI's `comfy` package, imported as its own main program would."""
    return import_comfy("comfy.sd", "comfy.utils", "comfy.quant_ops", "comfy.ldm.wan.model")


@pytest.fixture(autouse=True)
def like_a_node(request):
    """ComfyUI runs nodes in inference mode; so do these tests."""
    with torch.inference_mode() if "comfy" in request.keywords else contextlib.nullcontext():
        yield


@pytest.fixture(scope="session")
def emoji_file() -> str:
    """A trained Flux.2 model in bf16: hidden 256, 2 double and 6 single blocks."""
    return str(EMOJI)


@pytest.fixture(scope="session")
def wan_file(comfy, tmp_path_factory) -> str:
    """A small Wan 2.1 text-to-video model in bf16 with random weights: hidden 256, 2 blocks."""
    model = comfy.ldm.wan.model.WanModel(
        dim=256, ffn_dim=768, num_heads=2, num_layers=2, operations=comfy.ops.disable_weight_init
    )
    state = {
        name: floats(*value.shape, seed=i, dtype=torch.bfloat16) + ("norm" in name)
        for i, (name, value) in enumerate(model.state_dict().items())
    }
    path = tmp_path_factory.mktemp("wan") / "wan.safetensors"
    save_file(state, path)
    return str(path)


@pytest.fixture(scope="session")
def forward(comfy):
    """A function (MODEL) -> the output of its diffusion model for fixed inputs, in float32, on its device."""

    def run(model):
        comfy.model_management.load_models_gpu([model])
        dit, device, dtype = model.model.diffusion_model, model.load_device, model.model.get_dtype_inference()
        is_wan = hasattr(dit, "patch_embedding")
        shapes = [(1, 16, 1, 16, 16), (1, 32, 4096)] if is_wan else [(1, 128, 16, 16), (1, 64, 384)]
        image, text = (floats(*shape, seed=i).mul(20).to(device, dtype) for i, shape in enumerate(shapes))
        return dit(image, torch.full((1,), 500.0 if is_wan else 0.5, device=device), text).float().cpu()

    return run
