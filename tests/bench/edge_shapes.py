"""Every Triton kernel and tile once on shapes that end just before, on and after a block, for compute-sanitizer.

    python tests/bench/edge_shapes.py [--quick] [--only NAME ...]

Without a GPU, TRITON_INTERPRET=1 runs it in Triton's interpreter with two small tiles, which shows that the suite is right.
Tensors have exactly the size that the op needs, so that a read or write past the end leaves its allocation; run with
PYTORCH_NO_CUDA_MEMORY_CACHING=1, else the allocator's rounding hides that. Results are compared with exact ones as well.
"""

import argparse
import importlib
import time
from dataclasses import replace

import torch
from exact import accumulate_fp64, first_difference, quantise_rows, rounded_once
from machine import load_kernels

QUICK_K_N = ((64, 16), (129, 65))
FULL_K_N = ((16, 8), (64, 16), (33, 7), (129, 65), (272, 72), (512, 257))
QUANTISE_K = (1, 15, 16, 127, 256, 768, 1000, 4608)
ROTATED = ((16, 16), (64, 192), (256, 256), (256, 768), (256, 4608), (1024, 5120))
# K and rotation group of what is done row by row: one column, a row in one block, in one and a half, and rotated
ROW_WIDTHS = ((1, 0), (33, 0), (127, 0), (320, 64), (1280, 256), (4608, 0))
# rows, images: one row, and rows that no block divides
IMAGES = ((1, 1), (7, 1), (6, 3))
# B, L, heads of q and of k, D
HEADS = ((1, 3, 18, 18, 256), (1, 1, 1, 1, 4), (2, 5, 24, 24, 128), (2, 2, 5, 2, 96))
RANKS = (32, 96)
EPS = 1e-5


