"""Steps of the full-size Ideogram 4 class (34 layers, random weights) with ComfyUI's dynamic VRAM and without it.

    COMFYUI_PATH=... python tests/bench/dynamic_vram.py [--json FILE] [--limit SECONDS]

Dynamic VRAM is what ComfyUI starts with on NVIDIA; the other tables are measured without it. Each way is a process of its
own, one after the other, with room for all weights. "bf16" is the float MODEL, "host" its INT8 twin on comfy_kitchen's
kernels, "linear" and "fused" ours. Samples are two steps in a row; contestants are interleaved; medians. "host time" is how
long the CPU is busy with a step. What the time limit cuts off is named.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time

import torch
from block_fusion import inputs_for
from ideogram4_forward import event_ms, forward, random_state
from lora import Results, median
from machine import load_comfy, load_kernels

SIZES, STEPS = (1024, 768), 2


@torch.inference_mode()
def one_way(dynamic: bool, results: Results, rounds: int) -> None:
    """Measure in this process, with or without dynamic VRAM."""
    load_kernels()
    from packtest.flag_run import begin_dynamic_vram

    comfy = load_comfy(before=begin_dynamic_vram if dynamic else None)
    from native_int8.nodes.int8 import host_backend, patcher, speeds

    base = comfy.sd.load_diffusion_model_state_dict(random_state(comfy), disable_dynamic=not dynamic)
    if base.is_dynamic() != dynamic:
        raise SystemExit(f"dynamic VRAM is {'off' if dynamic else 'on'} in a process that was to have it otherwise")
    fused, _ = patcher.patch_model(base)
    linear, host = fused.clone(), fused.clone()
    host_backend.set_speed(linear, speeds.LINEAR_ONLY)
    host_backend.set_speed(host, speeds.OFF)
    contestants = {"bf16": base, "host": host, "linear": linear, "fused": fused}
    for pixels in SIZES:
        inputs, ms, busy = inputs_for(pixels), {}, {}
        for done in range(rounds + 2):
            if done > 3 and results.left() < 5:
                results.data["cut_off"].append(f"{pixels} px after {done - 2} rounds")
                break
            for name, model in contestants.items():
                comfy.model_management.load_models_gpu([model], force_full_load=not dynamic)
                spent = []

                def steps(model=model, inputs=inputs, spent=spent):
                    begin = time.perf_counter()
                    for _ in range(STEPS):
                        forward(comfy, model, inputs)
                    spent.append((time.perf_counter() - begin) * 1e3 / STEPS)

                value = event_ms(steps) / STEPS
                # compiling and the first move to the GPU come first
                if done > 1:
                    ms.setdefault(name, []).append(value)
                    busy.setdefault(name, []).append(spent[0])
        results.note(
            f"{pixels} px, ms: " + ", ".join(f"{name} {median(v):.1f} (host {median(busy[name]):.1f})" for name, v in ms.items()),
            **{str(pixels): {name: [median(values), median(busy[name])] for name, values in ms.items()}},
        )  # fmt: skip
    record = host_backend.record_of(fused)
    results.note(f"calls of fused: {record.sentence()}", calls=record.ways_taken() | record.blocks_fused())


def both_ways(results: Results, limit: float, rounds: int) -> None:
    """Measure in two processes and print what dynamic VRAM costs."""
    found = results.data["dynamic_vram"] = {}
    with tempfile.TemporaryDirectory() as folder:
        for way in ("off", "on"):
            file = f"{folder}/{way}.json"
            command = [sys.executable, __file__, "--way", way, "--json", file, "--limit", str(limit / 2)]
            subprocess.run([*command, "--rounds", str(rounds)], check=True)
            with open(file) as content:
                found[way] = json.load(content)
    for pixels in map(str, SIZES):
        for name, (ms, _) in found["on"].get(pixels, {}).items():
            without = found["off"][pixels][name][0]
            results.note(
                f"{pixels} px {name}: {without:.1f} ms without, {ms:.1f} with dynamic VRAM ({ms / without:.3f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=150)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--way", choices=("off", "on"), help="only this one, in this process")
    arguments = parser.parse_args()
    results = Results(arguments.json, arguments.limit)
    if arguments.way is None:
        both_ways(results, arguments.limit, arguments.rounds)
    else:
        one_way(arguments.way == "on", results, arguments.rounds)


if __name__ == "__main__":
    main()
