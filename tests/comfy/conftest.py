"""ComfyUI inside the test process: its modules, the emoji model and a short sampling run."""

import contextlib

import pytest
import torch
from packtest import ROOT, tiny
from packtest.host import import_comfy
from safetensors import safe_open

DATA = ROOT / "tests" / "demo" / "data"
MODEL_FILE = DATA / "emoji_flux2_dit_bf16.safetensors"
PROMPTS_FILE = DATA / "emoji_prompts_minilm.safetensors"
# shorter than the 512 the model was trained on: these tests compare paths, the demo judges pictures
TEXT_TOKENS = 128
LATENT = (1, 128, 8, 8)


@pytest.fixture(scope="session")
def comfy():
    """ComfyUI's `comfy` package, imported as its own main program would."""
    found = import_comfy("comfy.sd", "comfy.samplers", "comfy.sample", "comfy.utils", "comfy.lora", "comfy.quant_ops")
    if torch.cuda.is_available():
        # the first attention of a process gives other bits than all later ones, to a float model as well
        with torch.inference_mode():
            tiny.sample(found, tiny.float_model(found))
    return found


@pytest.fixture(autouse=True)
def like_a_node(request):
    """ComfyUI runs nodes in inference mode; so do these tests."""
    with torch.inference_mode() if "comfy" in request.keywords else contextlib.nullcontext():
        yield


@pytest.fixture
def float_model(comfy):
    """The emoji DiT as the stock diffusion model loader gives it, fresh for each test."""
    return comfy.sd.load_diffusion_model(str(MODEL_FILE))


@pytest.fixture
def sample(comfy):
    """A function (model, prompt="penguin", steps=2, seed=0) -> latent [1, 128, 8, 8] float32."""

    def run(model, prompt="penguin", steps=2, seed=0):
        with safe_open(PROMPTS_FILE, "pt") as file:
            states = file.get_tensor(prompt).float()
        states = states.repeat(-(-TEXT_TOKENS // len(states)), 1)[:TEXT_TOKENS].unsqueeze(0)
        noise = comfy.sample.prepare_noise(torch.zeros(LATENT), seed)
        return comfy.sample.sample(
            model,
            noise,
            steps,
            3.0,
            "euler",
            "simple",
            [[states, {}]],
            [[torch.zeros_like(states), {}]],
            torch.zeros(LATENT),
            disable_pbar=True,
            seed=seed,
        )

    return run


@pytest.fixture(scope="session")
def cosine():
    """A function (a, b) -> cosine of two tensors, as a float."""

    def measure(a, b):
        return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()

    return measure


@pytest.fixture
def stock_int8_model(comfy):
    """The emoji DiT in the host's own INT8 format (rotated, per row), made and loaded by the host alone."""
    from comfy.quant_ops import QuantizedTensor

    state = comfy.utils.load_torch_file(str(MODEL_FILE))
    marker = torch.tensor(
        list(b'{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": 256}'), dtype=torch.uint8
    )
    for key in [key for key in state if key.endswith(".weight") and "_blocks." in key and state[key].ndim == 2]:
        weight = QuantizedTensor.from_float(
            state[key].float(), "TensorWiseINT8Layout", per_channel=True, convrot=True, convrot_groupsize=256
        )
        layer = key.removesuffix(".weight")
        state.update(
            {key: weight._qdata, f"{layer}.weight_scale": weight._params.scale, f"{layer}.comfy_quant": marker}
        )
    return comfy.sd.load_diffusion_model_state_dict(state)


@pytest.fixture
def model(stock_int8_model):
    """The emoji DiT in INT8 on our kernels; test files of other models have their own."""
    from native_int8.nodes.int8 import patcher

    return patcher.patch_model(stock_int8_model)[0]


@pytest.fixture
def inside(comfy):
    """A function (MODEL, function) -> what `function` returns inside the MODEL's own APPLY_MODEL wrapper."""

    def call(model, function):
        comfy.model_management.load_models_gpu([model])
        executor = comfy.patcher_extension.WrapperExecutor.new_class_executor(
            lambda *_: function(), model.model, model.get_wrappers("apply_model", "native_int8")
        )
        return executor.execute()

    return call
