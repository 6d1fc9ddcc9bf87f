"""Text encoders in the host's own classes: INT8 weights are multiplied in INT8 although the host computes text in float32."""

import functools
import json
import types
from pathlib import Path

import pytest
import torch
from native_int8.nodes.int8 import host_backend, text_encoder
from native_int8.nodes.int8.checkpoint import CheckpointError
from native_int8.nodes.int8.formats import LayerSpec
from native_int8.nodes.int8.report import REPORT_KEY
from packtest import ROOT
from safetensors.torch import save_file

pytestmark = pytest.mark.comfy

# the widths by which the host tells encoders apart stay, all else is small
QWEN = {
    "num_hidden_layers": 3, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 504,
}  # fmt: skip
T5 = {"num_layers": 2, "d_model": 256, "d_ff": 512, "d_kv": 64, "num_heads": 4}
CLIP_L = {"hidden_size": 64, "num_attention_heads": 2, "intermediate_size": 128, "num_hidden_layers": 2}
OPTIONS = {
    "qwen3_4b_model_config": QWEN,
    "t5base_model_config": T5,
    "t5xxl_model_config": T5,
    # the host's name for that of CLIP-L
    "model_config": CLIP_L,
}
QWEN_LINEARS = 3 * 7
TOKENS = {"qwen3_4b": [[(i * 7 % 500, 1.0) for i in range(1, 40)]]}


def weights(model, seed=0):
    """Random weights at which every layer counts in the result."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, value in model.state_dict().items():
        noise = torch.randn(value.shape, generator=generator)
        is_table = "embed_tokens" in name or "shared" in name or "token_embedding" in name
        factor = 1.0 if is_table else value.shape[-1] ** -0.5
        out[name] = (torch.ones(value.shape) if "norm" in name else noise * factor).to(torch.bfloat16)
    return out


@pytest.fixture(scope="module")
def files(comfy, tmp_path_factory):
    """Paths of small bf16 encoders, saved from the host's own classes."""
    from comfy import clip_model
    from comfy.text_encoders import llama, t5

    folder = tmp_path_factory.mktemp("text_encoders")
    host = Path(comfy.sd.__file__).parent

    def config(name, changes):
        return json.loads((host / name).read_text(encoding="utf-8")) | changes

    build = {"dtype": torch.bfloat16, "device": "cpu"}
    models = {
        "qwen": llama.Qwen3_4B(dict(QWEN), operations=comfy.ops.manual_cast, **build),
        "t5": t5.T5(config("text_encoders/t5_config_base.json", T5), operations=comfy.ops.manual_cast, **build),
        "t5xxl": t5.T5(config("text_encoders/t5_config_xxl.json", T5), operations=comfy.ops.manual_cast, **build),
        "clip_l": clip_model.CLIPTextModel(
            config("sd1_clip_config.json", CLIP_L), operations=comfy.ops.manual_cast, **build
        ),
    }
    paths = {}
    for name, model in models.items():
        paths[name] = str(folder / f"{name}.safetensors")
        save_file(weights(model), paths[name])
    return paths


def stock(comfy, *paths, type="lumina2"):
    kind = getattr(comfy.sd.CLIPType, type.upper())
    return comfy.sd.load_clip(list(paths), clip_type=kind, model_options=dict(OPTIONS))


def ours(*paths, type="lumina2"):
    return text_encoder.load_text_encoder(paths, type, model_options=OPTIONS)


def encode(clip, tokens=TOKENS):
    return clip.encode_from_tokens_scheduled(tokens)[0][0]


def as_file(clip):
    """The weights of a CLIP under the names of a file of its encoder."""
    return {k.partition(".transformer.")[2]: v.contiguous() for k, v in clip.get_sd().items() if ".transformer." in k}


def as_published(state):
    """The host's names of a Qwen3-VL as its makers spell them."""
    names = {"model.": "model.language_model.", "visual.": "model.visual."}
    return {names[old] + k.removeprefix(old): v for k, v in state.items() for old in names if k.startswith(old)}


def calls(clip):
    return sum(host_backend.record_of(clip.patcher).snapshot()["calls"].values())


