"""Every Triton kernel and tile once on shapes that end just before, on and after a block, for compute-sanitizer.

    python tests/bench/edge_shapes.py [--quick]

Tensors have exactly the size that the op needs, so that a read or write past the end leaves its allocation; run with
PYTORCH_NO_CUDA_MEMORY_CACHING=1, else the allocator's rounding hides that. Results are compared with exact ones as well.
"""

import argparse
import importlib
from dataclasses import replace

import torch
from exact import accumulate_fp64, first_difference, quantise_rows, rounded_once
from machine import load_kernels

QUICK_K_N = ((64, 16), (129, 65))
FULL_K_N = ((16, 8), (64, 16), (33, 7), (129, 65), (272, 72), (512, 257))
QUANTISE_K = (1, 15, 16, 127, 256, 768, 1000, 4608)
ROTATED = ((16, 16), (64, 192), (256, 768), (256, 4608), (1024, 5120))


class Suite:
    """Runs and counts; `wrong` holds what differed."""

    def __init__(self, kernels, quick: bool):
        self.kernels, self.quick = kernels, quick
        package = kernels.__name__
        self.tiles = importlib.import_module(f"{package}.tiles")
        self.matmul = importlib.import_module(f"{package}.int8_matmul_triton").int8_matmul_triton
        self.fused = importlib.import_module(f"{package}.int8_matmul_fused_triton")
        device = kernels.detect(torch.device("cuda", 0))
        self.sm, self.multiprocessors = self.tiles.sm_of(device), device.multiprocessors
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.runs, self.wrong = 0, []

    def expect(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.runs += 1
        difference = first_difference(got, expected)
        if difference:
            self.wrong.append(f"{what}: {difference}")

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device="cuda", generator=self.generator)

    def codes(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device="cuda", generator=self.generator)

    def operands(self, m: int, k: int, n: int, bias: bool) -> tuple:
        """q_x, x_scale, q_w, w_scale, bias of one problem, each in an allocation of its own."""
        scales = self.normal(m).abs() * 0.01, self.normal(n).abs() * 0.01
        return self.codes(m, k), scales[0], self.codes(n, k), scales[1], self.normal(n).bfloat16() if bias else None

    def rows_around(self, block: int) -> tuple[int, ...]:
        return (1, block + 1) if self.quick else (1, block - 1, block, block + 1)

    def matmuls(self) -> None:
        """Each tile of this architecture, as the table has it and, where it uses TMA, also with pointers.

        The tiles of large M also split along K: with fewer tiles than SMs, all of them are split.
        """
        split = {replace(tile, split_k=True) for tile in self.tiles.default_large_tiles(self.sm)}
        for tile in sorted(self.tiles.all_tiles(self.sm) | split, key=str):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N if self.quick else FULL_K_N:
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, n % 2 == 0)
                    y = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
                    self.matmul(q_x, x_scale, q_w, w_scale, bias, y, tile, self.sm, self.multiprocessors)
                    expected = rounded_once(accumulate_fp64, q_x, x_scale, q_w, w_scale, bias, torch.bfloat16)
                    self.expect(f"{tile.name} on {m}x{k}x{n}", y, expected)

    def fused_matmuls(self) -> None:
        """The fused epilogues with the tiles of large M: their writes and reads past the edges."""
        for tile in sorted(self.tiles.default_large_tiles(self.sm), key=str):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N:
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, True)
                    residual, gate = self.normal(m, n).bfloat16(), self.normal(1, n).bfloat16()
                    acc = accumulate_fp64(q_x, q_w).float() * x_scale[:, None] * w_scale + bias.float()
                    y = residual.clone()
                    self.fused.int8_matmul_residual_triton(q_x, x_scale, q_w, w_scale, bias, gate, y, y, tile)
                    expected = (acc * gate.float() + residual.float()).bfloat16()
                    self.expect(f"residual, {tile.name} on {m}x{k}x{n}", y, expected)
                    _, _, up_w, up_scale, up_bias = self.operands(m, k, n, True)
                    up = accumulate_fp64(q_x, up_w).float() * x_scale[:, None] * up_scale + up_bias.float()
                    self.fused.int8_matmul_swiglu_triton(
                        q_x, x_scale, q_w, w_scale, up_w, up_scale, bias, up_bias, y, tile, self.sm
                    )
                    # exp differs in the last bits, so a bf16 step is allowed
                    exact = torch.nn.functional.silu(acc) * up
                    near = ((y.float() - exact).abs() <= exact.abs() / 100 + 1e-6).all()
                    self.expect(f"swiglu, {tile.name} on {m}x{k}x{n}", near, torch.ones_like(near))

    def quantisers(self) -> None:
        """Row quantisation: every dtype and activation, every rotation group."""
        dtypes = (torch.bfloat16,) if self.quick else (torch.bfloat16, torch.float16, torch.float32)
        quantize_rows = self.kernels.quantize_rows
        for k in QUANTISE_K:
            for dtype in dtypes:
                x = self.normal(3, k).to(dtype)
                q, scale = quantize_rows(x, implementation="triton")
                q_exact, scale_exact = quantise_rows(x)
                self.expect(f"codes of {k} columns, {dtype}", q, q_exact)
                self.expect(f"row scales of {k} columns, {dtype}", scale, scale_exact)
                for act, width in (("gelu_tanh", k), ("swiglu", 2 * k)):
                    self._like_torch(self.normal(3, width).to(dtype), input_act=act)
        for group, k in ROTATED:
            self._like_torch(self.normal(3, k).bfloat16(), rotation_group=group)
            rotated = self.kernels.rotate(self.normal(3, k), group, implementation="triton")
            self.expect(f"rotate {group}", rotated.isfinite().all(), torch.ones_like(rotated.isfinite().all()))

    def _like_torch(self, x: torch.Tensor, **options) -> None:
        got, _ = self.kernels.quantize_rows(x, implementation="triton", **options)
        expected, _ = self.kernels.quantize_rows(x, implementation="torch", **options)
        near = ((got.short() - expected.short()).abs() <= 1).all()
        self.expect(f"codes of {tuple(x.shape)} {x.dtype} with {options}", near, torch.ones_like(near))


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes, for racecheck, which is slow")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("edge_shapes.py: no CUDA device. Needed: an NVIDIA GPU.")
    suite = Suite(load_kernels(), arguments.quick)
    suite.matmuls()
    suite.fused_matmuls()
    suite.quantisers()
    torch.cuda.synchronize()
    for text in suite.wrong[:20]:
        print(f"WRONG {text}")
    tiles = len(suite.tiles.all_tiles(suite.sm))
    print(f"edge shapes on sm_{suite.sm}: {suite.runs} comparisons over {tiles} tiles, {len(suite.wrong)} differences")
    return 1 if suite.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
