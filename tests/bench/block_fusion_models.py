"""Fused blocks on full-size classes with random weights: step time, launches, and where the time goes, model by model.

    COMFYUI_PATH=... python tests/bench/block_fusion_models.py [klein krea2 qwen wan z_image] [--json FILE] [--limit SECONDS] [--rounds N]

For each model "bf16" is the float MODEL, "host" its INT8 twin on comfy_kitchen's kernels, "linear" the twin with our Linears
only, "fused" with our blocks, "graph" those in a CUDA graph. Width, heads and tokens are those of the model; of its equal blocks fewer are built where
CASES says so, which the result names. First the passes around a LayerNorm are compared with PyTorch's own operations, bit
for bit. Contestants are interleaved; medians after warm-up. Results are printed and written as they come; what the time
limit cuts off is named. A further model is a line in CASES.
"""

import argparse
import gc
import importlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from block_fusion import differing, profiled
from ideogram4_forward import event_ms, forward
from lora import Results, median
from machine import Timer, load_comfy, load_kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIN_COSINE = 0.98


class Case(NamedTuple):
    """A model of the host.

    what: resolution and tokens. module, kind: its class. settings: arguments of the class. layers: argument that counts
    blocks -> (how many are built here, how many the model has). inputs: makes what apply_model is called with.
    """

    what: str
    module: str
    kind: str
    settings: dict
    layers: dict[str, tuple[int, int]]
    inputs: Callable[[], dict]


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed)).to(dtype)


def at_time(x: torch.Tensor, text: torch.Tensor, **more) -> dict:
    return {"x": x, "t": torch.tensor([0.7], device=DEVICE), "c_crossattn": text, **more}


CASES = {
    "klein": Case(
        "Flux.2 Klein 9B, 1024x1024: 4096 tokens, 512 text tokens",
        "comfy.ldm.flux.model",
        "Flux",
        {
            "hidden_size": 4096,
            "num_heads": 32,
            "mlp_ratio": 3.0,
            "axes_dim": [32, 32, 32, 32],
            "theta": 2000,
            "in_channels": 128,
            "out_channels": 128,
            "patch_size": 1,
            "context_in_dim": 12288,
            "vec_in_dim": None,
            "qkv_bias": False,
            "ops_bias": False,
            "mlp_silu_act": True,
            "global_modulation": True,
            "guidance_embed": False,
            "txt_ids_dims": [3],
        },
        {"depth": (8, 8), "depth_single_blocks": (24, 24)},
        lambda: at_time(normal(1, 128, 64, 64, seed=1), normal(1, 512, 12288, seed=2, dtype=torch.bfloat16)),
    ),
    "krea2": Case(
        "Krea 2, 1024x1024: 4096 tokens, 256 text tokens",
        "comfy.ldm.krea2.model",
        "SingleStreamDiT",
        {},
        {"layers": (14, 28)},
        lambda: at_time(normal(1, 16, 128, 128, seed=1), normal(1, 256, 12 * 2560, seed=2, dtype=torch.bfloat16)),
    ),
    "qwen": Case(
        "Qwen-Image, 1024x1024: 4096 tokens, 256 text tokens",
        "comfy.ldm.qwen_image.model",
        "QwenImageTransformer2DModel",
        {},
        {"num_layers": (20, 60)},
        lambda: at_time(normal(1, 16, 1, 128, 128, seed=1), normal(1, 256, 3584, seed=2, dtype=torch.bfloat16)),
    ),
    "wan": Case(
        "Wan 2.2 14B, text to video, 832x480, 81 frames: 32,760 tokens, 512 text tokens",
        "comfy.ldm.wan.model",
        "WanModel",
        {
            "dim": 5120,
            "ffn_dim": 13824,
            "num_heads": 40,
            "in_dim": 16,
            "out_dim": 16,
            "text_dim": 4096,
            "freq_dim": 256,
        },
        {"num_layers": (8, 40)},
        lambda: at_time(normal(1, 16, 21, 60, 104, seed=1), normal(1, 512, 4096, seed=2, dtype=torch.bfloat16)),
    ),
    "z_image": Case(
        "Z-Image, 1024x1024: 4096 tokens, 224 text tokens",
        "comfy.ldm.lumina.model",
        "NextDiT",
        {
            "dim": 3840,
            "n_heads": 30,
            "n_kv_heads": 30,
            "in_channels": 16,
            "cap_feat_dim": 2560,
            "qk_norm": True,
            "axes_dims": [32, 48, 48],
            "axes_lens": [1536, 512, 512],
            "rope_theta": 256.0,
            "ffn_dim_multiplier": 8 / 3,
            "z_image_modulation": True,
            "time_scale": 1000.0,
            "pad_tokens_multiple": 32,
        },
        {"n_layers": (30, 30)},
        lambda: at_time(
            normal(1, 16, 128, 128, seed=1), normal(1, 224, 2560, seed=2, dtype=torch.bfloat16), num_tokens=224
        ),
    ),
}


