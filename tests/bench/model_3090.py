"""What consumer cards should do: a MODEL, not a measurement. Per matmul, and per step of Ideogram 4.

    python tests/bench/model_3090.py [--write]     needs no GPU; --write puts the tables into this folder's README.md

A matmul takes flops / (rated int8 peak * efficiency). Efficiency is the share of the peak that the card's power limit
sustains, times how well the tiles that the pack picks fill the card: whole waves of tiles over the SMs, edges, pipeline
fill and drain. It is never faster than its bytes at the card's bandwidth. Every assumption is a constant below.
"""

from __future__ import annotations

import argparse
import importlib
import math
from dataclasses import dataclass
from pathlib import Path

from machine import load_kernels
from pages import replace_section, table


@dataclass(frozen=True)
class Card:
    """Rated numbers of a card, and the share of the int8 peak that its power limit sustains (low, middle, high).

    int8 TOPS are dense, with 1024 multiply-adds per SM and clock; bf16 with fp32 sums runs at a quarter of them.
    """

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    boost_ghz: float
    gb_per_s: float
    sustained: tuple[float, float, float]

    @property
    def int8_tops(self) -> float:
        return self.multiprocessors * MACS_PER_CLOCK * 2 * self.boost_ghz / 1e3

    @property
    def bf16_tflops(self) -> float:
        return self.int8_tops / 4 * BF16_OF_PEAK


MACS_PER_CLOCK = 1024
# an A40, the same chip at 300 W, holds 75 to 77 % of its int8 peak with cuBLAS; public 4090 results are 83 to 97 %
CARDS = (
    Card("RTX 3090", (8, 6), 82, 1.695, 936, (0.72, 0.80, 0.88)),
    Card("RTX 3090 Ti", (8, 6), 84, 1.860, 1008, (0.75, 0.83, 0.90)),
    Card("RTX 3080", (8, 6), 68, 1.710, 760, (0.78, 0.85, 0.92)),
    Card("RTX 3060", (8, 6), 28, 1.777, 360, (0.78, 0.85, 0.92)),
    Card("RTX 4090", (8, 9), 128, 2.520, 1008, (0.80, 0.88, 0.95)),
)
# GeForce bf16 is not limited by power: cuBLAS reaches 65.5 to 71 of 71.2 TFLOPS on a 3090
BF16_OF_PEAK = 0.955
# share of the rated bandwidth that a streaming kernel reaches
BANDWIDTH_REACHED = 0.875
# two warps per scheduler leave this share of the issue slots usable
LATENCY = 0.97
# filling the pipeline, and the epilogue, per tile; a second block on the SM hides its half
TILE_OVERHEAD_CYCLES = 1500
# a tile of 64 rows reads more shared memory per multiplication
TILE_SPEED = {(64, 128): 0.93, (64, 64): 0.85}
SM_SHARED_BYTES = 100 * 1024
# an idle tensor pipe draws less power, so the clock makes up for a part of it
POWER_SOFTENING = 0.6
REFERENCE_STRUCTURE = 0.96
# bf16 cuBLAS: the same waves, with 128x128 tiles
BF16_TILE = (128, 128)

LAYERS = 34
HIDDEN = 4608
# (name, K, N, how often per block); w3 reads what w1 reads
BLOCK = (("qkv", 4608, 13824, 1), ("o", 4608, 4608, 1), ("w1, w3", 4608, 12288, 2), ("w2", 12288, 4608, 1))
TEXT_TOKENS = 256
TEXT_PROJECTION = (53248, 4608)
SIZES = {"768 px": 2304, "1024 px": 4096}
# attention of head size 256: with a boolean mask, and without one (flash)
MASKED_TFLOPS, FLASH_TFLOPS = 25.0, 50.0
# reads and writes of a [M, 4608] bf16 tensor per block around the matmuls: eager modules, and fused ones
EAGER_PASSES, FUSED_PASSES = 28.0, 7.5


def streaming_ms(card: Card, size: float) -> float:
    """Milliseconds to move `size` bytes."""
    return size / (card.gb_per_s * BANDWIDTH_REACHED) / 1e6


def wave_fill(tiles: int, multiprocessors: int) -> float:
    """Share of the SMs' time that is used: tiles over whole rounds of the SMs.

    With two blocks on an SM a block that is alone in the last round has the SM to itself, so rounds count SMs.
    """
    rounds = tiles / multiprocessors
    return rounds / math.ceil(rounds)


