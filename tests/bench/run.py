"""Every way to compute one Linear, side by side in one process, on the shapes of real models: correct first, then fast.

    python tests/bench/run.py --json results/NAME.json [--min-m 2048] [--models ideogram4,flux2_dev] [--budget-seconds 150]
    TRITON_OVERRIDE_ARCH=sm80 python tests/bench/run.py ...      the Ampere path, on any newer GPU

comfy_kitchen is compared when it is importable. A shape whose INT8 output differs from torch._int_mm, scaled and rounded
once, by a single bit gets no times and no speed-up, and the exit status is 1.
"""

import argparse
import datetime
import gc
import importlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from cases import IMAGE_COLUMNS, VIDEO_COLUMNS, Case, cases, planned_layers
from contestants import CONTESTANTS, KITCHEN_TRITON, Inputs, fp8_missing, quantise_fp8
from exact import accumulate_int_mm, codes_apart, first_difference, quantise_rows, relative_rms, rounded_once
from machine import Timer, commit, describe, geometric_mean, load_kernels

MIN_ROUNDS, MAX_ROUNDS = 5, 25
# INT8 with Gaussian data is about 1.3 % from bf16, fp8 about 3.7 %
MAX_RELATIVE_ERROR = 0.06
# plain codes equal the eager ones; a rotated row is summed in another order, which moves a few values over a rounding edge
MAX_ROTATED_SHARE = 0.02


def check(inputs: Inputs, kernels) -> list[str]:
    """What is wrong with our output for this shape; empty when all is right."""
    wrong = []
    q_x, x_scale = kernels.quantize_rows(inputs.x, implementation="triton")
    q_eager, scale_eager = quantise_rows(inputs.x)
    for what, got, expected in (("codes", q_x, q_eager), ("row scales", x_scale, scale_eager)):
        difference = first_difference(got, expected)
        if difference:
            wrong.append(f"{what}: {difference}")
    del q_eager, scale_eager
    weight, w_scale = inputs.plain
    expected = rounded_once(accumulate_int_mm, q_x, x_scale, weight, w_scale, inputs.bias, torch.bfloat16)
    y = kernels.int8_linear(inputs.x, weight, w_scale, inputs.bias, implementation="triton")
    difference = first_difference(y, expected)
    if difference:
        wrong.append(f"output: {difference}")
    if inputs.case.k % 256 == 0:
        wrong += _check_rotated(inputs, kernels)
    return wrong


def _check_rotated(inputs: Inputs, kernels) -> list[str]:
    """The same with ConvRot 256: codes near those of the rotation as a matrix product, output exact for our codes."""
    wrong = []
    q_x, x_scale = kernels.quantize_rows(inputs.x, rotation_group=256, implementation="triton")
    q_torch, _ = kernels.quantize_rows(inputs.x, rotation_group=256, implementation="torch")
    apart, share = codes_apart(q_x, q_torch)
    if apart > 1 or share > MAX_ROTATED_SHARE:
        wrong.append(f"rotated codes: {share:.2%} differ, by up to {apart}")
    weight, w_scale = inputs.rotated
    expected = rounded_once(accumulate_int_mm, q_x, x_scale, weight, w_scale, inputs.bias, torch.bfloat16)
    y = kernels.int8_linear(inputs.x, weight, w_scale, inputs.bias, rotation_group=256, implementation="triton")
    difference = first_difference(y, expected)
    if difference:
        wrong.append(f"rotated output: {difference}")
    return wrong


def prepare(inputs: Inputs, names: list[str], timer: Timer) -> tuple[dict, dict, dict]:
    """(calls, covers, left_out) of the contestants; each linear is compared with bf16 before it may be timed."""
    calls, covers, left_out = {}, {}, {}
    exact = torch.nn.functional.linear(inputs.x, inputs.w, inputs.bias)
    for name in names:
        kind, _, make = CONTESTANTS[name]
        try:
            call = make(inputs)
            out = call()
            if kind == "linear":
                error = relative_rms(out, exact)
                if not error <= MAX_RELATIVE_ERROR:
                    left_out[name] = f"wrong result: relative error {error:.3f} against bf16"
                    continue
            covers[name] = timer.warm_up(call)
            calls[name] = call
        except Exception as error:
            # any failure of another's code is a result of this bench
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"[:200]
    return calls, covers, left_out


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(len(values) * share), len(values) - 1)]