def random_state(case: Case) -> dict[str, torch.Tensor]:
    """Random bf16 weights under ComfyUI's names: matrices and filters ~ N(0, 1 / inputs), other vectors 1, biases 0."""
    kind = getattr(importlib.import_module(case.module), case.kind)
    with torch.device("meta"):
        built = {name: here for name, (here, _) in case.layers.items()}
        model = kind(**case.settings, **built, dtype=torch.bfloat16, operations=torch.nn)
    generator, state = torch.Generator(DEVICE).manual_seed(0), {}
    for name, value in model.state_dict().items():
        if value.dim() > 1:
            weight = torch.randn(value.shape, device=DEVICE, dtype=torch.bfloat16, generator=generator)
            state[name] = (weight * value[0].numel() ** -0.5).cpu()
        else:
            state[name] = torch.full(value.shape, float(not name.endswith("bias")), dtype=torch.bfloat16)
    return state


def passes_alone(results: Results) -> None:
    """What passes around a LayerNorm cost, in one and as separate operations, and how many values differ between them."""
    from native_int8.kernels import quantize_rows
    from native_int8.kernels.packed_rows import parts_of
    from native_int8.kernels.residual_norm import Branch, Norm, add_branch_torch, modulated_norm_torch, residual_norm

    table, differs = {}, {}
    for m, k in ((32760, 5120), (4352, 4096), (4096, 3072)):
        x, y = (normal(m, k, seed=seed, dtype=torch.bfloat16) + 0.25 for seed in (1, 2))
        shift, scale, gate = normal(3, 1, k, seed=3, dtype=torch.bfloat16) * 0.5
        weight, bias = normal(2, k, seed=4, dtype=torch.bfloat16)
        layer_norm = Norm(None, 1e-6, scale, shift, centred=True, one_rounding=True)
        affine = Norm(weight, 1e-6, None, bias=bias, centred=True)
        passes = {
            "LayerNorm": (None, layer_norm),
            "RMSNorm": (None, Norm(weight, 1e-6, scale, shift)),
            "gate, affine LayerNorm": (Branch(y, None, 0.0, gate, one_rounding=True), affine),
            "LayerNorm after a sum": (Branch(y, None, 0.0, None), layer_norm),
            "gate in two steps, LayerNorm": (Branch(y, None, 0.0, gate), layer_norm),
            "gate": (Branch(y, None, 0.0, gate, one_rounding=True), None),
        }
        calls = {}
        for name, (branch, norm) in passes.items():

            def eager(branch=branch, norm=norm, x=x):
                out = x if branch is None else add_branch_torch(x, branch)
                return out, None if norm is None else quantize_rows(modulated_norm_torch(out, norm))

            calls[name] = lambda branch=branch, norm=norm, x=x: residual_norm(x, branch, norm)
            calls[f"{name}, eager"] = eager
            got, expected = calls[name](), eager()
            found = [differing(got[0], expected[0])]
            if norm is not None:
                codes, factors = parts_of(got[1], m, k)
                found += [differing(codes, expected[1][0]), differing(factors, expected[1][1].view(-1))]
            differs[f"{m}x{k} {name}"] = found
        table[f"{m}x{k}"] = us = Timer().medians_us(calls, rounds=7)
        row = ", ".join(f"{name} {us[name]:.0f} ({us[f'{name}, eager']:.0f})" for name in passes)
        results.note(f"passes at {m}x{k}, us (separate operations): {row}", passes_us=table)
        del x, y, calls, passes, got, expected
    worst = {name: found for name, found in differs.items() if any(found)}
    results.note(f"passes: share of x, codes, scales that differ from PyTorch's: {worst or 'none'}", differs=differs)


