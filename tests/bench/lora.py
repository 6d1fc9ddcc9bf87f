"""LoRAs on the full-size Ideogram 4 class (34 layers, random weights): step time with none, one and six of rank 32.

    COMFYUI_PATH=... python tests/bench/lora.py [--json FILE] [--limit SECONDS]

Every LoRA is on all INT8 Linears, in bf16, loaded by ComfyUI's own function. "ours" runs them beside the INT8 product;
"host" is the same INT8 MODEL without our wrapper: ComfyUI bakes the LoRAs into the codes and runs comfy_kitchen's kernels.
One forward at 1024 px with 256 text tokens is one step. Of ours none, one and six, and of host none, rounds are
interleaved; the host with LoRAs has other weights and comes after, in blocks. First, one layer's delta is checked. Results
are printed and written as they come; what the time limit cuts off is named.
"""

import argparse
import json
import time

import torch
from ideogram4_forward import TEXT_TOKENS, event_ms, forward, random_state
from machine import Timer, commit, describe, load_comfy, load_kernels

RANK = 32
MAX_DELTA_ERROR = 0.02
LAYERS = {"qkv": (4608, 13824), "o": (4608, 4608), "w1": (4608, 12288), "w2": (12288, 4608)}


def lora_file(model, seed: int) -> dict[str, torch.Tensor]:
    """A LoRA on every INT8 Linear whose deltas are half as large as what they are added to."""
    from packtest.loras import int8_linears

    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape, scale):
        return (torch.randn(shape, device="cuda", generator=generator) * scale).bfloat16().cpu()

    state = {}
    for name, module in int8_linears(model).items():
        n, k = module.out_features, module.in_features
        state[f"{name}.lora_up.weight"] = normal(n, RANK, scale=0.5 * RANK**-0.5)
        state[f"{name}.lora_down.weight"] = normal(RANK, k, scale=k**-0.5)
    return state


def with_loras(model, files, strength: float):
    from packtest.loras import add_lora

    for file in files:
        model = add_lora(model, file, strength)
    return model


def check_delta(model, file) -> float:
    """Relative error of what the kernel adds for one LoRA on the first layer, output rounding included."""
    from native_int8.kernels import PreparedLinear
    from native_int8.nodes.int8 import lora_branch
    from packtest.loras import delta, int8_linears

    file = {
        **file,
        **{name.replace("lora_up.weight", "alpha"): torch.tensor(float(RANK)) for name in file if "up" in name},
    }
    name, module = next(iter(int8_linears(model).items()))
    weight, device = module.weight, torch.device("cuda")
    patches = with_loras(model, [file], 1.0).patches[f"{name}.weight"]
    terms = lora_branch.terms_of(patches, module)
    low_rank = lora_branch.stack(terms, module.out_features, module.in_features, device, torch.bfloat16)
    codes, scale = weight._qdata.to(device), weight._params.scale.to(device)
    prepared = PreparedLinear(codes, scale)
    x = torch.randn((4352, module.in_features), device=device).bfloat16()
    for _ in range(2):
        got = prepared.with_rows(x, codes, scale, None, None, low_rank)[0].float() - prepared(x.float(), codes, scale)
    expected = x.float() @ delta(file, name).to(device).float().T
    return float((got - expected).norm() / expected.norm())


class Results:
    """What is known so far, written after every step; `left` seconds until the limit."""

    def __init__(self, path: str | None, limit: float):
        self.path, self.end = path, time.monotonic() + limit
        self.data: dict = {"machine": describe(), "commit": commit(), "rank": RANK, "cut_off": []}

    def left(self) -> float:
        return self.end - time.monotonic()

    def note(self, line: str, **values) -> None:
        self.data.update(values)
        print(line, flush=True)
        if self.path:
            with open(self.path, "w") as file:
                json.dump(self.data, file, indent=1)


