"""Text encoders of full size in the host's own classes: bf16, INT8 as the host runs it, and INT8 as we run it.

    python tests/bench/text_encoder.py [--encoders qwen3_4b t5_xxl] [--tokens 256 512] [--layers N] [--json FILE]
    python tests/bench/text_encoder.py --gguf SmolLM2-135M-Instruct.Q4_1.gguf

Weights are random (the host's classes, the sizes of Z-Image's Qwen3 4B and of Flux.1's T5-XXL), so the cosine against bf16
says that the paths agree, not how good a picture is. With --gguf they are SmolLM2's real ones, in the host's Llama class: the
cosine is of the hidden states of all layers. Needs COMFYUI_PATH. Times are the median of
`encode_from_tokens` with the host's own work; memory is the peak while encoding. Writes JSON and prints a table last.
"""

import argparse
import gc
import importlib
import json
import statistics
import time
from pathlib import Path

import torch
from machine import load_comfy, load_kernels

# type of the host's loader, its name for the encoder, and its class and operations by name
ENCODERS = {
    "qwen3_4b": ("lumina2", "qwen3_4b", "comfy.text_encoders.llama", "Qwen3_4B"),
    "t5_xxl": ("pixart", "t5xxl", "comfy.text_encoders.t5", "T5"),
}
PROMPTS = (
    "A watercolour painting of a small wooden boat on a quiet lake at dawn, with mist over the water and mountains behind.",
    "Portrait of an old clockmaker in his workshop, warm light from the left, brass gears on the table, shallow depth of field.",
    "The words OPEN LATE in red neon above the door of a diner, rain on the street, reflections, a parked motorcycle.",
)


class Dequantised:
    """Counts the weights that the host expands, while it is entered."""

    def __enter__(self):
        from comfy.quant_ops import QuantizedTensor

        self.count, self._class, self._method = 0, QuantizedTensor, QuantizedTensor.dequantize

        def dequantize(tensor):
            self.count += 1
            return self._method(tensor)

        QuantizedTensor.dequantize = dequantize
        return self

    def __exit__(self, *_):
        self._class.dequantize = self._method


def random_state(module, config: dict, device: str) -> dict[str, torch.Tensor]:
    """Weights of the host's class in bf16, drawn on `device` and scaled so that activations keep their size."""
    model_class = getattr(importlib.import_module(module[2]), module[3])
    import comfy.ops

    with torch.device("meta"):
        model = model_class(config, dtype=torch.bfloat16, device="meta", operations=comfy.ops.disable_weight_init)
    generator = torch.Generator(device).manual_seed(0)
    out = {}
    for name, value in model.state_dict().items():
        if "norm" in name:
            out[name] = torch.ones(value.shape, dtype=torch.bfloat16, device=device)
            continue
        factor = 1.0 if any(word in name for word in ("embed_tokens", "shared")) else value.shape[-1] ** -0.5
        if name.endswith("SelfAttention.q.weight"):
            # T5 does not divide by the root of the head's width; its weights do
            factor *= 64**-0.5
        out[name] = torch.randn(value.shape, generator=generator, device=device, dtype=torch.bfloat16).mul_(factor)
    return out


def native_state(clip) -> dict[str, torch.Tensor]:
    """The INT8 state dict of our CLIP as a file would hold it."""
    return {k.partition(".transformer.")[2]: v for k, v in clip.get_sd().items() if ".transformer." in k}


def measure(clip, tokens: dict, rounds: int, others_bytes: int) -> dict:
    """Encode `rounds` times after one to warm up; milliseconds, peak memory beyond `others_bytes`, weights expanded."""
    cuda = torch.cuda.is_available()
    wait = torch.cuda.synchronize if cuda else lambda: None
    with Dequantised() as dequantised:
        before = time.perf_counter()
        clip.encode_from_tokens(tokens)
        wait()
        first = time.perf_counter() - before
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(rounds):
        wait()
        before = time.perf_counter()
        out = clip.encode_from_tokens(tokens, return_dict=True)
        wait()
        times.append((time.perf_counter() - before) * 1e3)
    return {
        "ms": statistics.median(times),
        "first_s": first,
        "peak_gib": (torch.cuda.max_memory_allocated() - others_bytes) / 2**30 if cuda else None,
        "weights_gib": clip.patcher.model_size() / 2**30,
        "expanded": dequantised.count,
        "out": out.get("conditioning_llama3", out["cond"]).float().cpu(),
    }


