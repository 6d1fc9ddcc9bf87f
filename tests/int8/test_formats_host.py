"""The emoji model in the formats of other makers, through the loader into a real ComfyUI."""

import pytest
import torch
from native_int8.nodes.int8.loader import LoadOptions, load_model, load_state_dict
from native_int8.nodes.int8.report import REPORT_KEY
from packtest.checkpoints import cosine
from packtest.int8_files import MAKERS
from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.comfy

NAMES = (
    "fast-convrot", "blocks-128", "sylvester", "toolkit-hadanorm", "lightx2v-fp8", "quanto", "alias", "sdnq-transposed",
    "sdnq-all", "bitsandbytes", "ideogram",
)  # fmt: skip


def rewritten(state: dict, layers: list[str], name: str) -> dict:
    """The model with these layers in the format of a maker; a second branch has the weights of other layers' sign."""
    maker, out = MAKERS[name], dict(MAKERS[name].file_tensors)
    for i, word in enumerate(("conditional.", "unconditional.") if maker.branches else ("",)):
        for key, value in state.items():
            layer = key.removesuffix(".weight")
            if layer in layers:
                weight = value.float() * (-1) ** i
                out.update({word + k: v for k, v in maker.write(layer, weight).tensors.items()})
            else:
                out[word + key] = value.clone()
    return out


@pytest.fixture(scope="module")
def float_output(comfy, emoji_file, forward):
    return forward(comfy.sd.load_diffusion_model(emoji_file))


@pytest.fixture(scope="module")
def layers(comfy, emoji_file) -> list[str]:
    report = load_model(emoji_file).get_attachment(REPORT_KEY)
    return [d.layer for d in report.decisions if d.is_int8]


@pytest.mark.parametrize("name", NAMES)
def test_the_model_runs_and_draws_the_same(comfy, name, emoji_file, layers, float_output, forward, tmp_path):
    state = load_file(emoji_file)
    path = str(tmp_path / "model.safetensors")
    save_file(rewritten(state, layers, name), path)
    model = load_model(path)
    report = model.get_attachment(REPORT_KEY)
    action = {"adopted": "adopt", "converted": "convert"}[MAKERS[name].result]
    assert [d.layer for d in report.decisions if d.action == action] == [d.layer for d in report.decisions if d.is_int8]
    assert report.int8_layers == len(layers) == 28 and MAKERS[name].result in report.source_line
    assert cosine(forward(model), float_output) >= 0.99
    kept = model.model.diffusion_model.txt_in.weight.cpu()
    assert torch.equal(kept.float(), state["txt_in.weight"].float())


def test_either_branch_of_a_file_with_both(comfy, emoji_file, layers, forward, tmp_path):
    path = str(tmp_path / "model.safetensors")
    save_file(rewritten(load_file(emoji_file), layers, "ideogram"), path)
    first, second = (load_model(path, LoadOptions(branch=b)) for b in ("auto", "unconditional"))
    a, b = (m.model.diffusion_model.state_dict()[f"{layers[0]}.weight"].cpu() for m in (first, second))
    inner = a.int().abs() < 127
    assert torch.equal(a.int()[inner], -b.int()[inner])
    assert any("unconditional" in note for note in first.get_attachment(REPORT_KEY).notes)
    assert cosine(forward(first), forward(second)) < 0.99


def test_a_state_dict_of_another_maker_stays_as_it_is(comfy, emoji_file, layers):
    state = rewritten(load_file(emoji_file), layers, "quanto")
    before = {key: value.clone() for key, value in state.items()}
    _, report = load_state_dict(state)
    assert report.int8_layers == 28
    assert state.keys() == before.keys() and all(torch.equal(state[key], before[key]) for key in state)


def test_a_gguf_file(comfy, emoji_file, layers, float_output, forward, tmp_path):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "model.gguf"), "flux")
    for key, value in load_file(emoji_file).items():
        kind = gguf.GGMLQuantizationType.Q8_0
        if value.ndim == 2 and value.shape[1] % 32 == 0:
            writer.add_tensor(key, gguf.quants.quantize(value.float().numpy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(key, value.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = load_model(str(tmp_path / "model.gguf"))
    report = model.get_attachment(REPORT_KEY)
    assert [d.layer for d in report.decisions if d.is_int8] and report.int8_layers == 28
    assert all(d.spec.format == "GGUF Q8_0" for d in report.decisions if d.is_int8)
    assert cosine(forward(model), float_output) >= 0.99