def seconds(call) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def median(values):
    return sorted(values)[len(values) // 2]


def measure(comfy, results: Results, model, inputs, samples: dict, name: str, count: int) -> None:
    """Load, run once, then time `count` forwards; appends to `samples`."""
    found = samples.setdefault(name, {"load_s": [], "first_s": [], "ms": [], "gib": []})
    found["load_s"].append(seconds(lambda: comfy.model_management.load_models_gpu([model], force_full_load=True)))
    found["first_s"].append(seconds(lambda: forward(comfy, model, inputs)))
    found["ms"] += [event_ms(lambda: forward(comfy, model, inputs)) for _ in range(count)]
    found["gib"].append(torch.cuda.memory_allocated() / 2**30)


def layers(kernels, results: Results) -> None:
    """GPU time of the Linears alone: without a LoRA, with one and six in the epilogue, and as products afterwards."""
    timer, table = Timer(), {}
    for name, (k, n) in LAYERS.items():
        if results.left() < 8:
            results.data["cut_off"].append(f"layer {name}")
            continue
        codes, scale = kernels.quantize_rows(torch.randn((n, k), device="cuda"))
        prepared = kernels.PreparedLinear(codes, scale)
        x = torch.randn((4352, k), device="cuda", dtype=torch.bfloat16)
        calls = {"none": lambda p=prepared, x=x, c=codes, s=scale: p(x, c, s)}
        for rank in (RANK, 6 * RANK):
            factors = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rank, k), (n, rank))]
            low = kernels.LowRank(*factors)
            calls[f"epilogue {rank}"] = lambda p=prepared, x=x, c=codes, s=scale, low=low: p.with_rows(
                x, c, s, None, None, low
            )
            calls[f"after {rank}"] = lambda p=prepared, x=x, c=codes, s=scale, low=low: kernels.add_low_rank(
                p(x, c, s), x, low
            )
            calls[f"inner {rank}"] = lambda x=x, low=low: torch.nn.functional.linear(x, low.down)
        table[name] = timer.medians_us(calls, rounds=11)
        row = ", ".join(f"{call} {us:.0f}" for call, us in table[name].items())
        results.note(f"layer {name} 4352x{k}x{n}, us: {row}", layers_us=table)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=145)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    results = Results(arguments.json, arguments.limit)
    comfy = load_comfy()
    kernels = load_kernels()
    from native_int8.nodes.int8 import host_backend, patcher

    base = comfy.sd.load_diffusion_model_state_dict(random_state(comfy), disable_dynamic=True)
    ours, report = patcher.patch_model(base)
    del base
    results.note(f"{report.summary()}; {results.left():.0f} s left")
    files = [lora_file(ours, seed) for seed in range(6)]
    error = check_delta(ours, files[0])
    results.note(f"delta error of one layer: {error:.4f} of its norm", delta_error=error)
    if not error <= MAX_DELTA_ERROR:
        raise SystemExit(f"wrong result, no times are given: delta error {error}")
    # six together as strong as one
    one, six = with_loras(ours, files[:1], 0.5), with_loras(ours, files, 0.2)
    host = ours.clone()
    host_backend.detach(host)
    generator = torch.Generator("cuda").manual_seed(1)
    inputs = {
        "x": torch.randn((1, 128, 64, 64), device="cuda", generator=generator),
        "t": torch.tensor([0.7], device="cuda"),
        "c_crossattn": torch.randn((1, TEXT_TOKENS, 53248), device="cuda", generator=generator, dtype=torch.bfloat16),
        "attention_mask": torch.ones((1, TEXT_TOKENS), device="cuda", dtype=torch.long),
    }
    samples: dict = {}
    contestants = {"ours none": ours, "ours one": one, "ours six": six, "host none": host}
    record, calls = host_backend.record_of(ours), {}
    for name, model in contestants.items():
        record.reset()
        measure(comfy, results, model, inputs, {}, name, 2)
        calls[name] = record.snapshot()
    results.note(f"calls: {calls}; {results.left():.0f} s left", calls=calls)
    for number in range(arguments.rounds):
        if results.left() < 25:
            results.data["cut_off"].append(f"rounds from {number}")
            break
        for name, model in contestants.items():
            measure(comfy, results, model, inputs, samples, name, 3)
        ms = {name: median(found["ms"]) for name, found in samples.items()}
        row = ", ".join(f"{name} {value:.1f} ms ({value / ms['ours none']:.3f})" for name, value in ms.items())
        results.note(f"round {number + 1}: {row}", samples=samples)
    layers(kernels, results)
    for name, count in (("host one", 1), ("host six", 6)):
        if results.left() < 15:
            results.data["cut_off"].append(name)
            continue
        measure(comfy, results, with_loras(host, files[:count], 0.5 if count == 1 else 0.2), inputs, samples, name, 9)
        results.note(f"{name}: loaded in {samples[name]['load_s'][0]:.1f} s", samples=samples)
    table = {
        name: {key: median(values) for key, values in found.items()} | {"times": len(found["ms"])}
        for name, found in samples.items()
    }
    results.note("\ncontestant   ms      of ours none  of host none  load s  first run s  GiB", table=table)
    for name, row in table.items():
        results.note(
            f"{name:10} {row['ms']:7.2f} {row['ms'] / table['ours none']['ms']:10.3f} "
            f"{row['ms'] / table['host none']['ms']:13.3f} {row['load_s']:10.3f} {row['first_s']:9.3f} {row['gib']:8.2f}"
        )
    results.note(f"cut off: {results.data['cut_off'] or 'nothing'}")


if __name__ == "__main__":
    main()
