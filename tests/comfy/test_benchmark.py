"""The benchmark on the emoji model: what it counts, that it says what it could not do, and that the MODEL stays."""

import importlib

import pytest
import torch
from native_int8.nodes.int8 import benchmark, trajectory
from native_int8.nodes.int8.loader import LoadOptions, load_model
from safetensors import safe_open

from .conftest import MODEL_FILE, PROMPTS_FILE

pytestmark = pytest.mark.comfy

SIZE = [(128, 96, 1)]
# 8 x 6 latent pixels, and the text that the host pads to 512
IMAGE, TEXT = 48, 512


@pytest.fixture
def int8_model(comfy):
    return load_model(str(MODEL_FILE))


def measure(model, sizes=SIZE, conditioning=None, progress=lambda part: None):
    return benchmark.benchmark(model, sizes, text_tokens=16, conditioning=conditioning, progress=progress)


@pytest.mark.parametrize("kind", ["float", "int8"])
def test_rows_calls_and_times_of_a_forward(kind, float_model, int8_model):
    model = float_model if kind == "float" else int8_model
    seen = []
    result = measure(model, progress=seen.append)
    (size,) = result.sizes
    assert sum(count for _, count in size.shapes) == 28 == result.model["linears"]
    assert {time.shape.m for time, _ in size.shapes} == {IMAGE, TEXT, IMAGE + TEXT}
    assert all(time.float_us > 0 and time.int8_us > 0 for time, _ in size.shapes)
    assert {time.shape.rotation_group for time, _ in size.shapes} == {256}
    assert size.step_ms > 0 and "made-up prompt" in size.rows_from
    assert result.model["int8"] is (kind == "int8")
    assert seen == sorted(seen) and seen[-1] == 1
    if model.load_device.type == "cpu":
        assert "This is a CPU" in result.table()
    assert result.model["weights_bytes_int8"] < 0.7 * result.model["weights_bytes_bf16"]


def test_the_model_stays_as_it_was(int8_model):
    before = {key: value.clone() for key, value in int8_model.model.state_dict().items()}
    options, patches = dict(int8_model.model_options), dict(int8_model.patches)
    measure(int8_model)
    assert all(torch.equal(value, before[key]) for key, value in int8_model.model.state_dict().items())
    assert (int8_model.model_options, int8_model.patches) == (options, patches)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in int8_model.model.modules())


def test_an_interrupt_leaves_no_hook(int8_model):
    def stop(part):
        if part > 0.1:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        measure(int8_model, progress=stop)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in int8_model.model.modules())


def test_a_conditioning_is_used(int8_model):
    with safe_open(PROMPTS_FILE, "pt") as file:
        states = file.get_tensor("penguin").float().unsqueeze(0).repeat(1, 250, 1)
    (size,) = measure(int8_model, conditioning=[[states, {}]]).sizes
    assert size.rows_from == "seen in a forward of this MODEL"
    assert max(time.shape.m for time, _ in size.shapes) == IMAGE + states.shape[1] > IMAGE + TEXT


@pytest.mark.parametrize(
    ("module", "name", "detected", "width"),
    [
        ("ldm.qwen_image.model", "QwenImageTransformer2DModel", {}, 3584),
        ("ldm.wan.model", "WanModel", {}, 4096),
        ("ldm.ideogram4.model", "Ideogram4Transformer2DModel", {}, 53248),
        ("ldm.krea2.model", "SingleStreamDiT", {}, 12 * 2560),
        ("ldm.lumina.model", "NextDiT", {"cap_feat_dim": 2560}, 2560),
        ("ldm.flux.model", "Flux", {"context_in_dim": 7680}, 7680),
        ("ldm.aura.mmdit", "MMDiT", {}, None),
    ],
)
def test_the_width_of_text_states_is_found_in_the_hosts_classes(comfy, module, name, detected, width):
    kind = getattr(importlib.import_module(f"comfy.{module}"), name)
    assert trajectory.text_width(trajectory._settings(kind, detected)) == width


def test_frames_of_a_video_count(comfy):
    model = importlib.import_module("comfy.ldm.wan.model").WanModel(
        dim=256, ffn_dim=768, num_heads=2, num_layers=2, operations=comfy.ops.disable_weight_init
    )
    generator = torch.Generator().manual_seed(0)
    state = {
        key: torch.randn(value.shape, generator=generator).mul(0.02).bfloat16()
        for key, value in model.state_dict().items()
    }
    video = comfy.sd.load_diffusion_model_state_dict(state)
    (size,) = measure(video, [(64, 48, 9)]).sizes
    # 8 x 6 latent pixels in patches of 2 x 2, 1 + 8 / 4 frames
    assert size.size == "64x48x9" and size.step_ms > 0
    assert {time.shape.m for time, _ in size.shapes} == {4 * 3 * 3, 16}


def test_a_conditioning_that_does_not_fit_is_no_silent_estimate(int8_model):
    with pytest.raises(RuntimeError):
        measure(int8_model, conditioning=[[torch.zeros((1, 16, 100)), {}]])


def test_without_a_possible_input_rows_are_estimated_and_it_says_so(int8_model, monkeypatch):
    def no_width(*_):
        raise trajectory.NoInputs("no width")

    monkeypatch.setattr(trajectory, "made_up_conditioning", no_width)
    result = measure(int8_model)
    (size,) = result.sizes
    assert size.step_ms is None and "no width" in size.rows_from and "connect a conditioning" in size.rows_from
    assert {time.shape.m for time, _ in size.shapes} == {IMAGE + 16}
    assert "no step was measured" in result.table()


def test_large_work_on_a_cpu_is_cut_and_said(int8_model):
    if int8_model.load_device.type != "cpu":
        pytest.skip("a GPU measures all rows")
    (size,) = measure(int8_model, [(8192, 8192, 1)]).sizes
    assert size.step_ms is None and "takes too long on a CPU" in size.rows_from
    assert all(time.measured_rows < time.shape.m for time, _ in size.shapes)


def test_a_wrong_product_gives_no_times(int8_model, monkeypatch):
    monkeypatch.setattr(benchmark, "_LEAST_COSINE", 1.01)
    with pytest.raises(benchmark.BenchmarkError, match="no times are given"):
        measure(int8_model)


def test_a_model_without_layers_for_int8_is_told(comfy):
    kept = load_model(str(MODEL_FILE), LoadOptions(protect="*"))
    with pytest.raises(benchmark.BenchmarkError, match="has no Linear"):
        benchmark.layers_of(kept)