@pytest.fixture
def dequantised(comfy, monkeypatch):
    """A list that grows by the shape of each weight that the host expands."""
    from comfy.quant_ops import QuantizedTensor

    seen, of_class = [], QuantizedTensor.dequantize

    def dequantize(self):
        seen.append(tuple(self.shape))
        return of_class(self)

    monkeypatch.setattr(QuantizedTensor, "dequantize", dequantize)
    return seen


def test_every_int8_linear_runs_in_int8_and_the_text_is_the_same(comfy, files, cosine, dequantised):
    clip = ours(files["qwen"])
    report = clip.patcher.get_attachment(REPORT_KEY)
    assert report.int8_layers == QWEN_LINEARS
    assert report.summary() == "21 layers INT8, 1 kept, kernel native_int8 on cpu"
    got = encode(clip)
    assert calls(clip) == QWEN_LINEARS
    assert host_backend.record_of(clip.patcher).ways_taken() == {"ways": {"resident": QWEN_LINEARS}, "reasons": {}}
    assert dequantised == []
    assert got.dtype == torch.float32
    assert cosine(got, encode(stock(comfy, files["qwen"]))) > 0.999


def test_the_host_alone_expands_every_weight_of_the_same_file(comfy, files, tmp_path, dequantised):
    clip = ours(files["qwen"])
    path = str(tmp_path / "int8.safetensors")
    save_file(as_file(clip), path)
    host = stock(comfy, path)
    # the host's own float32 result, and proof that ours changed nothing for other encoders
    host_result = encode(host)
    assert len(dequantised) == QWEN_LINEARS
    adopted = ours(path)
    actions = {d.action for d in adopted.patcher.get_attachment(REPORT_KEY).decisions}
    assert actions == {"adopt", "keep"}
    got = encode(adopted)
    assert len(dequantised) == QWEN_LINEARS and calls(adopted) == QWEN_LINEARS
    assert torch.equal(got, encode(clip))
    assert torch.nn.functional.cosine_similarity(got.flatten(), host_result.flatten(), dim=0) > 0.999


def test_a_layer_marked_for_full_precision_stays_so_and_is_told(files, dequantised):
    state = as_file(ours(files["qwen"]))
    marker = (
        b'{"format": "int8_tensorwise", "full_precision_matrix_mult": true, "convrot": true, "convrot_groupsize": 256}'
    )
    state["model.layers.1.mlp.down_proj.comfy_quant"] = torch.tensor(list(marker), dtype=torch.uint8)
    clip = text_encoder.load_state_dicts([state], "lumina2", model_options=OPTIONS)
    encode(clip)
    assert dequantised == [(2560, 512)] and calls(clip) == QWEN_LINEARS - 1
    (note,) = clip.patcher.get_attachment(REPORT_KEY).notes
    assert note.startswith(
        "1 INT8 layers are marked for full precision in the file, such as model.layers.1.mlp.down_proj"
    )


def test_stock_text_node_encodes_with_a_t5(comfy, files, cosine):
    import nodes

    clip = ours(files["t5"], type="stable_audio")
    (got,) = nodes.CLIPTextEncode().encode(clip, "a red (apple:1.3) on a table")
    (want,) = nodes.CLIPTextEncode().encode(
        stock(comfy, files["t5"], type="stable_audio"), "a red (apple:1.3) on a table"
    )
    assert calls(clip) == clip.patcher.get_attachment(REPORT_KEY).int8_layers == 2 * 6
    assert cosine(got[0][0], want[0][0]) > 0.999


@pytest.mark.fault("B19")
def test_clones_share_the_record_and_lora_stays_int8(comfy, files):
    clip = ours(files["qwen"])
    before = encode(clip)
    twin = clip.clone()
    key = "qwen3_4b.transformer.model.layers.1.mlp.down_proj.weight"
    patch = torch.randn((2560, 512), generator=torch.Generator().manual_seed(1)) * 0.02
    assert twin.add_patches({key: ("diff", (patch,))}, 1.0)
    patched = encode(twin)
    assert not torch.equal(patched, before)
    assert calls(clip) == calls(twin) == 2 * QWEN_LINEARS
    assert torch.equal(encode(clip), before)


