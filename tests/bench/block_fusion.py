"""Fused blocks on the full-size Ideogram 4 class (34 layers, random weights): step time, launches, and where the time goes.

    COMFYUI_PATH=... python tests/bench/block_fusion.py [--json FILE] [--limit SECONDS]

"bf16" is the float MODEL, "host" its INT8 twin on comfy_kitchen's kernels, "linear" the twin with our Linears only, "fused"
with our blocks, "host rope" the same with comfy_kitchen's norm and rope of q and k in place of ours. 256 text tokens, batch
1, a mask that hides nothing given. "no mask" is "linear" called without the mask: what "fused", which drops it, must equal.
First the kernels are compared with PyTorch's own operations, bit for bit.
Contestants are interleaved; medians of 10 rounds after warm-up. Results are printed and written as they come; what the
time limit cuts off is named.
"""

import argparse

import torch
from ideogram4_forward import TEXT_TOKENS, event_ms, forward, random_state
from lora import Results, median
from machine import Timer, load_comfy, load_kernels

# what the names of GPU kernels hold, in the order in which they are asked
CLASSES = {
    "attention": ("sdpa", "fmha", "flash", "attention", "softmax"),
    "int8 matmul": ("int8_matmul", "_int8_", "igemm", "imma"),
    "other matmul": ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "splitreduce"),
    "fused passes": ("residual_norm", "quantize_activation"),
    "quantise": ("quantize",),
    "rope": ("rope",),
}
M, DIM, HIDDEN = 4352, 4608, 12288


def differing(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got != expected).float().mean())


def kernels_alone(results: Results) -> None:
    """What each fused pass costs and the separate operations cost, and how many values differ between them."""
    from native_int8.kernels import quantize_rows
    from native_int8.kernels.packed_rows import parts_of
    from native_int8.kernels.quantize_activation import quantize_swiglu
    from native_int8.kernels.residual_norm import Branch, Norm, add_branch_torch, modulated_norm_torch, residual_norm

    def normal(*shape):
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    x, y, modulation = normal(M, DIM), normal(M, DIM) * 3, normal(4, 1, DIM)
    gate, up = normal(M, HIDDEN), normal(M, HIDDEN)
    branch = Branch(y, normal(DIM), 1e-5, torch.tanh(modulation[0]))
    norm = Norm(normal(DIM), 1e-5, modulation[1])

    def eager(branch, norm, group):
        out = x if branch is None else add_branch_torch(x, branch)
        return out, None if norm is None else quantize_rows(modulated_norm_torch(out, norm), rotation_group=group)

    timer, table, differs = Timer(), {}, {}
    for group in (0, 256):
        calls, halves = {}, {"begin": (None, norm), "both": (branch, norm), "end": (branch, None)}
        for name, parts in halves.items():
            calls[name] = lambda p=parts, g=group: residual_norm(x, *p, rotation_group=g)
            calls[f"{name} eager"] = lambda p=parts, g=group: eager(*p, g)
            got, expected = calls[name](), calls[f"{name} eager"]()
            found = [differing(got[0], expected[0])]
            if parts[1] is not None:
                codes, scale = parts_of(got[1], M, DIM)
                found += [differing(codes, expected[1][0]), differing(scale, expected[1][1].view(-1))]
            differs[f"{name} {group}"] = found
        calls["swiglu"] = lambda g=group: quantize_swiglu(gate, up, rotation_group=g)
        calls["swiglu eager"] = lambda g=group: quantize_rows(torch.nn.functional.silu(gate) * up, rotation_group=g)
        codes, scale = parts_of(calls["swiglu"](), M, HIDDEN)
        expected = calls["swiglu eager"]()
        differs[f"swiglu {group}"] = [differing(codes, expected[0]), differing(scale, expected[1].view(-1))]
        table[group] = timer.medians_us(calls, rounds=11)
        row = ", ".join(f"{name} {us:.0f}" for name, us in table[group].items())
        results.note(f"passes, rotation {group}, us at {M} rows: {row}", passes_us=table)
    results.note(f"share of values that differ from PyTorch's: {differs}", differs=differs)


