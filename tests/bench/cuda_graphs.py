"""Steps of the full-size Ideogram 4 class (34 layers, random weights): fused as they are, and as CUDA graphs.

    COMFYUI_PATH=... python tests/bench/cuda_graphs.py [--json FILE] [--limit SECONDS]

"fused" and "graph" are clones of one INT8 MODEL. 256 text tokens, batch 1, a mask that hides nothing given; "image" is the
branch without text. Both are interleaved in one process; medians after warm-up, with all other values in each step. A graph whose
output is not the fused one's bit for bit stops the run. Memory is what the allocator holds more than before. Results are
printed and written as they come; what the time limit cuts off is named.
"""

import argparse

import torch
from block_fusion import inputs_for
from ideogram4_forward import event_ms, forward, random_state
from lora import Results, median, seconds
from machine import load_comfy, load_kernels

SIZES = (1024, 768, 512)


def others(inputs: dict, seed: int) -> dict:
    """The inputs of another step: other values of the same shapes."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(inputs["x"].shape, device="cuda", generator=generator)
    return inputs | {"x": x, "t": torch.full_like(inputs["t"], 0.9 - 0.01 * seed)}


def held() -> float:
    """MiB that the allocator holds of the GPU."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved() / 2**20


def compare(comfy, results: Results, contestants: dict, record, name: str, inputs: dict, rounds: int) -> None:
    """Check and time one size or branch."""
    forward(comfy, contestants["fused"], inputs)
    before = held()
    first_s = [seconds(lambda: forward(comfy, contestants["graph"], inputs)) for _ in range(2)]
    cost = held() - before
    record.reset()
    for seed in range(3):
        changed = others(inputs, seed)
        a, b = (forward(comfy, model, changed) for model in contestants.values())
        if not torch.equal(a, b):
            raise SystemExit(f"wrong result at {name}, no times are given: largest difference {(a - b).abs().max()}")
    graphs = record.by_graph()
    if graphs["graphed"].get("replayed") != 3:
        raise SystemExit(f"no graph at {name}: {graphs}")
    times: dict[str, list[float]] = {model: [] for model in contestants}
    for number in range(rounds + 2):
        changed = others(inputs, number)
        for model, patcher in contestants.items():
            times[model].append(event_ms(lambda p=patcher, i=changed: forward(comfy, p, i)))
    ms = {model: median(values[2:]) for model, values in times.items()}
    found = {"ms": ms, "times_ms": times, "cost_mib": cost, "first_and_recording_s": first_s}
    results.data.setdefault("steps", {})[name] = found
    results.note(
        f"{name}: fused {ms['fused']:.2f} ms, graph {ms['graph']:.2f} ms ({ms['fused'] / ms['graph']:.3f}x), bits equal; "
        f"{cost:.0f} MiB more held; first call {first_s[0]:.2f} s, recording {first_s[1]:.2f} s; {results.left():.0f} s left"
    )


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=90)
    parser.add_argument("--rounds", type=int, default=20)
    arguments = parser.parse_args()
    results = Results(arguments.json, arguments.limit)
    comfy = load_comfy()
    load_kernels()
    from native_int8.nodes.int8 import host_backend, patcher, speeds

    base = comfy.sd.load_diffusion_model_state_dict(random_state(comfy), disable_dynamic=True)
    fused, report = patcher.patch_model(base)
    del base
    graph = fused.clone()
    host_backend.set_speed(graph, speeds.GRAPHED, lambda sentence: print(f"  {sentence}", flush=True))
    comfy.model_management.load_models_gpu([fused], force_full_load=True)
    results.note(f"{report.summary()}; {results.left():.0f} s left")
    contestants, record = {"fused": fused, "graph": graph}, host_backend.record_of(graph)
    cases = {f"{pixels} px": inputs_for(pixels) for pixels in SIZES}
    cases["1024 px image"] = {name: value for name, value in cases["1024 px"].items() if name in ("x", "t")}
    for name, inputs in cases.items():
        if results.left() < 8:
            results.data["cut_off"].append(name)
            continue
        compare(comfy, results, contestants, record, name, inputs, arguments.rounds)
    results.note("\nstep              fused ms   graph ms   ratio   MiB more")
    for name, found in results.data.get("steps", {}).items():
        ms = found["ms"]
        results.note(
            f"{name:16} {ms['fused']:9.2f} {ms['graph']:10.2f} {ms['fused'] / ms['graph']:7.3f} {found['cost_mib']:10.0f}"
        )
    results.note(f"cut off: {results.data['cut_off'] or 'nothing'}; {results.left():.0f} s left")


if __name__ == "__main__":
    main()
