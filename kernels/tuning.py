"""Measure which tile is fastest for given shapes on this card; on request only, never during an image.

For each (M bucket, N, K) a handful of tiles (tile_search.py) is checked against torch._int_mm, bit for bit, then timed
in turns on Gaussian codes with the L2 emptied between runs. A card that is throttled would give a wrong table, so
bf16 is measured before and after: below 60 % of what the card is rated for, nothing is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from .capability import CONSUMER, Device
from .dispatch import Int8Error, NoImplementation, choose
from .int8_matmul import int8_matmul_torch, matmul_2d
from .tile_search import worth_measuring
from .tiles import Tile, bucket, pick

log = logging.getLogger("native_int8.tuning")

# measured bf16 TFLOPS below this part of the rated ones mean a throttled or busy card; healthy ones reach 0.7 to 1.0
HEALTHY_PART = 0.6
# a tile must beat the one in use by this part, else noise would decide
LEAST_GAIN = 0.01
BUDGET_S = 120.0
GROUPS_M = (4, 16)
# what each contestant is timed for, in microseconds on the GPU, within the limits of rounds
_TIME_PER_TILE_US, _LEAST_ROUNDS, _MOST_ROUNDS = 20_000, 7, 41
# idle work of the timer: cycles to learn the clock by, and the most before one call
_IDLE_CYCLES, _MOST_IDLE_US = 2_000_000, 5000.0

# bf16 multiply-adds per clock and SM with fp32 sums: (consumer cards, others); GeForce halves them
_BF16_MACS = {80: (1024, 1024), 86: (256, 512), 89: (256, 512), 90: (2048, 2048), 100: (4096, 4096), 120: (256, 512)}
# rated boost clock in MHz where the driver does not tell
_BOOST_MHZ = {80: 1410, 86: 1700, 89: 2500, 90: 1830, 100: 1850, 120: 2400}

MediansUs = Callable[[Mapping[str, Callable[[], object]]], Mapping[str, float]]


class ThrottledCard(Int8Error, RuntimeError):
    """The card is slower in bf16 than it should be, so what would be measured now is not its table."""


@dataclass(frozen=True)
class Entry:
    """The measured choice for M in one bucket: `tile` at `us` microseconds, the tile in use before at `baseline_us`."""

    m_bucket: int
    n: int
    k: int
    m: int
    tile: Tile
    us: float
    baseline: Tile
    baseline_us: float

    @property
    def key(self) -> tuple[int, int, int]:
        """(M bucket, N, K), as `tiles.use_tuned` wants it."""
        return self.m_bucket, self.n, self.k

    @property
    def gain(self) -> float:
        """How many times as fast as the tile in use before; 1.0 when that one stays."""
        return self.baseline_us / self.us


@dataclass(frozen=True)
class TuningResult:
    """What a run measured. `left_out` says in one sentence each what was not measured, and why."""

    entries: tuple[Entry, ...]
    bf16_tflops: float
    bf16_rated_tflops: float
    seconds: float
    left_out: tuple[str, ...] = ()
    interrupted: bool = False

    def table(self) -> dict[tuple[int, int, int], Tile]:
        """The tiles, keyed as `tiles.use_tuned` wants them."""
        return {entry.key: entry.tile for entry in self.entries}

    def report(self) -> str:
        """Some lines for a person: health, one line per entry, what was left out."""
        lines = [
            f"bf16 {self.bf16_tflops:.0f} TFLOPS of {self.bf16_rated_tflops:.0f} rated; {len(self.entries)} entries in "
            f"{self.seconds:.0f} s",
            f"{'M':>6} {'N':>6} {'K':>6}  {'us':>8} {'before':>8} {'gain':>6}  tile",
        ]
        lines += [
            f"{e.m:>6} {e.n:>6} {e.k:>6}  {e.us:>8.1f} {e.baseline_us:>8.1f} {e.gain:>6.3f}  {e.tile.name}"
            for e in self.entries
        ]
        return "\n".join([*lines, *self.left_out])


class EventTimer:
    """Median microseconds on a CUDA device: every round runs each call once, each after a write that empties the L2.

    Before each call the GPU idles for longer than the call's host time, so that all its kernels are queued when the clock
    starts: what is measured is the GPU's time alone.
    """

    def __init__(self, device: torch.device):
        l2_bytes = getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) or (64 << 20)
        self._device = device
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.int8, device=device)
        with torch.cuda.device(device):
            # the first one warms up
            idle_us = [self._once(lambda: torch.cuda._sleep(_IDLE_CYCLES)) for _ in range(2)][1]
        self._cycles_per_us = _IDLE_CYCLES / idle_us

    def _once(self, call: Callable[[], object], idle_us: float = 0.0) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        if idle_us:
            torch.cuda._sleep(int(idle_us * self._cycles_per_us))
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def _idle_us(self, call: Callable[[], object]) -> float:
        """Idle time that outlasts the host's part of a call."""
        host_us = []
        for _ in range(3):
            torch.cuda.synchronize()
            before = time.perf_counter()
            call()
            host_us.append((time.perf_counter() - before) * 1e6)
        torch.cuda.synchronize()
        return min(2 * min(host_us) + 30, _MOST_IDLE_US)

    def __call__(self, calls: Mapping[str, Callable[[], object]]) -> dict[str, float]:
        """Median microseconds of each call; about 20 ms of GPU time each."""
        with torch.cuda.device(self._device):
            idle_us = {name: self._idle_us(call) for name, call in calls.items()}
            slowest = max(self._once(call, idle_us[name]) for name, call in calls.items())
            rounds = int(min(max(_TIME_PER_TILE_US / max(slowest, 1.0), _LEAST_ROUNDS), _MOST_ROUNDS))
            times: dict[str, list[float]] = {name: [] for name in calls}
            for _ in range(rounds):
                for name, call in calls.items():
                    times[name].append(self._once(call, idle_us[name]))
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def rated_bf16_tflops(device: Device, boost_mhz: float | None = None) -> float:
    """What the card is built for: SMs x multiply-adds per clock x 2 x boost clock, fp32 sums.

    Args:
        boost_mhz: the driver's number; None for the usual one of the architecture.
    """
    major, minor = device.compute_capability or (8, 6)
    sm = major * 10 + minor
    closest = max((known for known in _BF16_MACS if known <= sm), default=86)
    # a market that the name does not tell counts as consumer, the lower number
    macs = _BF16_MACS[closest][0 if device.market in (CONSUMER, None) else 1]
    mhz = boost_mhz or _BOOST_MHZ[closest]
    return (device.multiprocessors or 1) * macs * 2 * mhz * 1e6 / 1e12


