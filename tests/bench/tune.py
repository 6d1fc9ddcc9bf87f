"""Measure the fastest tiles for the shapes of models in shapes.json on this GPU: the tuner without ComfyUI.

    python tests/bench/tune.py --shapes ideogram4 [flux2_dev ...] [--pixels 768 1024] [--json FILE] [--list]

The file is what the node INT8 Tune Kernels writes: copied to ComfyUI's user folder as native_int8/<its name> it is used
from the next start. Without --json it is named after the card, here. Exit status 1: refused, or nothing was measured.
"""

import argparse
import sys
from pathlib import Path

import cases
from machine import describe, load_kernels


def work(models: list[str], pixels: list[int]) -> tuple[list[tuple[int, int]], list[int]]:
    """(N, K) of the models' Linears that see many rows, and the rows M they see at these sizes; each once, sorted."""
    everything = cases.shapes()
    shapes, rows = set(), set()
    for model in models:
        for layer in everything[model]:
            seen = {layer.get(f"M_{size}") for size in pixels} - {None, 1}
            if seen and layer["K"] >= 256 and layer["N"] >= 256:
                shapes.add((layer["N"], layer["K"]))
                rows |= seen
    return sorted(shapes), sorted(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", nargs="+", default=["ideogram4"], choices=sorted(cases.shapes()), metavar="MODEL")
    parser.add_argument("--pixels", nargs="+", type=int, default=[768, 1024], choices=[768, 1024])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--budget", type=float, default=300.0, help="seconds after which no further shape is started")
    parser.add_argument("--list", action="store_true", help="print the shapes and what would be tried, and stop")
    arguments = parser.parse_args()
    load_kernels()
    from native_int8.kernels import detect, tuned, tuning
    from native_int8.kernels.tile_search import worth_measuring

    shapes, rows = work(arguments.shapes, arguments.pixels)
    device = detect()
    if arguments.list:
        for m, n, k in tuning.cases_of(shapes, rows):
            print(f"{m}x{n}x{k}: {', '.join(tile.name for tile in worth_measuring(device, m, n, k))}")
        return 0
    reason = tuning.is_tunable(device)
    if reason is not None:
        print(f"Nothing was measured: {reason}", file=sys.stderr)
        return 1
    print(describe(), flush=True)
    try:
        result = tuning.tune(
            device,
            shapes,
            m_rows=rows,
            progress=lambda done, total, name: print(f"{done}/{total} {name}", file=sys.stderr, flush=True),
            budget_s=arguments.budget,
        )
    except tuning.ThrottledCard as error:
        print(f"Nothing was kept: {error}", file=sys.stderr)
        return 1
    path = arguments.json or Path(f"tiles-{tuned.slug(device)}.json")
    tuned.write(path, device, result)
    read = tuned.read(path, device)
    print(result.report())
    print(f"{len(read.entries)} entries in {path}" if read.ignored is None else read.ignored)
    return 0 if result.entries and read.ignored is None else 1


if __name__ == "__main__":
    sys.exit(main())