def rope_alone(results: Results) -> None:
    """Norm and rope of q and k: ours, the host's choice, and the host's plain PyTorch; and how many values differ."""
    import comfy_kitchen
    from comfy_kitchen.backends.eager import rope as eager
    from native_int8.kernels import rms_rope

    qkv = torch.randn((1, M, 3, 18, 256), device="cuda", dtype=torch.bfloat16)
    q, k, _ = qkv.unbind(2)
    angle = torch.rand((1, M, 1, 128), device="cuda") * 6
    freqs = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2))
    weights = [1 + 0.2 * torch.randn(256, device="cuda", dtype=torch.bfloat16) for _ in "qk"]
    calls = {
        "ours": lambda: rms_rope(q, k, freqs[:, :, 0], *weights, 1e-5, split_half=True),
        "ours by lane": lambda: rms_rope(q, k, freqs[:, :, 0], *weights, 1e-5, split_half=True, by_lane=True),
        "host": lambda: comfy_kitchen.rms_rope_split_half(q, k, freqs, *weights, 1e-5),
        "eager": lambda: eager.rms_rope_split_half(q, k, freqs, *weights, 1e-5),
    }
    outputs = {name: torch.stack(call()) for name, call in calls.items()}
    differs = {
        f"{a} / {b}": differing(outputs[a], outputs[b])
        for a, b in (("ours", "eager"), ("host", "eager"), ("ours by lane", "host"))
    }
    us = Timer().medians_us(calls, rounds=11)
    row = ", ".join(f"{name} {value:.0f}" for name, value in us.items())
    results.note(f"rope at {M} rows, us: {row}; share that differs: {differs}", rope_us=us, rope_differs=differs)


def feed_forward_alone(results: Results) -> None:
    """From the rows of w1 and w3 to those of w2: two matmuls and one pass, or SiLU in the matmul's epilogue, then quantise."""
    from native_int8.kernels import PreparedLinear, quantize_rows, quantize_swiglu
    from native_int8.kernels.int8_linear_fused import swiglu_of_rows
    from native_int8.kernels.packed_rows import parts_of

    x = torch.randn((M, DIM), device="cuda", dtype=torch.bfloat16)
    weights = [quantize_rows(torch.randn((HIDDEN, DIM), device="cuda") * DIM**-0.5) for _ in range(2)]
    first, second = (PreparedLinear(*weight) for weight in weights)
    rows = first.with_rows(x, *weights[0])[1]
    linears = [(*weight, None) for weight in weights]
    table, differs = {}, {}
    for group in (0, 256):

        def two(group=group):
            gate, up = (
                linear.with_rows(x, *w, None, rows)[0] for linear, w in ((first, weights[0]), (second, weights[1]))
            )
            return quantize_swiglu(gate, up, rotation_group=group)

        def epilogue(group=group):
            return quantize_rows(swiglu_of_rows(x, rows, *linears, "triton"), rotation_group=group)

        differs[group] = differing(parts_of(two(), M, HIDDEN)[0], epilogue()[0])
        table[group] = Timer().medians_us({"two": two, "epilogue": epilogue}, rounds=11)
    results.note(f"w1, w3 and SiLU at {M} rows, us: {table}; codes that differ: {differs}", swiglu_us=table)


def class_of(kernel: str) -> str:
    name = kernel.lower()
    return next((kind for kind, parts in CLASSES.items() if any(part in name for part in parts)), "elementwise")


def profiled(comfy, model, inputs) -> dict:
    """One forward under the profiler: launches, milliseconds by class, gaps, and the slowest kernels."""
    from torch.profiler import ProfilerActivity, profile

    forward(comfy, model, inputs)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        forward(comfy, model, inputs)
        torch.cuda.synchronize()
    kernels = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    classes, names = {}, {}
    for event in kernels:
        ms = event.time_range.elapsed_us() / 1e3
        classes[class_of(event.name)] = classes.get(class_of(event.name), 0.0) + ms
        count, total = names.get(event.name[:90], (0, 0.0))
        names[event.name[:90]] = (count + 1, total + ms)
    span = (max(e.time_range.end for e in kernels) - min(e.time_range.start for e in kernels)) / 1e3
    classes["gaps"] = span - sum(classes.values())
    slowest = sorted(names.items(), key=lambda item: -item[1][1])[:14]
    return {"launches": len(kernels), "ms": {k: round(v, 2) for k, v in classes.items()}, "slowest": slowest}


def inputs_for(pixels: int) -> dict:
    side = pixels // 16
    generator = torch.Generator("cuda").manual_seed(1)
    return {
        "x": torch.randn((1, 128, side, side), device="cuda", generator=generator),
        "t": torch.tensor([0.7], device="cuda"),
        "c_crossattn": torch.randn((1, TEXT_TOKENS, 53248), device="cuda", generator=generator, dtype=torch.bfloat16),
        "attention_mask": torch.ones((1, TEXT_TOKENS), device="cuda", dtype=torch.long),
    }