def measure(inputs: Inputs, names: list[str], timer: Timer, seconds: float) -> dict:
    """Times of one shape: as many interleaved rounds as fit `seconds`, at least MIN_ROUNDS."""
    calls, covers, left_out = prepare(inputs, names, timer)
    samples = {name: [] for name in calls}
    end = time.monotonic() + seconds
    while len(samples["bf16"]) < MIN_ROUNDS or (len(samples["bf16"]) < MAX_ROUNDS and time.monotonic() < end):
        timer.round_us(calls, covers, samples)
    us = {}
    for name, values in samples.items():
        gpu, host = [value for value, _ in values], [value for _, value in values]
        us[name] = [round(percentile(of, at), 2) for of, at in ((gpu, 0.5), (gpu, 0.2), (gpu, 0.8), (host, 0.5))]
    return {"us": us, "left_out": left_out, "rounds": len(samples["bf16"])}


def bf16_tflops(timer: Timer) -> float:
    """The card's health: a bf16 matmul of 8192 cubed. Throttled cards show here, before and after the run."""
    a = torch.randn((8192, 8192), device="cuda", dtype=torch.bfloat16)
    us = timer.medians_us({"bf16": lambda: a @ a.t()}, rounds=9)["bf16"]
    return round(2 * 8192**3 / us / 1e6, 1)


def tile_facts(case: Case, native) -> dict:
    """The tile that is picked for a shape, and its shared memory."""
    tiles = native.tiles
    device = native.capability.detect(torch.device("cuda", 0))
    tile, sm = tiles.pick(device, case.m, case.n, case.k), tiles.sm_of(device)
    return {"tile": tile.name, "shared_bytes": tile.shared_memory_bytes(sm)}


def compile_only(selected: list[Case], kernels) -> None:
    """Fill Triton's cache on disk with the kernels that these shapes need."""
    for case in selected:
        for rotation in (0, 256) if case.k % 256 == 0 else (0,):
            x = torch.zeros((case.m, case.k), device="cuda", dtype=torch.bfloat16)
            w = torch.zeros((case.n, case.k), device="cuda", dtype=torch.int8)
            scale = torch.ones((case.n, 1), device="cuda")
            bias = torch.zeros((case.n,), device="cuda", dtype=torch.bfloat16) if case.bias else None
            kernels.int8_linear(x, w, scale, bias, rotation_group=rotation, implementation="triton")
            # weights are quantised by the same kernels
            rows = torch.zeros((8, case.k), device="cuda", dtype=torch.bfloat16)
            kernels.quantize_rows(rows, rotation_group=rotation, implementation="triton")
        if not fp8_missing():
            quantise_fp8(rows)
    torch.cuda.synchronize()


def line_of(case: Case, row: dict) -> str:
    """One printed line: microseconds and ratios, or what is wrong."""
    if row["wrong"]:
        return f"{case.name:>22}  WRONG, not timed: {'; '.join(row['wrong'])}"
    us = {name: values[0] for name, values in row["us"].items()}
    ours = us.get("ours", float("nan"))
    pairs = "  ".join(
        f"{name} {us[name]:.0f} ({us[name] / ours:.2f}x)"
        for name in ("bf16", "kitchen_cuda", "fp8_dynamic")
        if name in us
    )
    rotated = f"  rot {us['ours_rot'] / ours:.3f}" if "ours_rot" in us else ""
    quantise = f"  copy/quantise {us['copy'] / us['ours_quantise']:.2f}" if "ours_quantise" in us else ""
    return f"{case.name:>22}  ours {ours:.0f} us  {pairs}{rotated}{quantise}  [{row['rounds']} rounds]"


def write(path: str | None, result: dict) -> None:
    """JSON with one shape a line, so that two runs can be compared with diff; replaced in one step."""
    if not path:
        return
    head = {key: value for key, value in result.items() if key != "cases"}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in result["cases"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "cases": [\n{lines}\n]\n}}\n'
    unfinished = Path(f"{path}.unfinished")
    unfinished.write_text(text)
    unfinished.replace(path)