def activations_alone(results: Results) -> None:
    """What activation and quantising cost in one pass and as separate operations, and how many values differ between them."""
    from native_int8.kernels import quantize_gelu, quantize_rows, quantize_swiglu
    from native_int8.kernels.packed_rows import parts_of
    from native_int8.kernels.quantize_activation import activated_torch

    table, differs = {}, {}
    # rows, columns that come before, columns of the activation, SwiGLU or GELU
    for m, before, k, gated in ((4608, 4096, 12288, True), (4608, 3072, 12288, False), (4096, 0, 12288, True),
                                (4096, 0, 12288, False), (32760, 0, 13824, False)):  # fmt: skip
        # as one Linear gives it: what attention reads, then the activation's input
        hidden = normal(m, 3 * before + (2 if gated else 1) * k, seed=1, dtype=torch.bfloat16)
        first = normal(m, before, seed=2, dtype=torch.bfloat16) if before else None
        gate, up = hidden[:, 3 * before :].chunk(2, -1) if gated else (hidden[:, 3 * before :], None)
        for group in (0, 256):

            def one(gate=gate, up=up, first=first, group=group):
                if up is None:
                    return quantize_gelu(gate, before=first, rotation_group=group)
                return quantize_swiglu(gate, up, before=first, rotation_group=group)

            def eager(gate=gate, up=up, first=first, group=group):
                v = activated_torch(gate, up)
                return quantize_rows(v if first is None else torch.cat((first, v), -1), rotation_group=group)

            name = f"{m}x{before}+{k} {'SwiGLU' if gated else 'GELU'} {group}"
            (codes, factors), expected = parts_of(one(), m, before + k), eager()
            differs[name] = [differing(codes, expected[0]), differing(factors, expected[1].view(-1))]
            table[name] = Timer().medians_us({"one pass": one, "eager": eager}, rounds=7)
    row = ", ".join(f"{name} {us['one pass']:.0f} ({us['eager']:.0f})" for name, us in table.items())
    results.note(f"activations, us (separate operations): {row}", activations_us=table)
    worst = {name: found for name, found in differs.items() if any(found)}
    results.note(
        f"activations: share of codes, scales that differ from PyTorch's: {worst or 'none'}", act_differs=differs
    )


def heads_alone(results: Results) -> None:
    """From q and k of two streams to the joint ones: our pass, and the host's norms, join and rotation."""
    from comfy.ldm.flux.math import apply_rope
    from native_int8.kernels import rms_rope
    from native_int8.nodes.int8.fusion.heads import _default_eps, _order

    table, differs = {}, {}
    # heads, dtype of the rotation matrices, eps or PyTorch's own
    for name, heads, dtype, eps in (("Flux.2", 32, torch.float32, None), ("Qwen-Image", 24, torch.bfloat16, 1e-6)):
        streams = [normal(1, m, 3, heads, 128, seed=m, dtype=torch.bfloat16).unbind(2)[:2] for m in (512, 4096)]
        weights = normal(4, 128, seed=1, dtype=torch.bfloat16)
        angle = torch.rand((1, 1, 4608, 64), device=DEVICE) * 6
        turns = torch.stack([angle.cos(), -angle.sin(), angle.sin(), angle.cos()], -1).unflatten(-1, (2, 2)).to(dtype)
        by_lane = _order(streams[0][0], turns, 4608)
        if by_lane is None:
            results.note(f"heads of {name}: the host's own way runs here")
            continue
        own_eps = _default_eps(torch.bfloat16, streams[0][0].device) if eps is None else eps
        order = {"split_half": False, "rotate_by_lane": by_lane}

        def ours(streams=streams, weights=weights, turns=turns, own_eps=own_eps, order=order):
            joint = [
                torch.empty((1, 4608, *streams[0][0].shape[2:]), device=DEVICE, dtype=torch.bfloat16) for _ in "qk"
            ]
            for i, part in enumerate((slice(0, 512), slice(512, 4608))):
                out, own = tuple(t[:, part] for t in joint), weights[2 * i : 2 * i + 2]
                rms_rope(*streams[i], turns[:, 0, part], *own, own_eps, **order, out=out)
            return [t.transpose(1, 2) for t in joint]

        def host(streams=streams, weights=weights, turns=turns, eps=eps):
            q, k = (
                torch.cat(
                    [
                        torch.nn.functional.rms_norm(stream[i].transpose(1, 2), (128,), weights[2 * at + i], eps)
                        for at, stream in enumerate(streams)
                    ],
                    2,
                )
                for i in (0, 1)
            )
            return apply_rope(q, k, turns)

        differs[name] = [differing(a, b) for a, b in zip(ours(), host(), strict=True)]
        table[name] = Timer().medians_us({"ours": ours, "host": host}, rounds=7)
    results.note(f"heads, us: {table}; share of q, k that differ from the host's: {differs}", heads_us=table)


def contestants_of(comfy, case: Case):
    """The MODELs, loaded, and a line about the INT8 ones."""
    from native_int8.nodes.int8 import host_backend, patcher, speeds

    options = {"dtype": torch.bfloat16}
    base = comfy.sd.load_diffusion_model_state_dict(random_state(case), model_options=options, disable_dynamic=True)
    fused, report = patcher.patch_model(base)
    linear, host, graph = fused.clone(), fused.clone(), fused.clone()
    host_backend.set_speed(linear, speeds.LINEAR_ONLY)
    host_backend.set_speed(host, speeds.OFF)
    host_backend.set_speed(graph, speeds.GRAPHED, lambda sentence: print(f"  {sentence}", flush=True))
    comfy.model_management.load_models_gpu([base, fused], force_full_load=True)
    dtypes = ", ".join(
        f"{name} in {model.model.get_dtype_inference()}" for name, model in (("bf16", base), ("INT8", fused))
    )
    contestants = {"bf16": base, "host": host, "linear": linear, "fused": fused, "graph": graph}
    return contestants, f"{report.summary()}; {dtypes}"