def steps(comfy, results: Results, contestants: dict, pixels: int, rounds: int) -> None:
    """Cosines first, then interleaved times."""
    inputs = {name: inputs_for(pixels) for name in contestants}
    if "no mask" in inputs:
        inputs["no mask"].pop("attention_mask")
    outputs = {name: run(comfy, model, inputs[name]).float().flatten() for name, model in contestants.items()}
    pairs = [("fused", "no mask"), ("fused", "linear"), ("linear", "no mask"), ("host rope", "fused")]
    pairs += [(name, "bf16") for name in ("host", "linear", "no mask", "fused")]
    cosine = {
        f"{a} / {b}": float(torch.nn.functional.cosine_similarity(outputs[a], outputs[b], dim=0)) for a, b in pairs
    }
    equal = bool(torch.equal(outputs["fused"], outputs["no mask"]))
    results.data.setdefault("cosine", {})[pixels] = cosine
    results.note(f"{pixels} px cosine: " + ", ".join(f"{k} {v:.6f}" for k, v in cosine.items()))
    results.note(f"{pixels} px: fused equals no mask bit for bit: {equal}", **{f"equal_{pixels}": equal})
    times = {name: [] for name in contestants}
    for done in range(rounds + 2):
        if done > 4 and results.left() < 5:
            results.data["cut_off"].append(f"{pixels} px after {done} rounds")
            break
        for name, model in contestants.items():
            times[name].append(event_ms(lambda m=model, i=inputs[name]: run(comfy, m, i)))
    ms = {name: median(values[2:]) for name, values in times.items()}
    results.data.setdefault("forward_ms", {})[pixels] = ms
    ratios = ", ".join(f"{name}/fused {ms[name] / ms['fused']:.3f}" for name in ms if name != "fused")
    results.note(f"{pixels} px ms: " + ", ".join(f"{k} {v:.1f}" for k, v in ms.items()) + f"; {ratios}")


class HostRope:
    """A MODEL that runs fused, but with comfy_kitchen's rope."""

    def __init__(self, model):
        self.model = model

    def run(self, comfy, inputs):
        from native_int8.nodes.int8.fusion import rope

        real, rope._unfit = rope._unfit, lambda _: "for comparison"
        try:
            return forward(comfy, self.model, inputs)
        finally:
            rope._unfit = real


def run(comfy, contestant, inputs):
    """The output of a MODEL or an HostRope."""
    return contestant.run(comfy, inputs) if isinstance(contestant, HostRope) else forward(comfy, contestant, inputs)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=145)
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    results = Results(arguments.json, arguments.limit)
    comfy = load_comfy()
    load_kernels()
    from native_int8.nodes.int8 import host_backend, patcher, speeds

    for part in (kernels_alone, rope_alone, feed_forward_alone):
        part(results)
    state = random_state(comfy)
    base = comfy.sd.load_diffusion_model_state_dict(dict(state), disable_dynamic=True)
    del state
    fused, report = patcher.patch_model(base)
    linear, host = fused.clone(), fused.clone()
    host_backend.set_speed(linear, speeds.LINEAR_ONLY)
    host_backend.set_speed(host, speeds.OFF)
    comfy.model_management.load_models_gpu([base, fused], force_full_load=True)
    results.note(f"{report.summary()}; {results.left():.0f} s left")
    contestants = {"bf16": base, "host": host, "linear": linear, "no mask": linear, "fused": fused}
    contestants["host rope"] = HostRope(fused)
    for pixels in (1024, 768):
        if results.left() < 15:
            results.data["cut_off"].append(f"{pixels} px")
            continue
        steps(comfy, results, contestants, pixels, arguments.rounds)
    record = host_backend.record_of(fused)
    calls = record.snapshot() | record.ways_taken() | record.rows_shared() | record.blocks_fused()
    results.note(f"calls of fused: {calls}", calls=calls)
    for pixels in (1024, 768):
        for name in ("linear", "fused", "bf16"):
            if results.left() < 6:
                results.data["cut_off"].append(f"profile {pixels} {name}")
                continue
            found = profiled(comfy, contestants[name], inputs_for(pixels))
            results.data.setdefault("profile", {})[f"{pixels} {name}"] = found
            results.note(f"{pixels} px {name}: {found['launches']} launches, ms {found['ms']}")
    for kernel, (count, ms) in results.data.get("profile", {}).get("1024 fused", {}).get("slowest", ()):
        print(f"  {ms:7.2f} ms {count:4d} x {kernel}", flush=True)
    results.note(f"cut off: {results.data['cut_off'] or 'nothing'}; {results.left():.0f} s left")


if __name__ == "__main__":
    main()
