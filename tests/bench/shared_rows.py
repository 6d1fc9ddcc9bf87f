"""What quantising once for Linears that read one tensor saves: GPU and host time of such groups, each for itself and shared.

    python tests/bench/shared_rows.py [--json FILE] [--seconds 120]

Groups are those of nodes/int8/shared_rows.py at the sizes of shapes.json, at 1024 px or 832x480x81; weights are random, input
is bf16. The two contestants are interleaved; the value is the median GPU time of a whole group, with its host time beside
it. Outputs must be equal bit for bit, else no times are given. Without a GPU small groups check that the script works.
"""

import argparse
import json
import statistics
import time

import torch
from machine import Timer, load_kernels

# model and group -> (rows, columns, outputs of each Linear)
GROUPS = {
    "ideogram4 w1 w3": (4608, 4608, (12288, 12288)),
    "z_image w1 w3": (4320, 3840, (10240, 10240)),
    "krea2 wq wk wv gate": (4352, 6144, (6144, 1536, 1536, 6144)),
    "krea2 gate up": (4352, 6144, (16384, 16384)),
    "qwen_image to_q to_k to_v": (4096, 3072, (3072, 3072, 3072)),
    "qwen_image add_q add_k add_v": (256, 3072, (3072, 3072, 3072)),
    "wan2.2 self q k v": (32760, 5120, (5120, 5120, 5120)),
    "wan2.2 cross k v": (512, 5120, (5120, 5120)),
}
SMALL = {"small q k v": (32, 256, (256, 64, 256))}
ROUNDS = 25


def group_of(kernels, k: int, outputs: tuple[int, ...], rotation: int, device: torch.device) -> list[tuple]:
    """(PreparedLinear, weight, scale) for each Linear of a group."""
    from native_int8.kernels.prepared_linear import PreparedLinear

    generator = torch.Generator(device).manual_seed(0)
    members = []
    for n in outputs:
        codes, scale = kernels.quantize_rows(torch.randn((n, k), device=device, generator=generator).bfloat16())
        members.append((PreparedLinear(codes, scale, rotation_group=rotation), codes, scale))
    return members


def each_for_itself(x: torch.Tensor, members: list[tuple]) -> list[torch.Tensor]:
    return [prepared(x, weight, scale) for prepared, weight, scale in members]


def shared(x: torch.Tensor, members: list[tuple]) -> list[torch.Tensor]:
    outputs, rows = [], None
    for prepared, weight, scale in members:
        y, rows = prepared.with_rows(x, weight, scale, rows=rows)
        outputs.append(y)
    return outputs


def host_us(call) -> float:
    """Median host microseconds of a call that the GPU has not to be waited for."""
    times = []
    for _ in range(ROUNDS):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    return statistics.median(times)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json")
    parser.add_argument("--seconds", type=float, default=120, help="groups that would begin later are left out")
    arguments = parser.parse_args()
    begin = time.perf_counter()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    kernels = load_kernels()
    timer = Timer() if device.type == "cuda" else None
    results = []
    print(f"{'group':30s} rotation   GPU us: own  shared  saved   host us: own  shared", flush=True)
    for name, (m, k, outputs) in (GROUPS if timer else SMALL).items():
        for rotation in (0, 256):
            if time.perf_counter() - begin > arguments.seconds:
                print(f"{name}: left out, no time left", flush=True)
                continue
            members = group_of(kernels, k, outputs, rotation, device)
            x = torch.randn((1, m, k), device=device).bfloat16()
            calls = {
                "own": lambda x=x, members=members: each_for_itself(x, members),
                "shared": lambda x=x, members=members: shared(x, members),
            }
            if not all(map(torch.equal, calls["own"](), calls["shared"]())):
                raise SystemExit(f"{name}: the outputs differ; no times are given")
            host = {way: host_us(call) for way, call in calls.items()}
            gpu = timer.medians_us(calls, ROUNDS) if timer else host
            saved = 1 - gpu["shared"] / gpu["own"]
            results.append(
                {"group": name, "rotation": rotation, "shape": [m, k, outputs], "gpu_us": gpu, "host_us": host}
            )
            print(
                f"{name:30s} {rotation:8d} {gpu['own']:13.1f} {gpu['shared']:7.1f} {saved:6.1%}"
                f" {host['own']:14.1f} {host['shared']:7.1f}",
                flush=True,
            )
    if arguments.json:
        gpu_name = torch.cuda.get_device_name(0) if timer else "CPU only"
        with open(arguments.json, "w") as file:
            json.dump({"device": gpu_name, "torch": torch.__version__, "groups": results}, file, indent=1)


if __name__ == "__main__":
    main()