class Model:
    """The model of one card, with the tiles that the pack picks for it."""

    def __init__(self, card: Card, kernels, tiles):
        self.card = card
        self.tiles = tiles
        self.device = kernels.device_from(
            name=f"NVIDIA GeForce {card.name}",
            compute_capability=card.compute_capability,
            multiprocessors=card.multiprocessors,
            triton="any",
        )
        self.sm = card.compute_capability[0] * 10 + card.compute_capability[1]

    def tile(self, m: int, k: int, n: int):
        """What the pack picks on this card."""
        return self.tiles.pick(self.device, m, n, k)

    def structure(self, m: int, k: int, n: int) -> tuple[float, float]:
        """(wave fill, structural efficiency) of the picked tile."""
        tile = self.tile(m, k, n)
        count = math.ceil(m / tile.block_m) * math.ceil(n / tile.block_n)
        fill = wave_fill(count, self.card.multiprocessors)
        edge = m * n / (count * tile.block_m * tile.block_n)
        blocks = max(1, min(2, SM_SHARED_BYTES // (tile.shared_memory_bytes(self.sm) + 1024)))
        cycles = tile.block_m * tile.block_n * k / MACS_PER_CLOCK
        exposed = cycles / (cycles + TILE_OVERHEAD_CYCLES / blocks)
        speed = TILE_SPEED.get((tile.block_m, tile.block_n), 1.0)
        return fill, fill * edge * LATENCY * exposed * speed

    def int8_ms(self, m: int, k: int, n: int, sustained: float) -> float:
        """One int8 matmul with its scaling."""
        structure = self.structure(m, k, n)[1]
        efficiency = min(structure, sustained * (structure / REFERENCE_STRUCTURE) ** POWER_SOFTENING)
        compute = 2 * m * k * n / (self.card.int8_tops * efficiency) / 1e9
        return max(compute, streaming_ms(self.card, m * k + n * k + 2 * m * n))

    def bf16_ms(self, m: int, k: int, n: int) -> float:
        """The same in bf16 by cuBLAS."""
        tiles = math.ceil(m / BF16_TILE[0]) * math.ceil(n / BF16_TILE[1])
        fill = wave_fill(tiles, self.card.multiprocessors)
        compute = 2 * m * k * n / (self.card.bf16_tflops * fill) / 1e9
        return max(compute, streaming_ms(self.card, 2 * (m * k + n * k + m * n)))

    def quantise_ms(self, m: int, k: int) -> float:
        """One pass: 2 bytes read, 1 written."""
        return streaming_ms(self.card, 3 * m * k)

    def linears_ms(self, passes: tuple[int, ...], sustained: float | None, shared: bool) -> float:
        """All block Linears and the text projection of one step; sustained None is bf16."""
        total = 0.0
        for m in passes:
            for _, k, n, count in BLOCK:
                if sustained is None:
                    total += LAYERS * count * self.bf16_ms(m, k, n)
                else:
                    quantised = 1 if shared else count
                    total += LAYERS * (count * self.int8_ms(m, k, n, sustained) + quantised * self.quantise_ms(m, k))
        k, n = TEXT_PROJECTION
        if sustained is None:
            return total + self.bf16_ms(TEXT_TOKENS, k, n)
        return total + self.int8_ms(TEXT_TOKENS, k, n, sustained) + self.quantise_ms(TEXT_TOKENS, k)

    def step(self, image: int, kind: str) -> tuple[float, float, float]:
        """(linear, attention, elementwise) milliseconds of one step: a pass with text and one without."""
        passes = (image + TEXT_TOKENS, image)
        int8, shared, flash, eager = STEPS[kind]
        sustained = self.card.sustained[1] if int8 else None
        tflops = (FLASH_TFLOPS if flash else MASKED_TFLOPS) * self.card.bf16_tflops / CARDS[0].bf16_tflops
        attention = sum(4 * LAYERS * m * m * HIDDEN for m in passes) / tflops / 1e9
        moved = sum(4 * m * HIDDEN for m in passes) * LAYERS * (EAGER_PASSES if eager else FUSED_PASSES)
        return self.linears_ms(passes, sustained, shared), attention, streaming_ms(self.card, moved)


# name -> (INT8, w1 and w3 share one quantisation, attention without mask, eager elementwise modules)
STEPS = {
    "bf16, masked attention": (False, False, False, True),
    "INT8, masked attention": (True, False, False, True),
    "INT8, w1 and w3 share their codes": (True, True, False, True),
    "bf16, flash attention": (False, False, True, True),
    "INT8, flash attention": (True, True, True, True),
    "INT8, flash attention, fused elementwise": (True, True, True, False),
}


def gemm_table(model: Model) -> str:
    """Per matmul of Ideogram 4 on one card."""
    rows = []
    for image in SIZES.values():
        for m in (image + TEXT_TOKENS, image):
            for name, k, n, _ in BLOCK:
                low, middle, high = (model.int8_ms(m, k, n, share) for share in model.card.sustained)
                bf16, quantise = model.bf16_ms(m, k, n), model.quantise_ms(m, k)
                fill, structure = model.structure(m, k, n)
                tops = 2 * m * k * n / middle / 1e9
                rows.append([
                    name, m, k, n, model.tile(m, k, n).name, f"{fill:.0%}", f"{structure:.0%}", f"{tops:.0f}",
                    f"{middle:.2f} ({high:.2f} to {low:.2f})", f"{quantise:.2f}", f"{bf16:.2f}",
                    f"{bf16 / (middle + quantise):.2f}",
                ])  # fmt: skip
    columns = [
        "Linear", "M", "K", "N", "tile picked", "waves filled", "structure", "TOPS", "int8 matmul ms",
        "quantise ms", "bf16 ms", "bf16 / (matmul + quantise)",
    ]  # fmt: skip
    return table(columns, rows)


def step_table(models: list[Model]) -> str:
    """Per step of Ideogram 4 (both passes), on every card."""
    rows = []
    for size, image in SIZES.items():
        for kind in STEPS:
            cells = []
            for model in models:
                linear, attention, elementwise = model.step(image, kind)
                cells.append(f"{linear + attention + elementwise:.0f}")
                if model.card is CARDS[0]:
                    parts = f"{linear:.0f} + {attention:.0f} + {elementwise:.0f}"
            rows.append([size, kind, parts, *cells])
    first = f"{CARDS[0].name}: linear + attention + elementwise, ms"
    return table(["size", "what runs", first, *[model.card.name for model in models]], rows, left=2)


def text() -> str:
    """The tables with their assumptions, as Markdown."""
    kernels = load_kernels()
    tiles = importlib.import_module(f"{kernels.__name__}.tiles")
    models = [Model(card, kernels, tiles) for card in CARDS]
    low, middle, high = CARDS[0].sustained
    cards = "; ".join(
        f"{c.name}: {c.multiprocessors} SMs, {c.boost_ghz} GHz, {c.int8_tops:.0f} int8 TOPS, {c.gb_per_s} GB/s, "
        f"{c.sustained[1]:.0%} sustained"
        for c in CARDS
    )
    return f"""**MODEL, not measured.** Made by `model_3090.py`; no consumer card was at hand.

Assumptions: {cards}. bf16 reaches {BF16_OF_PEAK:.1%} of a quarter of the int8 peak; memory {BANDWIDTH_REACHED:.1%} of its rate; \
quantisation is one pass of 3 bytes a value; the power limit lets a 3090 sustain {low:.0%}, {middle:.0%} or {high:.0%} of the peak \
(the range in brackets); {LATENCY} for latency, {TILE_OVERHEAD_CYCLES} cycles of fill and drain per tile; tiles are those that \
`kernels/tiles.py` picks.

{CARDS[0].name}, per matmul of Ideogram 4 ({TEXT_TOKENS} text tokens; M of the pass with text, then without):

{gemm_table(models[0])}

Milliseconds per step (both passes), and how a 3090's divide:

{step_table(models)}

Further assumptions: attention {MASKED_TFLOPS:.0f} TFLOPS with a mask and {FLASH_TFLOPS:.0f} without on a 3090, in proportion to the \
bf16 rate elsewhere; {EAGER_PASSES:.0f} reads and writes of the hidden state per block by eager modules, {FUSED_PASSES} when fused, \
as in the pack's fused blocks. Text encoder, VAE, host time and moving weights are left out: bf16 weights of both Ideogram 4 models \
are 37 GB and fit none of these cards, so a real bf16 run also waits for its weights."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into README.md beside this file")
    if parser.parse_args().write:
        replace_section(Path(__file__).with_name("README.md"), "model", text())
    else:
        print(text())


if __name__ == "__main__":
    main()
