"""One forward of the full-size Ideogram 4 class (34 layers, random weights): bf16, the host's own INT8, and ours.

    COMFYUI_PATH=... python tests/bench/ideogram4_forward.py [--json FILE]

The bf16 MODEL is built by ComfyUI from a state dict; the INT8 MODEL is what the node INT8 Patch Model returns for it.
"host" is that same INT8 MODEL without our wrapper, so ComfyUI picks comfy_kitchen's kernels. 256 text tokens, batch 1,
attention mask given. Contestants are interleaved in one process; medians of 10 rounds after warm-up. A float that differs
from bf16 by more than rounding to INT8 explains stops the run: no speed is printed for a wrong result.
"""

import argparse
import gc
import json

import torch
from machine import describe, load_comfy, load_kernels

TEXT_TOKENS = 256
MIN_COSINE = 0.99


def random_state(comfy) -> dict[str, torch.Tensor]:
    """Random bf16 weights under ComfyUI's names: Linears ~ N(0, 1/K), norms 1, biases 0."""
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    with torch.device("meta"):
        model = Ideogram4Transformer2DModel(dtype=torch.bfloat16, operations=torch.nn)
    generator = torch.Generator("cuda").manual_seed(0)
    state = {}
    for name, value in model.state_dict().items():
        if value.dim() == 2:
            weight = torch.randn(value.shape, device="cuda", dtype=torch.bfloat16, generator=generator)
            state[name] = (weight * value.shape[1] ** -0.5).cpu()
        else:
            state[name] = torch.full(value.shape, float("norm" in name and "bias" not in name), dtype=torch.bfloat16)
    return state


def forward(comfy, model, inputs):
    """The MODEL's output for the inputs, through apply_model with the MODEL's own wrappers, as the sampler calls it."""
    options = model.model_options.get("transformer_options", {}).copy()
    options["wrappers"] = comfy.patcher_extension.copy_nested_dicts(model.wrappers)
    return model.model.apply_model(**inputs, transformer_options=options)


def event_ms(call) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    comfy = load_comfy()
    load_kernels()
    from native_int8.nodes.int8 import host_backend, patcher

    state = random_state(comfy)
    base = comfy.sd.load_diffusion_model_state_dict(dict(state), disable_dynamic=True)
    del state
    ours, report = patcher.patch_model(base)
    print(report.summary(), flush=True)
    host = ours.clone()
    host_backend.detach(host)
    contestants = {"bf16": base, "host": host, "ours": ours}
    comfy.model_management.load_models_gpu([base, ours], force_full_load=True)
    weights = {name: model.model_size() for name, model in contestants.items()}
    result = {
        "machine": describe(),
        "weights_bytes": weights,
        "text_tokens": TEXT_TOKENS,
        "forward_ms": {},
        "cosine": {},
    }
    for pixels in (768, 1024):
        side = pixels // 16
        generator = torch.Generator("cuda").manual_seed(1)
        image = torch.randn((1, 128, side, side), device="cuda", generator=generator)
        text = torch.randn((1, TEXT_TOKENS, 53248), device="cuda", generator=generator, dtype=torch.bfloat16)
        mask = torch.ones((1, TEXT_TOKENS), device="cuda", dtype=torch.long)
        time = torch.tensor([0.7], device="cuda")
        inputs = {"x": image, "t": time, "c_crossattn": text, "attention_mask": mask}
        outputs = {name: forward(comfy, model, inputs).float().flatten() for name, model in contestants.items()}
        cosine = {
            name: float(torch.nn.functional.cosine_similarity(out, outputs["bf16"], dim=0))
            for name, out in outputs.items()
        }
        if not all(value > MIN_COSINE for value in cosine.values()):
            raise SystemExit(f"wrong result at {pixels} px, no times are given: cosine against bf16 {cosine}")
        times = {name: [] for name in contestants}
        for _ in range(arguments.rounds + 2):
            for name, model in contestants.items():
                times[name].append(event_ms(lambda model=model, inputs=inputs: forward(comfy, model, inputs)))
        medians = {name: sorted(values[2:])[arguments.rounds // 2] for name, values in times.items()}
        result["forward_ms"][pixels], result["cosine"][pixels] = medians, cosine
        gc.collect()
    record = host_backend.record_of(ours)
    result["calls"] = record.snapshot() | record.ways_taken() | record.rows_shared()
    for pixels, ms in result["forward_ms"].items():
        row = ", ".join(
            f"{name} {value:.1f} ms (cosine {result['cosine'][pixels][name]:.4f})" for name, value in ms.items()
        )
        print(f"{pixels} px: {row}; bf16/ours {ms['bf16'] / ms['ours']:.3f}, host/ours {ms['host'] / ms['ours']:.3f}")
    print(f"weights: INT8 {weights['ours'] / weights['bf16']:.3f} of bf16; calls {result['calls']}")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