def measured_bf16_tflops(device: torch.device, timer: MediansUs) -> float:
    """TFLOPS of a bf16 matmul, 4096 x 4096 x 4096, by PyTorch."""
    a, b = (torch.randn((4096, 4096), device=device, dtype=torch.bfloat16) for _ in range(2))
    # some tens of milliseconds bring an idle card to its clock
    for _ in range(20):
        a @ b
    return 2 * 4096**3 / timer({"bf16": lambda: a @ b})["bf16"] / 1e6


def check_health(measured: float, rated: float, name: str) -> None:
    """Raise ThrottledCard when bf16 runs below HEALTHY_PART of its rated speed."""
    if measured < HEALTHY_PART * rated:
        raise ThrottledCard(
            f"tuning: {name} runs bf16 at {measured:.1f} TFLOPS, rated for {rated:.1f}. Needed: at least "
            f"{HEALTHY_PART * rated:.1f}, else the card is throttled or busy and the times would mislead. "
            "Let it cool, close other programs that use it, lift a power limit, and tune again."
        )


class _Case:
    """One product to measure: operands on the device, and what the output must be."""

    def __init__(self, m: int, n: int, k: int, torch_device: torch.device, out_dtype: torch.dtype):
        self.m, self.n, self.k, self.out_dtype = m, n, k, out_dtype
        generator = torch.Generator(torch_device).manual_seed(m * 31 + n * 7 + k)

        def codes(rows: int) -> torch.Tensor:
            # zeros or small integers would draw less power, so the clock would be too high
            values = torch.randn((rows, k), device=torch_device, dtype=torch.float32, generator=generator)
            return values.mul_(31.0).round_().clamp_(-127, 127).to(torch.int8)

        def scales(rows: int) -> torch.Tensor:
            return torch.rand((rows,), device=torch_device, generator=generator) * 0.01 + 0.001

        self.q_x, self.q_w = codes(m), codes(n)
        self.x_scale, self.w_scale = scales(m), scales(n)
        self.expected = torch.empty((m, n), dtype=out_dtype, device=torch_device)
        int8_matmul_torch(self.q_x, self.x_scale, self.q_w, self.w_scale, None, self.expected)

    def run(self, tile: Tile, device: Device) -> torch.Tensor:
        """y [M, N] by the Triton kernel with `tile`."""
        return matmul_2d(
            self.q_x, self.x_scale, self.q_w, self.w_scale, None, self.out_dtype, "triton", device, tile
        )  # fmt: skip

    def refusal(self, tile: Tile, device: Device) -> str | None:
        """None when the tile runs here and its output is the expected one, bit for bit; else one sentence."""
        try:
            output = self.run(tile, device)
            if torch.equal(output, self.expected):
                return None
            wrong = int((output != self.expected).sum())
            return f"{wrong} of {output.numel()} outputs differ from torch._int_mm"
        except torch.OutOfMemoryError:
            raise
        # whatever Triton, its assembler or the driver raises about one tile, another tile may be fine
        except Exception as error:
            first_line = str(error).strip().splitlines()[:1]
            return f"{type(error).__name__}: {first_line[0] if first_line else 'no message'}"