def checked(outputs: dict[str, torch.Tensor]) -> dict[str, float]:
    """Cosines between outputs; stops where rounding to INT8 does not explain them."""
    pairs = [
        ("fused", "linear"),
        ("graph", "fused"),
        ("linear", "host"),
        *((name, "bf16") for name in ("host", "linear", "fused")),
    ]
    cosine = {
        f"{a} / {b}": float(torch.nn.functional.cosine_similarity(outputs[a], outputs[b], dim=0)) for a, b in pairs
    }
    if not all(value > MIN_COSINE for value in cosine.values()):
        raise SystemExit(f"wrong result, no times are given: cosines {cosine}")
    return cosine


def measure(comfy, results: Results, name: str, case: Case, rounds: int) -> None:
    """Cosines, then interleaved times, then one profiled forward of each contestant."""
    from native_int8.nodes.int8 import host_backend

    contestants, line = contestants_of(comfy, case)
    layers = ", ".join(f"{here} of {full} {count}" for count, (here, full) in case.layers.items())
    found = results.data.setdefault("models", {}).setdefault(name, {"what": case.what, "layers": layers})
    results.note(f"{name}: {case.what}; {layers}; {line}; {results.left():.0f} s left")
    inputs = case.inputs()
    # a graph is recorded at the second call and replayed from the third on
    for _ in range(2):
        forward(comfy, contestants["graph"], inputs)
    outputs = {key: forward(comfy, model, inputs).float().flatten() for key, model in contestants.items()}
    found["cosine"] = checked(outputs)
    found["equal"] = bool(torch.equal(outputs["fused"], outputs["linear"]))
    cosines = ", ".join(f"{pair} {value:.6f}" for pair, value in found["cosine"].items())
    results.note(f"{name} cosine: {cosines}; fused equals linear bit for bit: {found['equal']}")
    del outputs
    times = {key: [] for key in contestants}
    for done in range(rounds + 1):
        if done > 3 and results.left() < 8:
            results.data["cut_off"].append(f"{name} after {done} rounds")
            break
        for key, model in contestants.items():
            times[key].append(event_ms(lambda m=model: forward(comfy, m, inputs)))
    ms = found["ms"] = {key: median(values[1:]) for key, values in times.items()}
    ratios = ", ".join(f"{key}/fused {ms[key] / ms['fused']:.3f}" for key in ms if key != "fused")
    results.note(f"{name} ms: " + ", ".join(f"{key} {value:.1f}" for key, value in ms.items()) + f"; {ratios}")
    record = host_backend.record_of(contestants["fused"])
    found["graphs"] = host_backend.record_of(contestants["graph"]).by_graph()
    found["calls"] = record.snapshot() | record.ways_taken() | record.rows_shared() | record.blocks_fused()
    results.note(f"{name} calls of fused: {found['calls']}")
    for key, model in contestants.items():
        if results.left() < 6:
            results.data["cut_off"].append(f"{name} profile of {key}")
            continue
        profile = found.setdefault("profile", {})[key] = profiled(comfy, model, inputs)
        results.note(f"{name} {key}: {profile['launches']} launches, ms {profile['ms']}")
    for kernel, (count, total) in found.get("profile", {}).get("fused", {}).get("slowest", ()):
        print(f"  {total:8.2f} ms {count:4d} x {kernel}", flush=True)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(CASES))
    parser.add_argument("--json")
    parser.add_argument("--limit", type=float, default=145)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps-only", action="store_true", help="leave out the passes alone")
    arguments = parser.parse_args()
    results = Results(arguments.json, arguments.limit)
    comfy = load_comfy()
    load_kernels()
    if not arguments.steps_only:
        passes_alone(results)
        activations_alone(results)
        heads_alone(results)
    for name in arguments.models or CASES:
        if results.left() < 20:
            results.data["cut_off"].append(name)
            continue
        measure(comfy, results, name, CASES[name], arguments.rounds)
        comfy.model_management.unload_all_models()
        gc.collect()
        torch.cuda.empty_cache()
    results.note(f"cut off: {results.data['cut_off'] or 'nothing'}; {results.left():.0f} s left")


if __name__ == "__main__":
    main()
