"""GGUF files, written by the gguf package where it is installed; the blocks by hand from their definition."""

import builtins

import numpy as np
import pytest
import torch
from native_int8.nodes.int8 import formats, policy, quantize
from native_int8.nodes.int8.checkpoint import CheckpointError
from native_int8.nodes.int8.formats.gguf import dequantised
from packtest.checkpoints import floats

LAYER = "blocks.0.attn.q"
SHAPE = (256, 512)


def blocks(weight: torch.Tensor) -> tuple[np.ndarray, torch.Tensor]:
    """Q8_0 bytes uint8 [N, K / 32 * 34], and the float64 weight they mean."""
    groups = weight.double().reshape(-1, 32)
    scale = (groups.abs().amax(1, keepdim=True) / 127).to(torch.float16)
    codes = (groups / scale.double()).round().clamp(-127, 127).to(torch.int8)
    raw = np.concatenate([scale.numpy().view(np.uint8), codes.numpy().view(np.uint8)], axis=1)
    return raw.reshape(weight.shape[0], -1), (codes.double() * scale.double()).reshape(weight.shape)


def write(path, tensors: dict) -> str:
    """A GGUF file; bytes are Q8_0, other arrays are of their own type, names ending in "!" say the type."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(path), "flux")
    for name, value in tensors.items():
        kind = gguf.GGMLQuantizationType.Q8_0 if value.dtype == np.uint8 else None
        if name.endswith("!"):
            name, kind = name[:-1], gguf.GGMLQuantizationType.Q4_0
        writer.add_tensor(name, value, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def test_blocks_are_codes_times_scale():
    raw, expected = blocks(floats(24, 64))
    assert torch.equal(dequantised(torch.from_numpy(raw), (24, 64)).double(), expected)


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model.", "transformer."])
@pytest.mark.parametrize("rotation", [True, False])
def test_q8_0_is_quantised_by_rows_and_the_rest_stays(prefix, rotation, tmp_path):
    raw, expected = blocks(floats(*SHAPE))
    kept_raw, kept = blocks(floats(64, 64, seed=1))
    arrays = {
        f"{prefix}{LAYER}.weight": raw,
        f"{prefix}{LAYER}.bias": floats(SHAPE[0]).numpy(),
        f"{prefix}blocks.1.attn.q.weight": floats(*SHAPE, seed=2, dtype=torch.float16).numpy(),
        f"{prefix}img_in.weight": kept_raw,
    }
    path = write(tmp_path / "model.gguf", arrays)
    assert formats.is_gguf(path)
    header, state = formats.read_gguf(path)
    assert header.prefix == prefix and header.tensors[f"{LAYER}.weight"].shape == SHAPE

    def read(name):
        return state[header.key(name)]

    decisions = {d.layer: d for d in policy.plan(formats.detect(header, read), rotation=rotation)}
    assert {d.layer: d.action for d in decisions.values()} == {
        LAYER: "quantise", "blocks.1.attn.q": "quantise", "img_in": "keep",
    }  # fmt: skip
    got = quantize.native_layer(decisions[LAYER], read, torch.device("cpu"))
    direct = quantize.quantised(decisions[LAYER], expected.float(), None, torch.device("cpu"))
    assert all(torch.equal(got[key], direct[key]) for key in direct)
    assert torch.equal(quantize.kept_layer(decisions["img_in"].spec, read), kept.to(torch.bfloat16))


def test_another_type_is_named(tmp_path):
    path = write(tmp_path / "model.gguf", {f"{LAYER}.weight!": np.zeros((32, 18), dtype=np.uint8)})
    with pytest.raises(CheckpointError, match=rf"{LAYER}.weight: the GGUF type Q4_0.*use the Q8_0 file"):
        formats.read_gguf(path)


def test_every_cut_of_a_gguf_file_is_found(tmp_path):
    path = tmp_path / "model.gguf"
    write(path, {f"{LAYER}.weight": blocks(floats(8, 64))[0]})
    content = path.read_bytes()
    for length in range(4, len(content) - 32, 7):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="incomplete"):
            formats.read_gguf(str(path))


def test_without_the_package_the_message_says_how_to_get_it(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name == "gguf":
            raise ImportError(name)
        return real(name, *rest)

    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(CheckpointError, match="pip install gguf"):
        formats.read_gguf(str(path))