def arguments_from(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the results here, after every shape")
    parser.add_argument("--path", default=os.environ.get("TRITON_OVERRIDE_ARCH", "native"), help="label of this run")
    parser.add_argument("--models", help="comma-separated names of shapes.json; default all")
    parser.add_argument("--min-m", type=int, default=256)
    parser.add_argument("--columns", choices=("images", "videos", "all"), default="images")
    parser.add_argument("--budget-seconds", type=float, default=150.0, help="for all shapes together")
    parser.add_argument("--contestants", help="comma-separated; default all")
    parser.add_argument(
        "--kitchen-triton", default="ideogram4",
        help="models for which comfy_kitchen's Triton backend runs: it tunes anew for every shape; empty for none",
    )  # fmt: skip
    parser.add_argument(
        "--compile-only", metavar="I/N", help="only compile the kernels of every N-th shape from the I-th"
    )
    parser.add_argument("--list", action="store_true", help="print the shapes and their layers; needs no GPU")
    return parser.parse_args(argv)


def select(arguments: argparse.Namespace) -> list[Case]:
    """The shapes that the arguments ask for, those of large M first, so that a run that is cut short has them."""
    columns = {"images": IMAGE_COLUMNS, "videos": VIDEO_COLUMNS, "all": IMAGE_COLUMNS + VIDEO_COLUMNS}[
        arguments.columns
    ]
    models = tuple(arguments.models.split(",")) if arguments.models else None
    load_kernels()
    planned = planned_layers(
        importlib.import_module("native_int8.nodes.int8.policy"),
        importlib.import_module("native_int8.nodes.int8.formats"),
    )
    chosen = cases(columns, models, arguments.min_m, planned)
    return sorted(chosen, key=lambda case: case.m < 2048)


def contestants_for(case: Case, arguments: argparse.Namespace) -> tuple[list[str], dict[str, str]]:
    """Names to run for this shape, and why the others do not."""
    names = arguments.contestants.split(",") if arguments.contestants else list(CONTESTANTS)
    if "bf16" not in names:
        names.insert(0, "bf16")
    tuned = set(filter(None, arguments.kitchen_triton.split(",")))
    if case.m >= 2048 and {use.model for use in case.uses} & tuned:
        return names, {}
    skipped = {name: "it tunes for every shape; see --kitchen-triton" for name in names if name in KITCHEN_TRITON}
    return [name for name in names if name not in skipped], skipped


@torch.inference_mode()
def main() -> int:
    arguments = arguments_from()
    selected = select(arguments)
    if arguments.list:
        for case in selected:
            print(f"{case.name:>22}  {'INT8 ' if case.planned else 'float'}  {', '.join(case.users())}")
        print(f"{len(selected)} shapes, {sum(case.m >= 2048 for case in selected)} of M >= 2048")
        return 0
    if not torch.cuda.is_available():
        raise SystemExit("run.py: no CUDA device. Needed: an NVIDIA GPU. --list works without one.")
    kernels = load_kernels()
    if arguments.compile_only:
        part, parts = map(int, arguments.compile_only.split("/"))
        compile_only(selected[part::parts], kernels)
        return 0
    begin = time.monotonic()
    timer = Timer()
    result = {
        "machine": describe(),
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
        "path": arguments.path,
        "settings": {"l2_flush": True, "max_rounds": MAX_ROUNDS, "budget_seconds": arguments.budget_seconds},
        "columns_of_us": ["median_us", "p20_us", "p80_us", "host_median_us"],
        "contestants": {name: text for name, (_, text, _) in CONTESTANTS.items()},
        "bf16_tflops": [bf16_tflops(timer)],
        "cases": [],
    }
    # the wish of each shape: setup, check and the rounds
    wishes = [0.25 + case.flops / 2e13 for case in selected]
    for index, case in enumerate(selected):
        left = arguments.budget_seconds - (time.monotonic() - begin)
        share = left * wishes[index] / sum(wishes[index:])
        started = time.monotonic()
        inputs = Inputs(case, kernels)
        row = {"m": case.m, "k": case.k, "n": case.n, "bias": case.bias, "planned": case.planned, "users": case.users()}
        row |= tile_facts(case, sys.modules["native_int8.kernels"])
        row["wrong"] = check(inputs, kernels)
        if not row["wrong"]:
            names, skipped = contestants_for(case, arguments)
            row |= measure(inputs, names, timer, share - (time.monotonic() - started))
            row["left_out"] |= skipped
        result["cases"].append(row)
        print(line_of(case, row), flush=True)
        write(arguments.json, result)
        del inputs
        if torch.cuda.memory_reserved() > torch.cuda.get_device_properties(0).total_memory // 2:
            gc.collect()
            torch.cuda.empty_cache()
    result["bf16_tflops"].append(bf16_tflops(timer))
    write(arguments.json, result)
    return report(result, time.monotonic() - begin)


def report(result: dict, seconds: float) -> int:
    """Print the closing lines; 1 when a shape was wrong."""
    rows = [row for row in result["cases"] if not row["wrong"]]
    wrong = len(result["cases"]) - len(rows)
    for text, chosen in (("all", rows), ("M >= 2048", [row for row in rows if row["m"] >= 2048])):
        for name in ("bf16", "kitchen_cuda"):
            ratios = [row["us"][name][0] / row["us"]["ours"][0] for row in chosen if {name, "ours"} <= row["us"].keys()]
            if ratios:
                print(f"{result['path']}, {text}: {name} / ours {geometric_mean(ratios):.3f} over {len(ratios)} shapes")
    print(
        f"{len(rows)} shapes right, {wrong} wrong; bf16 TFLOPS before and after {result['bf16_tflops']}; {seconds:.0f} s"
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