def test_a_weight_that_a_function_changes_at_every_call_is_told(files):
    clip = ours(files["qwen"])
    linear = clip.cond_stage_model.qwen3_4b.transformer.model.layers[0].mlp.up_proj
    clip.load_model()
    linear.weight_function = [lambda weight: weight * 2]
    encode(clip)
    ways = host_backend.record_of(clip.patcher).ways_taken()
    assert ways["ways"] == {"resident": QWEN_LINEARS - 1, "general": 1}
    assert any("a function changes the weight" in reason for reason in ways["reasons"])


def test_generating_text_runs_in_int8(files):
    clip = ours(files["qwen"])
    assert len(clip.generate(TOKENS, do_sample=False, max_length=2)) == 2
    assert calls(clip) == 2 * QWEN_LINEARS


def test_two_files_of_flux(comfy, files, cosine):
    clip = ours(files["clip_l"], files["t5xxl"], type="flux")
    report = clip.patcher.get_attachment(REPORT_KEY)
    assert report.int8_layers == 2 * 7
    host = stock(comfy, files["clip_l"], files["t5xxl"], type="flux")
    (got, got_pooled), (want, want_pooled) = (
        c.encode_from_tokens(c.tokenize("a red apple"), return_pooled=True) for c in (clip, host)
    )
    assert calls(clip) == 2 * 7
    assert torch.equal(got_pooled, want_pooled)
    assert cosine(got, want) > 0.999


def test_a_vision_language_file_with_a_picture_and_an_int8_table(comfy, tmp_path, cosine, monkeypatch):
    from comfy.quant_ops import QuantizedTensor
    from comfy.text_encoders import qwen3vl

    small = {"hidden_size": 256, "intermediate_size": 512, "depth": 2, "deepstack_visual_indexes": [0, 1]}
    monkeypatch.setitem(qwen3vl.QWEN3VL_VISION, "qwen3vl_4b", small)
    options = {"qwen3vl_4b_model_config": QWEN}
    model = qwen3vl._make_qwen3vl_model("qwen3vl_4b")(dict(QWEN), torch.bfloat16, "cpu", comfy.ops.manual_cast)
    state = as_published(weights(model))
    picture = {"type": "image", "data": torch.rand((1, 64, 64, 3), generator=torch.Generator().manual_seed(2))}
    tokens = {"qwen3vl_4b": [[(i, 1.0) for i in range(1, 20)] + [(picture, 1.0), (30, 1.0)]]}
    host = comfy.sd.load_text_encoder_state_dicts(
        [dict(state)], clip_type=comfy.sd.CLIPType.LUMINA2, model_options=dict(options)
    )
    want = encode(host, tokens)

    clip = text_encoder.load_state_dicts([state], "lumina2", model_options=options)
    got = encode(clip, tokens)
    assert calls(clip) == clip.patcher.get_attachment(REPORT_KEY).int8_layers == QWEN_LINEARS
    assert clip.patcher.get_attachment(REPORT_KEY).notes == ()
    assert cosine(got, want) > 0.999

    table = "model.language_model.embed_tokens"
    codes = QuantizedTensor.from_float(state[f"{table}.weight"].float(), "TensorWiseINT8Layout", per_channel=True)
    file = as_published(as_file(clip))
    file |= {
        f"{table}.weight": codes._qdata,
        f"{table}.weight_scale": codes._params.scale,
        f"{table}.comfy_quant": torch.tensor(list(b'{"format": "int8_tensorwise"}'), dtype=torch.uint8),
    }
    path = str(tmp_path / "vl_int8.safetensors")
    save_file(file, path)
    adopted = text_encoder.load_text_encoder([path], "lumina2", model_options=options)
    assert adopted.patcher.get_attachment(REPORT_KEY).int8_layers == QWEN_LINEARS + 1
    assert cosine(encode(adopted, tokens), want) > 0.999
    assert calls(adopted) == QWEN_LINEARS


