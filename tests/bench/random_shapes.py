"""Random shapes, strides and offsets through every Triton kernel, compared bit for bit with an exact computation.

    python tests/bench/random_shapes.py [--shapes 2000] [--seed 0] [--workers 12] [--seconds 200] [--json FILE]

M is 0 to 9000, K and N 1 to 4096, half of them no multiple of 16. x, the codes and y are views into larger buffers
with row strides and offsets of their own; what lies around a view must stay as it was. Compared are the int32 sums
(fp64 products, exact), the finished output (scaled in fp32, rounded once), and the codes and scales of the row
quantisation. Compiling takes most of the time, so the shapes are shared out among worker processes.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass

import torch
from exact import accumulate_fp64, codes_apart, first_difference, quantise_rows, rounded_once

# (dtype of x and y, dtype of the bias, one scale per weight row): all three dtypes, with few combinations to compile
KINDS = (
    (torch.bfloat16, torch.bfloat16, True),
    (torch.float16, None, True),
    (torch.float32, torch.float32, False),
)
EXACT_FP32 = 1 << 24


@dataclass(frozen=True)
class Limits:
    """Largest M, K and N."""

    m: int = 9000
    k: int = 4096
    n: int = 4096


@dataclass(frozen=True)
class Shape:
    """One random problem. pad and offset are elements: views start at `offset` and rows are `pad` apart, 0 for contiguous.

    kind: index into KINDS. group: rotation group, 0 for none. extreme: codes are -128 and 127 only.
    """

    index: int
    m: int
    k: int
    n: int
    pad: int
    offset: int
    kind: int
    group: int
    extreme: bool

    def text(self) -> str:
        """For messages: everything that is needed to run it again."""
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


def random_shape(seed: int, index: int, limits: Limits) -> Shape:
    """Shape number `index` of a seed; independent of the others, so any one can be run alone."""
    rng = random.Random(f"{seed}/{index}")

    def size(largest: int) -> int:
        value = rng.randint(1, largest) if rng.random() < 0.7 else rng.randint(1, min(largest, 200))
        return value if rng.random() < 0.5 else max(16, value // 16 * 16)

    m = 0 if rng.random() < 0.01 else rng.choice((1, rng.randint(1, min(64, limits.m)), rng.randint(1, limits.m)))
    k, n = size(limits.k), size(limits.n)
    # aligned views keep the addresses of the fast path, the others break every alignment at once
    pad, offset = rng.choice(((0, 0), (16, 32), (rng.choice((1, 3, 7)), rng.choice((1, 5, 9)))))
    groups = [group for group in (16, 64, 256) if k % group == 0]
    group = rng.choice(groups) if groups and rng.random() < 0.3 else 0
    return Shape(index, m, k, n, pad, offset, rng.randrange(len(KINDS)), group, rng.random() < 0.1)


def strided(
    rows: int, columns: int, shape: Shape, dtype: torch.dtype, device, fill
) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer, view [rows, columns] into it), the buffer full of `fill`."""
    stride = columns + shape.pad
    buffer = torch.full((shape.offset + max(rows, 1) * stride + 64,), fill, dtype=dtype, device=device)
    return buffer, buffer.as_strided((rows, columns), (stride, 1), shape.offset)


def difference_in(buffer: torch.Tensor, view: torch.Tensor, fill, expected: torch.Tensor) -> str | None:
    """None when the view equals `expected` and nothing around it was written."""
    whole = torch.full_like(buffer, fill)
    whole.as_strided(view.shape, view.stride(), view.storage_offset()).copy_(expected)
    return first_difference(buffer, whole)


def codes(rows: int, columns: int, shape: Shape, device, generator: torch.Generator) -> torch.Tensor:
    """Random int8 codes in a strided view; -128 and 127 only when the shape is extreme."""
    _, view = strided(rows, columns, shape, torch.int8, device, 77)
    if shape.extreme:
        signs = torch.randint(0, 2, (rows, columns), device=device, generator=generator)
        return view.copy_((signs * 255 - 128).to(torch.int8))
    return view.copy_(torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=device, generator=generator))