def cosines(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """The mean and the worst cosine of a token's state, over tokens and layers; a few tokens are larger than all others
    together, so a cosine of all numbers would tell of them alone."""
    each = torch.nn.functional.cosine_similarity(a.double(), b.double(), dim=-1)
    return each.mean().item(), each.min().item()


def release(comfy) -> None:
    """Give the memory of dropped models back."""
    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def three_ways(comfy, text_encoder, state, kind, options, prompts: dict, rounds: int) -> list[dict]:
    """bf16, the host's INT8 and ours on the same weights and tokens; one row for each and each prompt.

    prompts: name -> tokens as the host's tokenizer gives them.
    """
    from native_int8.nodes.int8 import host_backend

    clip_type = getattr(comfy.sd.CLIPType, kind.upper())

    def stock(tensors):
        return comfy.sd.load_text_encoder_state_dicts([tensors], clip_type=clip_type, model_options=dict(options))

    rows, results, int8_state = [], {}, None
    for way in ("bf16", "ours", "host INT8"):
        before = time.perf_counter()
        others_bytes = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        if way == "bf16":
            clip = stock(dict(state))
        elif way == "ours":
            clip = text_encoder.load_state_dicts([state], kind, model_options=options)
            int8_state = native_state(clip)
        else:
            clip = stock(int8_state)
        load_s = time.perf_counter() - before
        for name, tokens in prompts.items():
            record = host_backend.record_of(clip.patcher)
            if record is not None:
                record.reset()
            row = measure(clip, tokens, rounds, others_bytes)
            results[way, name] = row.pop("out")
            calls = sum(record.snapshot()["calls"].values()) // (rounds + 1) if record else 0
            row |= {"way": way, "prompt": name, "load_s": load_s, "our_int8_calls": calls}
            row["cosine_to_bf16"], row["worst_token"] = cosines(results[way, name], results["bf16", name])
            rows.append(row)
            print(way, name, f"{row['ms']:.1f} ms", f"cosine {row['cosine_to_bf16']:.6f}", flush=True)
        linears = clip.patcher.get_attachment("native_int8_report")
        if linears is not None:
            print(linears.source_line, "|", linears.summary(), flush=True)
        del clip
        release(comfy)
    return rows


def full_size(comfy, text_encoder, args) -> list[dict]:
    """The rows of all encoders with random weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = []
    for name in args.encoders:
        module = ENCODERS[name]
        kind, host_name = module[:2]
        config, options = {}, {}
        if host_name == "t5xxl":
            folder = Path(importlib.import_module("comfy.text_encoders.t5").__file__).parent
            config = json.loads((folder / "t5_config_xxl.json").read_text(encoding="utf-8"))
        if args.layers:
            # the host tells T5-XXL by its last layer and its d_ff
            narrow = {"d_model": 256, "num_heads": 4}
            changes = narrow if host_name == "t5xxl" else {"num_hidden_layers": args.layers, "vocab_size": 4096}
            config |= changes
            options[f"{host_name}_model_config"] = changes
        state = random_state(module, config, device)
        print(name, f"{sum(t.numel() for t in state.values()) / 1e9:.2f} billion weights", flush=True)
        prompts = {f"{n} tokens": {host_name: [[(i * 37 % 4000 + 2, 1.0) for i in range(n)]]} for n in args.tokens}
        found = three_ways(comfy, text_encoder, state, kind, options, prompts, args.rounds)
        rows += [{"encoder": name, **row} for row in found]
        del state
        release(comfy)
    return rows


def smollm2(path: str) -> tuple[dict[str, torch.Tensor], dict, dict]:
    """SmolLM2 from a GGUF file: (state dict under the host's names, config for the host's class, prompt -> token ids)."""
    import gguf
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    reader = gguf.GGUFReader(path)
    names = {
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    for tensor in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        parts = tensor.name.split(".")
        if parts[0] != "blk":
            name = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}[parts[0]]
        else:
            name = f"model.layers.{parts[1]}.{names[parts[2]]}"
            if parts[2] in ("attn_q", "attn_k"):
                # GGUF interleaves the two halves of a head that are rotated together
                values = values.view(-1, 32, 2, 576).transpose(1, 2).reshape(-1, 576)
        state[f"{name}.weight"] = values.to(torch.bfloat16)
    fields = {key: reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges")}
    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [tuple(m.split(" ")) for m in fields["merges"]]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    config = {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "rope_theta": 100000.0, "vocab_size": len(vocabulary),
    }  # fmt: skip
    return state, config, {prompt: tokenizer.encode(prompt).ids for prompt in PROMPTS}


def real_weights(comfy, text_encoder, args) -> list[dict]:
    """The rows of SmolLM2 in the host's Llama class, all layers' hidden states compared."""
    from comfy.text_encoders import llama

    # a constant of the host's class; SmolLM2's heads are half as wide
    llama.Llama2Config.head_dim = 64
    state, config, prompts = smollm2(args.gguf)
    tokens = {
        f"{i}: {len(ids)} tokens": {"llama": [[(128, 1.0), *((id, 1.0) for id in ids)]], "l": [], "g": [], "t5xxl": []}
        for i, ids in enumerate(prompts.values())
    }
    rows = three_ways(comfy, text_encoder, state, "hidream", {"llama_model_config": config}, tokens, args.rounds)
    return [{"encoder": "SmolLM2-135M", **row} for row in rows]


def table(rows: list[dict]) -> str:
    """One line per encoder, prompt and way."""
    lines = [
        f"{'encoder':13} {'prompt':12} {'way':10} {'ms':>8} {'weights':>8} {'peak GiB':>8} {'expanded':>8} {'ours':>5}  cosine   worst token"
    ]
    for r in rows:
        peak = "-" if r["peak_gib"] is None else f"{r['peak_gib']:.2f}"
        lines.append(
            f"{r['encoder']:13} {r['prompt']:12} {r['way']:10} {r['ms']:8.1f} {r['weights_gib']:8.2f} {peak:>8} "
            f"{r['expanded']:8} {r['our_int8_calls']:5}  {r['cosine_to_bf16']:.6f} {r['worst_token']:.6f}"
        )
    return "\n".join(lines)


@torch.inference_mode()
def main() -> None:
    """Measure, write the JSON, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--encoders", nargs="+", choices=ENCODERS, default=list(ENCODERS))
    parser.add_argument("--tokens", nargs="+", type=int, default=[256, 512])
    parser.add_argument("--layers", type=int, default=0, help="fewer layers (a narrow T5), for a trial on a CPU")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gguf", help="SmolLM2's GGUF file: real weights instead of random ones")
    parser.add_argument("--json", default="text_encoder.json")
    args = parser.parse_args()
    load_kernels()
    comfy = load_comfy()
    text_encoder = importlib.import_module("native_int8.nodes.int8.text_encoder")
    rows = (real_weights if args.gguf else full_size)(comfy, text_encoder, args)
    where = {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
    }
    Path(args.json).write_text(json.dumps({**where, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(where))
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