def cases_of(shapes: Iterable[tuple[int, int]], m_rows: Iterable[int]) -> list[tuple[int, int, int]]:
    """(M, N, K), the most work first; of several M in one bucket the largest."""
    largest: dict[int, int] = {}
    for m in m_rows:
        largest[bucket(m)] = max(m, largest.get(bucket(m), 0))
    found = {(m, n, k) for m in largest.values() for n, k in shapes}
    return sorted(found, key=lambda case: (-case[0] * case[1] * case[2], case))


def _best(
    case: _Case, device: Device, timer: MediansUs, refuse: Callable[[_Case, Tile, Device], str | None]
) -> tuple[Entry | None, list[str]]:
    """Measure one case: first the tiles, then GROUP_M for the winner."""
    notes: list[str] = []
    usable: list[Tile] = []

    def add(tile: Tile) -> bool:
        reason = refuse(case, tile, device)
        if reason is None:
            usable.append(tile)
            return True
        notes.append(f"{case.m}x{case.n}x{case.k}: tile {tile.name} was left out: {reason}.")
        return False

    baseline = pick(device, case.m, case.n, case.k)
    for tile in dict.fromkeys((baseline, *worth_measuring(device, case.m, case.n, case.k))):
        add(tile)
    if not usable:
        return None, notes

    def measure(tiles: list[Tile]) -> Mapping[Tile, float]:
        by_name = timer({tile.name: (lambda tile=tile: case.run(tile, device)) for tile in tiles})
        return {tile: by_name[tile.name] for tile in tiles}

    times = measure(usable)
    winner = min(usable, key=times.__getitem__)
    first = baseline if baseline in times else winner
    groups = [replace(winner, group_m=g) for g in GROUPS_M if g != winner.group_m]
    finalists = list(dict.fromkeys((first, winner, *(tile for tile in groups if add(tile)))))
    times = measure(finalists)
    winner = min(finalists, key=times.__getitem__)
    if times[winner] > times[first] * (1 - LEAST_GAIN):
        winner = first
    return Entry(bucket(case.m), case.n, case.k, case.m, winner, times[winner], first, times[first]), notes