def test_the_host_can_build_the_patcher_again(files):
    clip = ours(files["qwen"])
    function, arguments = clip.patcher.cached_patcher_init
    again = function(*arguments, disable_dynamic=True)
    assert host_backend.is_attached(again)
    assert again.get_attachment(REPORT_KEY).int8_layers == QWEN_LINEARS


def test_an_encoder_is_freed_without_the_garbage_collector(files):
    import gc
    import weakref

    clip = ours(files["t5"], type="stable_audio")
    encoder = weakref.ref(clip.cond_stage_model.t5base)
    gc.collect()
    gc.disable()
    try:
        del clip
        assert encoder() is None
    finally:
        gc.enable()


def test_a_state_dict_stays_as_it_is_and_gives_the_same(comfy, files):
    state = comfy.utils.load_torch_file(files["qwen"])
    before = {name: tensor.clone() for name, tensor in state.items()}
    clip = text_encoder.load_state_dicts([state], "lumina2", model_options=OPTIONS)
    assert state.keys() == before.keys()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())
    assert torch.equal(encode(clip), encode(ours(files["qwen"])))


def test_node_loads_the_chosen_files_and_tells_what_became_of_them(comfy, files, monkeypatch, caplog):
    import folder_paths
    from native_int8.nodes.load_text_encoder_native_int8 import LoadTextEncoderNativeINT8 as Node

    folder = str(Path(files["t5xxl"]).parent)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "text_encoders", ([folder], {".safetensors"}))
    # the only thing a user cannot choose: the small sizes
    load = functools.partial(text_encoder.load_text_encoder, model_options=OPTIONS)
    monkeypatch.setattr(text_encoder, "load_text_encoder", load)
    # the host's executor gives a node its id
    monkeypatch.setattr(Node, "hidden", types.SimpleNamespace(unique_id=None))
    names = [item.id for item in Node.define_schema().inputs]
    assert names == ["clip_name", "type", "device", "clip_name2"]
    chosen = {"clip_name": "clip_l.safetensors", "type": "flux", "clip_name2": "t5xxl.safetensors"}
    with caplog.at_level("INFO", "native_int8"):
        (clip,) = Node.execute(**chosen).args
    assert "14 layers INT8" in caplog.text
    encode(clip, clip.tokenize("a red apple"))
    assert calls(clip) == 2 * 7
    first = Node.fingerprint_inputs(**chosen)
    assert first == Node.fingerprint_inputs(**chosen) != Node.fingerprint_inputs(**chosen | {"clip_name2": "none"})


def test_plan_keeps_tables_pictures_and_clip_in_float():
    shapes = {
        "shared": (256384, 4096),
        "encoder.block.0.layer.1.DenseReluDense.wo": (4096, 10240),
        "encoder.block.1.layer.1.DenseReluDense.wo": (4096, 10240),
        "model.visual.blocks.0.attn.qkv": (3072, 1024),
        "model.visual.blocks.1.attn.qkv": (3072, 1024),
        "text_model.encoder.layers.0.mlp.fc1": (3072, 768),
        "text_model.encoder.layers.1.mlp.fc1": (3072, 768),
        "lm_head": (151936, 2560),
    }
    specs = {name: LayerSpec("float", "bf16", "BF16", shape, f"{name}.weight") for name, shape in shapes.items()}
    reasons = {d.layer: (d.action, d.reason) for d in text_encoder.plan(specs)}
    assert {layer for layer, (action, _) in reasons.items() if action == "quantise"} == {
        "encoder.block.0.layer.1.DenseReluDense.wo",
        "encoder.block.1.layer.1.DenseReluDense.wo",
    }
    assert "outside" in reasons["shared"][1]
    assert "pictures" in reasons["model.visual.blocks.0.attn.qkv"][1]
    assert "CLIP text model" in reasons["text_model.encoder.layers.0.mlp.fc1"][1]


def test_a_diffusion_model_and_a_gguf_file_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"not recognised as a text encoder.*Load DiT"):
        ours(str(ROOT / "tests" / "demo" / "data" / "emoji_flux2_dit_bf16.safetensors"))
    gguf = tmp_path / "encoder.gguf"
    gguf.write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(CheckpointError, match="safetensors file is needed"):
        ours(str(gguf))
