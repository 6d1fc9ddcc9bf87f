"""Host (CPU) time per Linear: F.linear, the general way through ComfyUI, the short way, and what its parts cost.

    COMFYUI_PATH=... python tests/bench/host_time.py [--json FILE]

On a GPU the Linears are [3072, 4608] with 16 rows of bf16, so the GPU keeps up, and calls are timed without waiting
for it: what is measured is how long Python and the drivers take to enqueue one. Without a GPU the same calls run on the
CPU with small weights, arithmetic included: good for checking that the script works and for the differences between
the ways, which are host time only. Contestants are interleaved; the value is the median of 30 rounds of 100 calls.
"""

import argparse
import contextlib
import json
import statistics
import time

import torch
from machine import load_comfy, load_kernels

ROUNDS, CALLS, LAYERS = 30, 100, 170
ROTATION = 256


def int8_linear_of(comfy, n: int, k: int, device: torch.device):
    """A Linear of the host with a rotated INT8 weight [n, k] and a bf16 bias, on `device`."""
    from native_int8.kernels import quantize_rows

    generator = torch.Generator(device).manual_seed(0)
    weight = torch.randn((n, k), device=device, generator=generator) / k**0.5
    codes, scale = quantize_rows(weight, rotation_group=ROTATION)
    marker = f'{{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": {ROTATION}}}'
    layer = comfy.ops.mixed_precision_ops({}, torch.bfloat16).Linear(k, n, device=device)
    layer.load_state_dict(
        {
            "weight": codes,
            "weight_scale": scale,
            "bias": torch.zeros(n, dtype=torch.bfloat16, device=device),
            "comfy_quant": torch.tensor(list(marker.encode()), dtype=torch.uint8),
        }
    )
    return layer.to(device)


def medians_us(contestants: dict, device: torch.device) -> dict[str, float]:
    """Median microseconds per call of each contestant: name -> (context to enter for its rounds, call)."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for round_number in range(ROUNDS + 3):
        for name, (context, call) in contestants.items():
            with context():
                if device.type == "cuda":
                    torch.cuda.synchronize()
                start = time.perf_counter()
                for _ in range(CALLS):
                    call()
                spent = time.perf_counter() - start
            if round_number >= 3:
                times[name].append(spent / CALLS * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


@contextlib.contextmanager
def attribute(module, name: str, value):
    """An instance attribute that hides a method, written as short_way.py writes its own."""
    vars(module)[name] = value
    try:
        yield
    finally:
        del vars(module)[name]


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu":
        torch.set_num_threads(1)
    comfy = load_comfy()
    load_kernels()
    from comfy_kitchen.registry import registry
    from native_int8.kernels import PreparedLinear, int8_linear
    from native_int8.nodes.int8 import host_backend, short_way

    host_backend.register()
    n, k, m = (4608, 3072, 16) if device.type == "cuda" else (256, 256, 8)
    layer = int8_linear_of(comfy, n, k, device)
    fetched = int8_linear_of(comfy, n, k, device)
    fetched.comfy_force_cast_weights = True
    x = torch.randn((1, m, k), device=device).bfloat16()
    weight = torch.randn((n, k), device=device).bfloat16()
    codes, scale, bias = layer.weight._qdata, layer.weight._params.scale, layer.bias
    prepared = PreparedLinear(codes, scale, rotation_group=ROTATION)
    many = torch.nn.ModuleList([int8_linear_of(comfy, 256, 256, torch.device("cpu")) for _ in range(LAYERS)])

    def switched_on_and_off():
        with short_way.inside(many, lambda run: None):
            pass

    runs: list[short_way.Run] = []
    use = lambda: registry.use_backend(host_backend.NAME)  # noqa: E731
    use_host = contextlib.nullcontext

    @contextlib.contextmanager
    def short(model):
        with registry.use_backend(host_backend.NAME), short_way.inside(model, runs.append):
            yield

    y = torch.empty((1, m, n), dtype=torch.bfloat16, device=device)
    contestants = {
        "F.linear, bf16": (use_host, lambda: torch.nn.functional.linear(x, weight, bias)),
        "host's own INT8": (use_host, lambda: layer(x)),
        "general way": (use, lambda: layer(x)),
        "short way, weight fetched by the host": (lambda: short(fetched), lambda: fetched(x)),
        "short way, weight resident": (lambda: short(layer), lambda: layer(x)),
        "kernels.int8_linear": (use_host, lambda: int8_linear(x, codes, scale, bias, rotation_group=ROTATION)),
        "kernels.PreparedLinear": (use_host, lambda: prepared(x, codes, scale, bias)),
        "part: the host's forward above our seat": (
            lambda: attribute(layer, short_way.UPPER, lambda *args, **kwargs: y), lambda: layer(x)),
        "part: the same with a replaced forward": (
            lambda: attribute(layer, "forward", lambda *args, **kwargs: y), lambda: layer(x)),
        f"part: seats of {LAYERS} Linears set and deleted, per Linear": (use_host, switched_on_and_off),
    }  # fmt: skip
    with use():
        expected = layer(x)
    for way, model in (("resident", layer), ("fetched", fetched)):
        with short(model):
            got = model(x)
        if not torch.equal(got, expected) or runs[-1].ways != {way: 1}:
            raise SystemExit(f"{way}: wrong result or another way ({dict(runs[-1].ways)}); no times are given")
    result = medians_us(contestants, device)
    seats = next(name for name in result if "set and deleted" in name)
    result[seats] /= LAYERS
    plain = result["F.linear, bf16"]
    for name, us in result.items():
        beyond = "" if name.startswith("part") else f"   {us - plain:+8.1f} beyond F.linear"
        print(f"{name:58s} {us:8.2f} us{beyond}")
    where = torch.cuda.get_device_name(0) if device.type == "cuda" else "CPU only"
    over = result["short way, weight resident"] - plain
    print(f"{where}, [{n}, {k}], {m} rows: the short way takes {over:.1f} us beyond F.linear (bar: 60 on a GPU)")
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"device": where, "torch": torch.__version__, "shape": [m, k, n], "us": result}, file, indent=1)


if __name__ == "__main__":
    main()
