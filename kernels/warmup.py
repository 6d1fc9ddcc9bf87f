"""Compile every kernel that a set of Linears can need before the first of them runs, so that no picture waits for it.

Machine code depends on few things: the tile, dtypes, whether there is a bias, and whether sizes are multiples of 16 and
of the tile's step. M is not among them, so once all tiles that any M can pick are compiled, a new resolution or prompt
length compiles nothing. Each variant is launched once on operands as small as its kind allows, through the same
functions that a real call uses, so the guard also sees it: a tile that spills or does not run is rejected here and
the next one compiled. Triton keeps the results on disk, so it takes seconds once and little after that.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from .capability import Device, detect
from .dispatch import Int8Error, LinearFacts, choose_for
from .int8_matmul import matmul_2d
from .launch import on_device
from .quantize_rows import quantize_2d
from .tiles import Split, Tile, reachable, reject, sm_of

log = logging.getLogger("native_int8.warmup")


@dataclass(frozen=True)
class LinearKind:
    """What of a Linear decides which kernels it needs.

    dtype: of its input and output. bias_dtype: None without bias. row_scales: one weight scale per row, else one.
    """

    in_features: int
    out_features: int
    dtype: torch.dtype
    bias_dtype: torch.dtype | None = None
    rotation_group: int = 0
    input_act: str | None = None
    row_scales: bool = True


@dataclass(frozen=True)
class QuantizeVariant:
    """One machine code of the row quantiser; k columns stand for all widths that share it."""

    k: int
    rotation_group: int
    input_act: str | None
    dtype: torch.dtype

    def run(self, device: Device, torch_device: torch.device) -> None:
        """Quantise two rows of zeros."""
        columns = 2 * self.k if self.input_act == "swiglu" else self.k
        x = torch.zeros((2, columns), dtype=self.dtype, device=torch_device)
        quantize_2d(x, self.rotation_group, self.input_act, "triton")

    @property
    def name(self) -> str:
        """Short form for logs and the progress bar."""
        act = f" {self.input_act}" if self.input_act else ""
        return f"quantize_rows {self.k} rotation {self.rotation_group}{act}"


@dataclass(frozen=True)
class MatmulVariant:
    """One machine code of the matmul; n and k are the smallest sizes of their kind."""

    tile: Tile
    n: int
    k: int
    bias_dtype: torch.dtype | None
    row_scales: bool
    out_dtype: torch.dtype

    def run(self, device: Device, torch_device: torch.device) -> None:
        """Multiply zeros. A tile that the card cannot run is rejected, with the reason."""
        q_x = torch.zeros((self.tile.block_m, self.k), dtype=torch.int8, device=torch_device)
        q_w = torch.zeros((self.n, self.k), dtype=torch.int8, device=torch_device)
        x_scale = torch.ones((self.tile.block_m,), device=torch_device)
        w_scale = torch.ones((self.n if self.row_scales else 1,), device=torch_device)
        bias = None if self.bias_dtype is None else torch.zeros((self.n,), dtype=self.bias_dtype, device=torch_device)
        try:
            y = matmul_2d(q_x, x_scale, q_w, w_scale, bias, self.out_dtype, "triton", device, self.tile)
            if self.tile.split_k:
                # so small an output is not split by itself
                from .int8_matmul_split_k_triton import int8_matmul_split_k_triton

                with on_device(torch_device):
                    int8_matmul_split_k_triton(
                        q_x, x_scale, q_w, w_scale, bias, y, self.tile, Split(0, 1), sm_of(device)
                    )
        except torch.OutOfMemoryError:
            raise
        # whatever Triton, its assembler or the driver raises about one tile, the next tile may be fine
        except Exception as error:
            log.debug("tile %s", self.tile.name, exc_info=True)
            first_line = (str(error).strip().splitlines() or ["no message"])[0]
            reject(sm_of(device), self.tile, f"{type(error).__name__}: {first_line}")

    @property
    def name(self) -> str:
        """Short form for logs and the progress bar."""
        return f"int8_matmul {self.tile.name}{' bias' if self.bias_dtype else ''}"


Variant = QuantizeVariant | MatmulVariant


@dataclass(frozen=True)
class WarmUp:
    """What `compile_all` did: how many variants it launched, and in how many seconds."""

    variants: int
    seconds: float
    interrupted: bool = False


def variants(device: Device, linears: Iterable[LinearKind]) -> tuple[Variant, ...]:
    """Every kernel variant that `linears` can need on `device`, whatever M is; the tiles of the largest M first."""
    quantise: dict[tuple, QuantizeVariant] = {}
    matmul: dict[MatmulVariant, int] = {}
    for linear in dict.fromkeys(linears):
        k, n = linear.in_features, linear.out_features
        if not _runs_on_triton(device, linear):
            continue
        variant = QuantizeVariant(k, linear.rotation_group, linear.input_act, linear.dtype)
        quantise.setdefault(_quantize_class(variant), variant)
        for rank, tile in enumerate(reachable(device, n, k)):
            small = MatmulVariant(
                tile, _small_n(n, tile), _small_k(k, tile), linear.bias_dtype, linear.row_scales, linear.dtype
            )
            matmul[small] = min(rank, matmul.get(small, rank))
    return (*quantise.values(), *sorted(matmul, key=matmul.__getitem__))


def compile_all(
    torch_device: torch.device | str,
    linears: Iterable[LinearKind],
    *,
    progress: Callable[[int, int, str], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    device: Device | None = None,
) -> WarmUp:
    """Compile, and launch once, every variant of `variants`; what was done before in this process is skipped.

    Args:
        torch_device: where the Linears will run.
        progress: called with (variants done, variants in all, name) before each one and at the end.
        interrupted: asked before each one; True ends the work.
        device: what `detect` says of `torch_device`; a test passes another.
    Returns:
        WarmUp; nothing is done on a device without Triton.
    """
    start = time.perf_counter()
    torch_device = torch.device(torch_device)
    device = device or detect(torch_device)
    linears = tuple(linears)
    launched = 0
    stopped = False
    done = _done.setdefault((torch_device, device), set())
    # a rejected tile brings in the next one of its table
    while not stopped and (waiting := [v for v in variants(device, linears) if v not in done]):
        for number, variant in enumerate(waiting):
            if interrupted is not None and interrupted():
                stopped = True
                break
            if progress is not None:
                progress(number, len(waiting), variant.name)
            variant.run(device, torch_device)
            done.add(variant)
            launched += 1
    if progress is not None and launched and not stopped:
        progress(launched, launched, "done")
    result = WarmUp(launched, time.perf_counter() - start, stopped)
    if launched:
        log.info("%d kernel variants are ready on %s (%.1f s)", launched, device.name, result.seconds)
    return result


_done: dict[tuple[torch.device, Device], set[Variant]] = {}


def _runs_on_triton(device: Device, linear: LinearKind) -> bool:
    facts = LinearFacts(linear.in_features, linear.out_features, linear.rotation_group, linear.input_act)
    try:
        return choose_for(device, facts).implementation == "triton"
    except Int8Error:
        # the layer itself says so when it runs
        return False


def _quantize_class(variant: QuantizeVariant) -> tuple:
    """What Triton specialises the row quantiser on."""
    from .quantize_rows_triton import row_blocks, row_warps

    k, group = variant.k, variant.rotation_group
    columns = 2 * k if variant.input_act == "swiglu" else k
    specialised = (k % 16 == 0, k == 1, columns % 16 == 0)
    return row_blocks(k, group), row_warps(k, group), group, variant.input_act, variant.dtype, specialised


def _small_n(n: int, tile: Tile) -> int:
    """The smallest sensible N with the same machine code: Triton asks whether N is 1 or a multiple of 16."""
    if n == 1:
        return 1
    return tile.block_n if n % 16 == 0 else tile.block_n + 1


def _small_k(k: int, tile: Tile) -> int:
    """The same for K, where the kernel also asks whether it is a multiple of the tile's step."""
    if k == 1 or k % tile.block_k == 0:
        return 1 if k == 1 else tile.block_k
    return tile.block_k + (16 if k % 16 == 0 else 1)