def tune(
    device: Device,
    shapes: Iterable[tuple[int, int]],
    *,
    m_rows: Iterable[int],
    torch_device: torch.device | str = "cuda",
    progress: Callable[[int, int, str], None] | None = None,
    interrupted: Callable[[], bool] | None = None,
    timer: MediansUs | None = None,
    bf16_tflops: Callable[[], float] | None = None,
    refuse: Callable[[_Case, Tile, Device], str | None] = _Case.refusal,
    budget_s: float = BUDGET_S,
    out_dtype: torch.dtype = torch.bfloat16,
) -> TuningResult:
    """Find the fastest tile for each weight shape and each bucket of M.

    Args:
        device: what `detect` says of `torch_device`.
        shapes: (N, K) of the weights.
        m_rows: the numbers of rows that will run; the largest of each M bucket is measured.
        progress: called with (cases done, cases in all, "MxNxK") before each case and once at the end.
        interrupted: asked before each case; True ends the run with what it has.
        timer: calls by name -> median microseconds by name; default CUDA events (EventTimer).
        bf16_tflops: measures the health gate's number; default a PyTorch matmul.
        refuse: (case, tile, device) -> None or why the tile is out; default runs it and compares the output.
        budget_s: seconds after which no further case is started.
        out_dtype: of the outputs.
    Returns:
        TuningResult; nothing is applied or written.
    Raises:
        ThrottledCard: bf16 is below HEALTHY_PART of its rated speed, before or after.
        NoImplementation: the Triton kernel does not run on this device.
    """
    start = time.perf_counter()
    torch_device = torch.device(torch_device)
    work = cases_of(shapes, m_rows)
    for _, n, k in work[:1]:
        choose(device, in_features=k, out_features=n, implementation="triton")
    timer = timer or EventTimer(torch_device)
    bf16_tflops = bf16_tflops or (lambda: measured_bf16_tflops(torch_device, timer))
    rated = rated_bf16_tflops(device, boost_mhz(torch_device))
    health = bf16_tflops()
    check_health(health, rated, device.name)
    entries: list[Entry] = []
    left_out: list[str] = []
    stopped = False
    for done, (m, n, k) in enumerate(work):
        if interrupted is not None and interrupted():
            stopped = True
            left_out.append(f"interrupted: {len(work) - done} of {len(work)} shapes were not measured.")
            break
        if time.perf_counter() - start > budget_s:
            left_out.append(f"{budget_s:.0f} s are over: {len(work) - done} of {len(work)} shapes were not measured.")
            break
        if progress is not None:
            progress(done, len(work), f"{m}x{n}x{k}")
        entry, notes = _best(_Case(m, n, k, torch_device, out_dtype), device, timer, refuse)
        left_out += notes if entry else [*notes, f"{m}x{n}x{k}: no tile runs here."]
        if entry is not None:
            entries.append(entry)
    if entries:
        health = min(health, bf16_tflops())
        check_health(health, rated, device.name)
    if progress is not None:
        progress(len(work), len(work), "done")
    for note in left_out:
        log.info("%s", note)
    return TuningResult(tuple(entries), health, rated, time.perf_counter() - start, tuple(left_out), stopped)


def boost_mhz(torch_device: torch.device) -> float | None:
    """The driver's highest SM clock of a CUDA device in MHz; None where torch does not tell it."""
    if torch_device.type != "cuda":
        return None
    khz = getattr(torch.cuda.get_device_properties(torch_device), "clock_rate", 0)
    return khz / 1000 if khz else None


def is_tunable(device: Device) -> str | None:
    """None when the card can be tuned, else one sentence that says why not."""
    try:
        choose(device, in_features=256, out_features=256, implementation="triton")
    except NoImplementation as error:
        return str(error)
    return None if device.type == "cuda" else f"{device.name} is no GPU; only a GPU's tiles can be measured."