class Checker:
    """Runs one shape through the kernels. `count` says how many comparisons of each sort were made."""

    def __init__(self, kernels, device: torch.device, interpreted: bool = False):
        from importlib import import_module

        package = kernels.__name__
        self.kernels, self.device, self.interpreted = kernels, device, interpreted
        self.tiles = import_module(f"{package}.tiles")
        self.matmul = import_module(f"{package}.int8_matmul_triton").int8_matmul_triton
        self.quantise = import_module(f"{package}.quantize_rows_triton").quantize_rows_triton
        self.count: Counter[str] = Counter()

    def check(self, shape: Shape, seed: int) -> list[str]:
        """What differs for this shape; empty when nothing does."""
        generator = torch.Generator(self.device).manual_seed(seed * 1_000_003 + shape.index)
        dtype, bias_dtype, rows = KINDS[shape.kind]
        if self.interpreted and dtype is torch.bfloat16:
            # Triton's interpreter truncates to bf16 instead of rounding
            dtype = bias_dtype = torch.float16
        if shape.m == 0:
            return self._empty(shape, dtype)
        bias = None if bias_dtype is None else self._normal((shape.n,), generator).to(bias_dtype)
        w_scale = self._normal((shape.n if rows else 1,), generator).abs() * 0.01 + 1e-3
        return self._matmul(shape, dtype, bias, w_scale, generator) + self._linear(
            shape, dtype, bias, w_scale, generator
        )

    def _normal(self, size: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return torch.randn(size, device=self.device, generator=generator)

    def _empty(self, shape: Shape, dtype: torch.dtype) -> list[str]:
        x = torch.empty((0, shape.k), dtype=dtype, device=self.device)
        weight = torch.zeros((shape.n, shape.k), dtype=torch.int8, device=self.device)
        y = self.kernels.int8_linear(x, weight, torch.ones(1, device=self.device), implementation="triton")
        self.count["no rows"] += 1
        return [] if y.shape == (0, shape.n) and y.dtype == dtype else [f"no rows: got {y.dtype} {tuple(y.shape)}"]

    def _matmul(self, shape: Shape, dtype, bias, w_scale, generator) -> list[str]:
        """int8_matmul on strided codes into a strided y: the bare int32 sums, then the finished output."""
        q_x = codes(shape.m, shape.k, shape, self.device, generator)
        q_w = codes(shape.n, shape.k, shape, self.device, generator)
        x_scale = self._normal((shape.m,), generator).abs() * 0.02 + 1e-3
        facts = self.kernels.detect(self.device)
        tile, sm = self.tiles.pick(facts, shape.m, shape.n, shape.k), self.tiles.sm_of(facts)
        acc = accumulate_fp64(q_x, q_w)
        found = []
        one = torch.ones((max(shape.m, shape.n),), device=self.device)
        buffer, y = strided(shape.m, shape.n, shape, torch.float32, self.device, -7.0)
        self.matmul(q_x, one[: shape.m], q_w, one[: w_scale.numel()], None, y, tile, sm, facts.multiprocessors)
        # larger sums are compared as rounded to fp32, which both sides do alike
        fits = int(acc.abs().max()) < EXACT_FP32
        self.count["int32 sums" if fits else "int32 sums, rounded to fp32"] += 1
        found.append(("int32 sums", difference_in(buffer, y, -7.0, acc.float())))
        expected = rounded_once(lambda *_: acc, q_x, x_scale, q_w, w_scale, bias, dtype)
        buffer, y = strided(shape.m, shape.n, shape, dtype, self.device, -7.0)
        self.matmul(q_x, x_scale, q_w, w_scale, bias, y, tile, sm, facts.multiprocessors)
        self.count["outputs"] += 1
        found.append((f"output with {tile.name}", difference_in(buffer, y, -7.0, expected)))
        return [f"{what}: {text}" for what, text in found if text]

    def _linear(self, shape: Shape, dtype, bias, w_scale, generator) -> list[str]:
        """quantize_rows from a strided x into strided codes; then int8_linear, rotated when the shape says so."""
        _, x = strided(shape.m, shape.k, shape, dtype, self.device, float("nan"))
        x.copy_(self._normal((shape.m, shape.k), generator) * 3)
        found = []
        q_expected, scale_expected = quantise_rows(x)
        buffer, q = strided(shape.m, shape.k, shape, torch.int8, self.device, 77)
        scale = torch.full((shape.m,), -7.0, device=self.device)
        self.quantise(x, q, scale, 0, None)
        self.count["codes"] += 1
        found.append(("codes", difference_in(buffer, q, 77, q_expected)))
        found.append(("row scales", first_difference(scale, scale_expected.squeeze(1))))
        q_x, x_scale = q_expected, scale_expected
        if shape.group:
            options = {"rotation_group": shape.group}
            q_x, x_scale = self.kernels.quantize_rows(x, implementation="triton", **options)
            q_torch, _ = self.kernels.quantize_rows(x, implementation="torch", **options)
            # summed in another order: single codes may fall on the other side of a half
            apart, share = codes_apart(q_x, q_torch)
            self.count["rotated codes"] += 1
            if apart > 1 or share > 0.02 + 2 / q_x.numel():
                found.append((f"rotated by {shape.group}", f"{share:.2%} of the codes differ, by up to {apart}"))
        weight = codes(shape.n, shape.k, shape, self.device, generator)
        expected = rounded_once(accumulate_fp64, q_x, x_scale, weight, w_scale, bias, dtype)
        y = self.kernels.int8_linear(x, weight, w_scale, bias, rotation_group=shape.group, implementation="triton")
        self.count["linears"] += 1
        found.append(("linear", first_difference(y, expected)))
        return [f"{what}: {text}" for what, text in found if text]


def run_part(arguments: argparse.Namespace, kernels, part: int, parts: int) -> dict:
    """Check every parts-th shape from number `part` on, until the time is over."""
    checker = Checker(kernels, torch.device("cuda", 0))
    limits = Limits(arguments.max_m, arguments.max_k, arguments.max_n)
    end = time.monotonic() + arguments.seconds
    wrong, done = [], 0
    for index in range(part, arguments.shapes, parts):
        if time.monotonic() > end:
            break
        shape = random_shape(arguments.seed, index, limits)
        try:
            differences = checker.check(shape, arguments.seed)
        except Exception as error:
            # a kernel that fails is a result too; a broken CUDA context ends this worker at the next shape
            differences = [f"{type(error).__name__}: {error}"[:300]]
        done += 1
        wrong += [f"{shape.text()}: {text}" for text in differences]
        if len(wrong) > 20:
            break
    return {"done": done, "wrong": wrong, "comparisons": dict(checker.count)}


def arguments_from(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shapes", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=200.0)
    parser.add_argument("--max-m", type=int, default=9000)
    parser.add_argument("--max-k", type=int, default=4096)
    parser.add_argument("--max-n", type=int, default=4096)
    parser.add_argument("--json")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main() -> int:
    arguments = arguments_from()
    if not torch.cuda.is_available():
        raise SystemExit("random_shapes.py: no CUDA device. Without one, run tests/kernels/test_random_shapes.py.")
    if arguments.part:
        from machine import load_kernels

        with torch.inference_mode():
            print(json.dumps(run_part(arguments, load_kernels(), *map(int, arguments.part.split("/")))))
        return 0
    command = [sys.executable, __file__, *sys.argv[1:]]
    workers = [
        subprocess.Popen([*command, "--part", f"{i}/{arguments.workers}"], stdout=subprocess.PIPE, text=True)
        for i in range(arguments.workers)
    ]
    done, wrong, comparisons = 0, [], Counter()
    for number, worker in enumerate(workers):
        out = worker.communicate()[0].strip()
        if worker.returncode:
            wrong.append(f"worker {number} ended with status {worker.returncode}")
            continue
        part = json.loads(out.splitlines()[-1])
        done, wrong = done + part["done"], wrong + part["wrong"]
        comparisons.update(part["comparisons"])
    from machine import commit, describe

    result = {
        "machine": describe(), "commit": commit(), "seed": arguments.seed, "asked": arguments.shapes, "done": done,
        "limits": [arguments.max_m, arguments.max_k, arguments.max_n], "comparisons": dict(comparisons), "wrong": wrong,
    }  # fmt: skip
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(result, file, indent=1)
    for text in wrong[:20]:
        print(f"WRONG {text}")
    counts = ", ".join(f"{count} {what}" for what, count in sorted(comparisons.items()))
    print(
        f"{done} of {arguments.shapes} random shapes (seed {arguments.seed}): {len(wrong)} differences; compared: {counts}"
    )
    return 1 if wrong or done < arguments.shapes else 0


if __name__ == "__main__":
    raise SystemExit(main())