class Suite:
    """Runs and counts; `wrong` holds what differed."""

    def __init__(self, kernels, quick: bool, device: torch.device):
        self.kernels, self.quick, self.device = kernels, quick, device
        self.tiles = self._module("tiles")
        self.matmul = self._module("int8_matmul_triton").int8_matmul_triton
        self.fused = self._module("int8_matmul_fused_triton")
        found = kernels.detect(device)
        self.sm, self.multiprocessors = self.tiles.sm_of(found), found.multiprocessors
        # the interpreter truncates to bfloat16
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float16
        self.generator = torch.Generator(device.type).manual_seed(0)
        self.runs, self.wrong = 0, []

    def _module(self, name: str):
        return importlib.import_module(f"{self.kernels.__name__}.{name}")

    def _some(self, items: tuple, quick: bool = False) -> tuple:
        """All of them, or every other one when quick; in the interpreter two that are cheap and odd."""
        if self.device.type == "cpu":
            return items[1::2][:2]
        return items[::2] if quick else items

    def _tiles(self, tiles) -> list:
        """In a fixed order; two small ones where a tile of 128 x 128 would take seconds."""
        if self.device.type == "cuda":
            return sorted(tiles, key=str)
        return [self.tiles.Tile(16, 32, 32, 4, 2, 2), self.tiles.Tile(32, 32, 64, 4, 2, 2, split_k=True)]

    def expect(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        self.runs += 1
        difference = first_difference(got, expected)
        if difference:
            self.wrong.append(f"{what}: {difference}")

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(size, device=self.device, generator=self.generator)

    def codes(self, rows: int, columns: int) -> torch.Tensor:
        return torch.randint(-128, 128, (rows, columns), dtype=torch.int8, device=self.device, generator=self.generator)

    def operands(self, m: int, k: int, n: int, bias: bool) -> tuple:
        """q_x, x_scale, q_w, w_scale, bias of one problem, each in an allocation of its own."""
        scales = self.normal(m).abs() * 0.01, self.normal(n).abs() * 0.01
        return self.codes(m, k), scales[0], self.codes(n, k), scales[1], self.normal(n).to(self.dtype) if bias else None

    def rows_around(self, block: int) -> tuple[int, ...]:
        return (1, block + 1) if self.quick else (1, block - 1, block, block + 1)

    def matmuls(self) -> None:
        """Each tile of this architecture, as the table has it and, where it uses TMA, also with pointers.

        The tiles of large M also split along K: with fewer tiles than SMs, all of them are split.
        """
        split = {replace(tile, split_k=True) for tile in self.tiles.default_large_tiles(self.sm)}
        for tile in self._tiles(self.tiles.all_tiles(self.sm) | split):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N if self.quick else FULL_K_N:
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, n % 2 == 0)
                    y = torch.empty((m, n), dtype=self.dtype, device=self.device)
                    self.matmul(q_x, x_scale, q_w, w_scale, bias, y, tile, self.sm, self.multiprocessors)
                    expected = rounded_once(accumulate_fp64, q_x, x_scale, q_w, w_scale, bias, self.dtype)
                    self.expect(f"{tile.name} on {m}x{k}x{n}", y, expected)

    def fused_matmuls(self) -> None:
        """The fused epilogues with the tiles of large M: their writes and reads past the edges."""
        for tile in self._tiles(self.tiles.default_large_tiles(self.sm)):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N:
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, True)
                    residual, gate = self.normal(m, n).to(self.dtype), self.normal(1, n).to(self.dtype)
                    acc = accumulate_fp64(q_x, q_w).float() * x_scale[:, None] * w_scale + bias.float()
                    y = residual.clone()
                    self.fused.int8_matmul_residual_triton(q_x, x_scale, q_w, w_scale, bias, gate, y, y, tile)
                    expected = (acc * gate.float() + residual.float()).to(self.dtype)
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
        dtypes = (
            (self.dtype,) if self.quick or self.device.type == "cpu" else (torch.bfloat16, torch.float16, torch.float32)
        )
        quantize_rows = self.kernels.quantize_rows
        for k in self._some(QUANTISE_K):
            for dtype in dtypes:
                x = self.normal(3, k).to(dtype)
                q, scale = quantize_rows(x, implementation="triton")
                q_exact, scale_exact = quantise_rows(x)
                self.expect(f"codes of {k} columns, {dtype}", q, q_exact)
                self.expect(f"row scales of {k} columns, {dtype}", scale, scale_exact)
                for act, width in (("gelu_tanh", k), ("swiglu", 2 * k)):
                    self._like_torch(self.normal(3, width).to(dtype), input_act=act)
        for group, k in self._some(ROTATED):
            self._like_torch(self.normal(3, k).to(self.dtype), rotation_group=group)
            rotated = self.kernels.rotate(self.normal(3, k), group, implementation="triton")
            self.expect(f"rotate {group}", rotated.isfinite().all(), torch.ones_like(rotated.isfinite().all()))

    def _like_torch(self, x: torch.Tensor, **options) -> None:
        got, _ = self.kernels.quantize_rows(x, implementation="triton", **options)
        expected, _ = self.kernels.quantize_rows(x, implementation="torch", **options)
        self._near_codes(f"codes of {tuple(x.shape)} {x.dtype} with {options}", got, expected)

    def _near_codes(self, what: str, got: torch.Tensor, expected: torch.Tensor) -> None:
        near = ((got.short() - expected.short()).abs() <= 1).all()
        self.expect(what, near, torch.ones_like(near))

    def _near(self, what: str, got: torch.Tensor, exact: torch.Tensor) -> None:
        """Within the rounding of a few steps in bf16; what lies past an edge is further away."""
        near = ((got.double() - exact.double()).abs() <= exact.double().abs() / 64 + exact.abs().max() / 256).all()
        self.expect(what, near, torch.ones_like(near))

    def low_rank(self) -> None:
        """The low-rank epilogue: ranks of one step and of several, rows of the factors past the edges."""
        launch = self._module("int8_matmul_low_rank_triton").int8_matmul_low_rank_triton
        for tile in self._tiles(self.tiles.default_large_tiles(self.sm)):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N if self.quick else FULL_K_N:
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, n % 2 == 0)
                    for rank in RANKS:
                        inner, up = self.normal(m, rank).to(self.dtype), self.normal(n, rank).to(self.dtype)
                        y = torch.empty((m, n), dtype=self.dtype, device=self.device)
                        launch(q_x, x_scale, q_w, w_scale, bias, inner, up, y, tile)
                        exact = rounded_once(accumulate_fp64, q_x, x_scale, q_w, w_scale, bias, torch.float32)
                        exact = exact.double() + inner.double() @ up.double().t()
                        self._near(f"rank {rank}, {tile.name} on {m}x{k}x{n}", y, exact)

    def split_k(self) -> None:
        """Split along K by force: pieces of unequal length, a last step that is not full, and whole tiles before them."""
        launch = self._module("int8_matmul_split_k_triton").int8_matmul_split_k_triton
        for tile in self._tiles(self.tiles.default_large_tiles(self.sm)):
            for m in self.rows_around(tile.block_m):
                # columns of the last step: one, and all but one
                for k, n in ((2 * tile.block_k + 1, 65), (5 * tile.block_k - 1, 130)):
                    q_x, x_scale, q_w, w_scale, bias = self.operands(m, k, n, n % 2 == 0)
                    expected = rounded_once(accumulate_fp64, q_x, x_scale, q_w, w_scale, bias, self.dtype)
                    programs = -(-m // tile.block_m) * -(-n // tile.block_n)
                    for whole, pieces in {(0, 2), (0, 3), (programs - 1, 3)}:
                        y = torch.empty((m, n), dtype=self.dtype, device=self.device)
                        split = self.tiles.Split(whole, pieces)
                        launch(q_x, x_scale, q_w, w_scale, bias, y, tile, split, self.sm)
                        self.expect(f"{split}, {tile.name} on {m}x{k}x{n}", y, expected)

    def swiglu_of_rows(self) -> None:
        """Both Linears of a SwiGLU on rows that were quantised before, rounded as separate operations."""
        for tile in self._tiles(self.tiles.default_large_tiles(self.sm)):
            for m in self.rows_around(tile.block_m):
                for k, n in QUICK_K_N if self.quick else FULL_K_N:
                    q_x, x_scale, gate_w, gate_scale, gate_bias = self.operands(m, k, n, n % 2 == 0)
                    _, _, up_w, up_scale, up_bias = self.operands(m, k, n, n % 2 == 0)
                    y = torch.empty((m, n), dtype=self.dtype, device=self.device)
                    linears = (gate_w, gate_scale, gate_bias), (up_w, up_scale, up_bias)
                    self.fused.int8_matmul_swiglu_triton(
                        q_x, x_scale, gate_w, gate_scale, up_w, up_scale, gate_bias, up_bias, y, tile, self.sm, True
                    )
                    gate, up = (
                        rounded_once(accumulate_fp64, q_x, x_scale, *linear, self.dtype).double() for linear in linears
                    )
                    self._near(f"swiglu of rows, {tile.name} on {m}x{k}x{n}", y, torch.nn.functional.silu(gate) * up)

    def residual_norm(self) -> None:
        """Each half of residual_norm and both, with and without norm, gate, weight, bias, shift and LayerNorm."""
        op = self._module("residual_norm")
        launch = self._module("residual_norm_triton").residual_norm_triton
        for k, group in self._some(ROW_WIDTHS, self.quick):
            for m, images in IMAGES:
                x, y = self.normal(m, k).to(self.dtype), self.normal(m, k).to(self.dtype)
                weight, bias = self.normal(k), self.normal(k)
                gate, scale, shift = (self.normal(images, k).to(self.dtype) / 4 for _ in range(3))
                branches = (
                    op.Branch(y, weight.to(self.dtype), EPS, gate),
                    op.Branch(y, None, 0.0, gate, one_rounding=True),
                    op.Branch(y, None, 0.0, None),
                )
                norms = (
                    op.Norm(weight.to(self.dtype), EPS, scale),
                    op.Norm(None, EPS, scale, shift, centred=True, one_rounding=True),
                    op.Norm(weight, EPS, None, bias=bias, centred=True),
                )
                pairs = [*((branch, None) for branch in branches), *((None, norm) for norm in norms)]
                for branch, norm in [*pairs, *zip(branches, norms, strict=True)]:
                    # a LayerNorm of one column is zero, and which code that has is chance
                    if not (norm and norm.centred and k == 1):
                        self._residual_norm(op, launch, x, branch, norm, group, f"{m}x{k} of {images} images")

    def _residual_norm(self, op, launch, x, branch, norm, group: int, size: str) -> None:
        out = None if branch is None else torch.empty_like(x)
        q = torch.empty(x.shape, dtype=torch.int8, device=self.device)
        scale = torch.empty(len(x), dtype=torch.float32, device=self.device)
        kept = None if norm is None else torch.empty_like(x)
        launch(x, branch, out, norm, q, scale, kept, group)
        what = f"residual_norm {size}, branch {branch is not None}, norm {norm is not None}"
        if branch is not None:
            self._near(what, out, op.add_branch_torch(x, branch))
        if norm is not None:
            # of what the kernel gave, so that a step of rounding before does not count
            wanted = op.modulated_norm_torch(x if out is None else out, norm)
            self._near(f"kept of {what}", kept, wanted)
            expected, _ = self.kernels.quantize_rows(wanted, rotation_group=group, implementation="torch")
            self._near_codes(f"codes of {what}", q, expected)

    def activations(self) -> None:
        """quantize_swiglu and quantize_gelu: halves of one tensor, columns that come before, and what is kept in float."""
        launch = self._module("quantize_activation_triton").quantize_activation_triton
        for k, group in self._some(ROW_WIDTHS, self.quick):
            for m, _ in IMAGES:
                for columns in {0, k // 3}:
                    # gate and up end where their allocation does
                    gate, up = self.normal(m, 2 * (k - columns)).to(self.dtype).chunk(2, 1)
                    before = self.normal(m, columns).to(self.dtype) if columns else None
                    for second in (up, None):
                        q = torch.empty((m, k), dtype=torch.int8, device=self.device)
                        scale = torch.empty(m, dtype=torch.float32, device=self.device)
                        kept = torch.empty((m, k), dtype=self.dtype, device=self.device)
                        launch(before, gate if second is not None else up, second, q, scale, kept, group)
                        wanted = self._activated(gate if second is not None else up, second)
                        wanted = wanted if before is None else torch.cat((before, wanted), 1)
                        expected, _ = self.kernels.quantize_rows(wanted, rotation_group=group, implementation="torch")
                        what = f"{'gelu' if second is None else 'swiglu'} {m}x{k}, {columns} before"
                        self._near_codes(what, q, expected)
                        self._near(f"kept of {what}", kept, wanted)

    def _activated(self, gate: torch.Tensor, up: torch.Tensor | None) -> torch.Tensor:
        return self._module("quantize_activation").activated_torch(gate, up)

    def rms_rope(self) -> None:
        """Heads whose number no block divides, widths that are no power of two, one token, either order of pairs."""
        op, launch = self._module("rms_rope"), self._module("rms_rope_triton").rms_rope_triton
        for batch, length, heads, k_heads, dim in self._some(HEADS, self.quick):
            q, k = (self.normal(batch, length, n, dim).to(self.dtype) for n in (heads, k_heads))
            weights = [self.normal(dim).to(self.dtype) for _ in range(2)]
            for images in {1, batch}:
                freqs = self.normal(images, length, dim // 2, 2, 2)
                for split_half in (True, False):
                    for by_lane in (True, False):
                        out = torch.empty_like(q), torch.empty_like(k)
                        launch(q, k, freqs, *weights, EPS, split_half, (by_lane, by_lane), *out)
                        for got, x, weight in zip(out, (q, k), weights, strict=True):
                            expected = op.rms_rope_torch(x, freqs, weight, EPS, split_half)
                            self._near(f"rms_rope of {tuple(x.shape)}, halves {split_half}", got, expected)


PARTS = (
    "matmuls", "fused_matmuls", "quantisers", "low_rank", "split_k", "swiglu_of_rows", "residual_norm", "activations",
    "rms_rope",
)  # fmt: skip


@torch.inference_mode()
def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer shapes, for racecheck, which is slow")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="NAME", help=", ".join(PARTS))
    arguments = parser.parse_args()
    kernels = load_kernels()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cpu" and not importlib.import_module(f"{kernels.__name__}.compiled").interpreted():
        raise SystemExit("edge_shapes.py: no CUDA device. Needed: an NVIDIA GPU, or TRITON_INTERPRET=1.")
    suite = Suite(kernels, arguments.quick, device)
    for part in arguments.only:
        start, before = time.perf_counter(), suite.runs
        getattr(suite, part)()
        if device.type == "cuda":
            torch.cuda.synchronize()
        print(f"{part}: {suite.runs - before} comparisons, {time.perf_counter() - start:.1f} s", flush=True)
    for text in suite.wrong[:20]:
        print(f"WRONG {text}")
    where = f"sm_{suite.sm}" if device.type == "cuda" else "the interpreter"
    print(
        f"edge shapes on {where}: {suite.runs} comparisons of {len(arguments.only)} parts, {len(suite.wrong)} differences"
    )
    return 1 if suite.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
