"""Does the node INT8 Benchmark measure what this folder measures? Ideogram 4 with random weights at 1024 px, on one GPU.

    COMFYUI_PATH=... python tests/bench/node_agreement.py [--bound 0.05]

Prints the node's table, then for each shape its microseconds beside those of machine.Timer and contestants.py. Ends with 1
when a Linear of the MODEL differs by more than the bound.
"""

import argparse

import torch
from cases import Case
from contestants import CONTESTANTS, ROTATION, Inputs
from ideogram4_forward import TEXT_TOKENS, random_state
from machine import Timer, load_comfy, load_kernels

NODE_FIELDS = {"bf16": "float_us", "ours": "int8_us", "ours_rot": "int8_us"}


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bound", type=float, default=0.05)
    bound = parser.parse_args().bound
    comfy, kernels = load_comfy(), load_kernels()
    from native_int8.nodes.int8 import benchmark

    model = comfy.sd.load_diffusion_model_state_dict(random_state(comfy), disable_dynamic=True)
    result = benchmark.benchmark(model, [(1024, 1024, 1)], text_tokens=TEXT_TOKENS, progress=lambda part: None)
    print(result.table(), flush=True)
    timer, worst = Timer(), 0.0
    print(f"\n{'M x N x K':>20} {'call':>9} {'node us':>9} {'bench us':>9} {'differs':>8}")
    for time, _ in result.sizes[0].shapes:
        shape = time.shape
        inputs = Inputs(Case(shape.m, shape.k, shape.n, shape.bias, ()), kernels)
        names = ("bf16", "ours_rot" if shape.rotation_group == ROTATION else "ours")
        bench_us = timer.medians_us({name: CONTESTANTS[name][2](inputs) for name in names})
        for name, us in bench_us.items():
            node_us = getattr(time, NODE_FIELDS[name])
            differs = node_us / us - 1
            worst = max(worst, abs(differs))
            print(f"{shape.name:>20} {name:>9} {node_us:>9.1f} {us:>9.1f} {differs:>8.1%}", flush=True)
    print(f"largest difference {worst:.1%}, bound {bound:.0%}")
    raise SystemExit(worst > bound)


if __name__ == "__main__":
    main()
