"""Files through the loader into a real ComfyUI, and back through its stock nodes."""

import json

import pytest
import torch
from native_int8.nodes.int8 import host_backend, loader
from native_int8.nodes.int8.checkpoint import CheckpointError
from native_int8.nodes.int8.loader import LoadOptions, load_model, load_state_dict
from native_int8.nodes.int8.report import REPORT_KEY
from packtest.checkpoints import cosine, dequantised, floats, marker
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy


def report_of(model):
    return model.get_attachment(REPORT_KEY)


def weights(model) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors by their names in a native file, on the CPU."""
    return {key: value.cpu() for key, value in model.model.diffusion_model.state_dict().items()}


def assert_same(a: dict, b: dict) -> None:
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype and torch.equal(a[key], b[key]), key


@pytest.fixture(params=["emoji_file", "wan_file"], ids=["flux2", "wan"])
def file(request) -> str:
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def native_file(comfy, emoji_file, tmp_path_factory) -> str:
    """The emoji model as a native INT8 file without prefix."""
    path = tmp_path_factory.mktemp("native") / "native.safetensors"
    save_file({key: value.contiguous() for key, value in weights(load_model(emoji_file)).items()}, path)
    return str(path)


@pytest.mark.fault("B26")
def test_every_block_linear_of_the_emoji_model_is_int8(comfy, emoji_file):
    report = report_of(load_model(emoji_file))
    assert report.block_coverage >= 0.95
    assert report.int8_layers == 28
    assert report.summary().startswith("28 layers INT8, 9 kept, kernel native_int8 on ")


def test_output_stays_close_to_float(comfy, file, forward):
    expected = forward(comfy.sd.load_diffusion_model(file))
    model = load_model(file)
    assert host_backend.is_attached(model)
    assert cosine(forward(model), expected) >= 0.995
    assert cosine(forward(load_model(file, LoadOptions(rotation=False))), expected) >= 0.99


def test_the_model_takes_little_more_than_half_of_bf16(comfy, emoji_file):
    with safe_open(emoji_file, "pt") as stored:
        blocks = [key for key in stored.keys() if "_blocks." in key and len(stored.get_slice(key).get_shape()) == 2]  # noqa: SIM118
        bf16_bytes = sum(stored.get_tensor(key).nbytes for key in blocks)
    state = weights(load_model(emoji_file))
    int8_bytes = sum(state[key].nbytes + state[f"{key}_scale"].nbytes for key in blocks)
    assert int8_bytes <= 0.52 * bf16_bytes


def test_what_model_save_writes_loads_in_stock_comfyui_and_here(comfy, file, forward, tmp_path):
    from comfy_extras.nodes_model_merging import save_checkpoint

    ours = load_model(file)
    save_checkpoint(ours, filename_prefix="saved", output_dir=str(tmp_path))
    saved = str(next(tmp_path.glob("saved*.safetensors")))
    stock = comfy.sd.load_diffusion_model(saved)
    assert_same(weights(stock), weights(ours))
    assert torch.equal(forward(stock), forward(ours))
    again = load_model(saved)
    assert_same(weights(again), weights(ours))
    assert all(d.action == "adopt" for d in report_of(again).decisions if d.is_int8)


def test_loads_what_stock_comfyui_writes_bit_for_bit(comfy, native_file, tmp_path):
    from comfy_extras.nodes_model_merging import save_checkpoint

    stock = comfy.sd.load_diffusion_model(native_file)
    save_checkpoint(stock, filename_prefix="stock", output_dir=str(tmp_path))
    ours = load_model(str(next(tmp_path.glob("stock*.safetensors"))))
    assert_same(weights(ours), weights(stock))
    assert report_of(ours).rotation_groups() == {256: 28}


@pytest.mark.fault("B53")
def test_a_second_quantisation_changes_nothing(comfy, native_file):
    once = load_model(native_file)
    for rotation in (True, False):
        assert_same(weights(load_model(native_file, LoadOptions(rotation=rotation))), weights(once))


@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", "transformer.", "model.", "net."])
def test_every_prefix_gives_the_same_model(comfy, native_file, emoji_file, tmp_path, prefix):
    path = str(tmp_path / "prefixed.safetensors")
    for source in (native_file, *((emoji_file,) if prefix == "transformer." else ())):
        save_file({prefix + key: value for key, value in load_file(source).items()}, path)
        assert_same(weights(load_model(path)), weights(load_model(source)))


def test_metadata_instead_of_markers_gives_the_same_model(comfy, native_file, tmp_path):
    state = load_file(native_file)
    layers = {
        key.removesuffix(".comfy_quant"): json.loads(bytes(value.tolist()))
        for key, value in state.items()
        if key.endswith(".comfy_quant")
    }
    bare = {key: value for key, value in state.items() if not key.endswith(".comfy_quant")}
    path = str(tmp_path / "metadata.safetensors")
    for name in ("", "model.diffusion_model."):
        table = {"format_version": "1.0", "layers": {name + layer: fields for layer, fields in layers.items()}}
        save_file(
            {name + key: value for key, value in bare.items()}, path, {"_quantization_metadata": json.dumps(table)}
        )
        assert_same(weights(load_model(path)), weights(load_model(native_file)))
        assert_same(weights(comfy.sd.load_diffusion_model(path)), weights(load_model(native_file)))


@pytest.mark.parametrize("group", [0, 16, 64, 256])
@pytest.mark.parametrize("scale_shape", ["row", "flat", "tensor"])
def test_dequantised_weights_equal_the_definition(comfy, emoji_file, tmp_path, group, scale_shape):
    layer = "single_blocks.0.linear2"
    state = load_file(emoji_file)
    codes = torch.randint(-128, 128, state[f"{layer}.weight"].shape).to(torch.int8)
    rows = len(codes)
    scale = torch.rand({"row": (rows, 1), "flat": (rows,), "tensor": ()}[scale_shape]) / 1000
    fields = {"format": "int8_tensorwise"} | ({"convrot": True, "convrot_groupsize": group} if group else {})
    state.update({f"{layer}.weight": codes, f"{layer}.weight_scale": scale, f"{layer}.comfy_quant": marker(fields)})
    path = str(tmp_path / "one.safetensors")
    save_file(state, path)
    weight = load_model(path).model.diffusion_model.single_blocks[0].linear2.weight
    assert torch.equal(weight._qdata.cpu(), codes)
    expected = dequantised(codes, scale.expand(rows, 1) if scale.dim() == 0 else scale, group)
    got = weight.dequantize().double().cpu()
    assert (got - expected).abs().max() <= 0.5 * scale.max() * torch.finfo(weight._params.orig_dtype).eps * 2**8 + 1e-6


def test_a_lost_rotation_flag_shows(comfy, native_file, emoji_file, forward, tmp_path):
    expected = forward(comfy.sd.load_diffusion_model(emoji_file))
    state = load_file(native_file)
    for key in state:
        if key.endswith(".comfy_quant"):
            state[key] = marker({"format": "int8_tensorwise"})
    path = str(tmp_path / "lost.safetensors")
    save_file(state, path)
    assert cosine(forward(load_model(native_file)), expected) > 0.995
    assert cosine(forward(load_model(path)), expected) < 0.95


@pytest.mark.parametrize("legacy", [False, True], ids=["marker", "scaled_fp8"])
def test_scaled_fp8_is_dequantised_before_it_is_quantised(comfy, emoji_file, forward, tmp_path, legacy):
    state = load_file(emoji_file)
    for key in [k for k, v in state.items() if v.ndim == 2]:
        layer, value = key.removesuffix(".weight"), state[key].float()
        scale = value.abs().max() / 448
        state[key] = (value / scale).to(torch.float8_e4m3fn)
        state[f"{layer}.{'scale_weight' if legacy else 'weight_scale'}"] = scale
        if not legacy:
            state[f"{layer}.comfy_quant"] = marker({"format": "float8_e4m3fn"})
    if legacy:
        state["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    path = str(tmp_path / "fp8.safetensors")
    save_file(state, path)
    stock, ours = comfy.sd.load_diffusion_model(path), load_model(path)
    assert cosine(forward(ours), forward(stock)) >= 0.995
    assert report_of(ours).int8_layers == 28
    kept = ours.model.diffusion_model.txt_in.weight.float().cpu()
    expected = state["txt_in.weight"].float() * state["txt_in." + ("scale_weight" if legacy else "weight_scale")]
    assert torch.equal(kept, expected.to(torch.bfloat16).float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float8_e4m3fn], ids=str)
def test_the_same_numbers_in_another_dtype_give_the_same_codes(comfy, emoji_file, tmp_path, dtype):
    narrow = {key: value.to(dtype) for key, value in load_file(emoji_file).items()}
    wide = {key: value.float() for key, value in narrow.items()}
    for name, state in (("narrow", narrow), ("wide", wide)):
        save_file(state, str(tmp_path / f"{name}.safetensors"))
    first, second = (weights(load_model(str(tmp_path / f"{name}.safetensors"))) for name in ("narrow", "wide"))
    for key in first:
        if first[key].dtype == torch.int8:
            assert torch.equal(first[key], second[key]), key


def test_the_host_can_load_the_same_model_again(comfy, emoji_file):
    options = LoadOptions(rotation=False, protect="linear2")
    model = load_model(emoji_file, options)
    function, arguments = model.cached_patcher_init
    again = function(*arguments, disable_dynamic=True)
    assert again.cached_patcher_init == (function, arguments)
    assert host_backend.is_attached(again) and not again.is_dynamic()
    assert_same(weights(again), weights(model))
    twin = model.clone(force_deepcopy=True)
    assert twin.model is not model.model and report_of(twin) is report_of(model)
    assert_same(weights(twin), weights(model))


def test_tensors_given_by_hand_stay_as_they_are(comfy, emoji_file):
    state = load_file(emoji_file)
    before = {key: value.clone() for key, value in state.items()}
    model, report = load_state_dict(state, None)
    assert_same(state, before)
    assert report.int8_layers == 28
    mine = {value.data_ptr() for value in state.values()}
    assert not any(value.data_ptr() in mine for value in weights(model).values())


def test_an_interrupt_stops_between_two_layers_and_leaves_nothing_behind(comfy, emoji_file, monkeypatch):
    seen = []

    def interrupt(done, total):
        seen.append((done, total))
        if done == 3:
            comfy.model_management.interrupt_current_processing(True)

    with pytest.raises(comfy.model_management.InterruptProcessingException):
        load_state_dict(load_file(emoji_file), None, None, interrupt)
    assert seen == [(1, 28), (2, 28), (3, 28)]
    assert load_state_dict(load_file(emoji_file))[1].int8_layers == 28


def test_progress_reaches_the_end(comfy, emoji_file):
    seen = []
    load_state_dict(load_file(emoji_file), progress=lambda *step: seen.append(step))
    assert seen[-1] == (28, 28)


@pytest.mark.parametrize(
    "state, said",
    [
        (
            {"diffusion_model.a.lora_up.weight": floats(8, 4), "diffusion_model.a.lora_down.weight": floats(4, 8)},
            "LoRA",
        ),
        ({"decoder.conv_in.weight": floats(8, 4, 3, 3), "encoder.conv_in.weight": floats(8, 4, 3, 3)}, "VAE"),
        (
            {"model.embed_tokens.weight": floats(8, 4), "model.layers.0.mlp.up_proj.weight": floats(8, 4)},
            "text encoder",
        ),
        ({"something.weight": floats(8, 4)}, "no model this ComfyUI knows"),
    ],
    ids=["lora", "vae", "text-encoder", "unknown"],
)
def test_another_kind_of_file_is_called_what_it_is(comfy, tmp_path, state, said):
    path = str(tmp_path / "other.safetensors")
    save_file(state, path)
    with pytest.raises(CheckpointError) as caught:
        load_model(path)
    assert path in str(caught.value) and said in str(caught.value)


def test_int8_without_scale_stops_before_a_model_is_built(comfy, native_file, tmp_path):
    state = load_file(native_file)
    del state["single_blocks.3.linear1.weight_scale"]
    path = str(tmp_path / "no_scale.safetensors")
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"single_blocks\.3\.linear1\.weight"):
        load_model(path)


def test_the_other_parts_of_a_checkpoint_are_left_out_and_named(comfy, emoji_file, tmp_path):
    state = {f"model.diffusion_model.{key}": value for key, value in load_file(emoji_file).items()}
    state["vae.decoder.conv_in.weight"] = floats(8, 4, 3, 3)
    path = str(tmp_path / "whole.safetensors")
    save_file(state, path)
    model = load_model(path)
    assert_same(weights(model), weights(load_model(emoji_file)))
    assert any("vae" in note for note in report_of(model).notes)


@pytest.mark.fault("B103")
def test_first_weight_int8_does_not_change_the_compute_dtype(comfy, native_file):
    model = load_model(native_file)
    assert model.model.get_dtype().is_floating_point
    assert model.model.get_dtype_inference().is_floating_point


@pytest.mark.fault("B104")
def test_mixed_float_dtypes_run(comfy, emoji_file, forward, tmp_path):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    state = {key: value.to(dtypes[i % 3]) for i, (key, value) in enumerate(load_file(emoji_file).items())}
    path = str(tmp_path / "mixed.safetensors")
    save_file(state, path)
    assert torch.isfinite(forward(load_model(path))).all()


def test_describes_a_model_that_is_int8_already(comfy, native_file):
    stock = comfy.sd.load_diffusion_model(native_file)
    report = loader.describe(stock)
    assert (report.int8_layers, report.rotation_groups()) == (28, {256: 28})
    ours = load_model(native_file)
    assert loader.describe(ours) is report_of(ours)


def test_a_part_of_a_model_is_called_one(comfy, wan_file, tmp_path):
    state = {key: value for key, value in load_file(wan_file).items() if not key.startswith("head.head")}
    path = str(tmp_path / "part.safetensors")
    save_file(state, path)
    with pytest.raises(CheckpointError, match=r"part of a diffusion model: 'head\.head\.weight'"):
        load_model(path)


@pytest.mark.fault("B70")
def test_a_linear_without_weight_is_told_at_load(comfy, emoji_file, tmp_path):
    state = {key: value for key, value in load_file(emoji_file).items() if key != "single_blocks.2.linear2.weight"}
    path = str(tmp_path / "hole.safetensors")
    save_file(state, path)
    assert any("single_blocks.2.linear2" in note for note in report_of(load_model(path)).notes)


def test_codes_that_the_host_took_for_floats_are_never_run(comfy, emoji_file):
    model = load_model(emoji_file)
    decisions = report_of(model).decisions
    stock = comfy.sd.load_diffusion_model(emoji_file)
    assert loader._verify(model, decisions) == []
    with pytest.raises(CheckpointError, match=r"double_blocks\.0\.img_attn\.proj\.weight"):
        loader._verify(stock, decisions)
