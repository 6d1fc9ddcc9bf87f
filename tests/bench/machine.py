"""What every benchmark shares: the machine's description, interleaved timing, ComfyUI inside the process."""

import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def load_kernels():
    """The pack's kernels package, loaded by path as in the tests."""
    sys.path.insert(0, str(SUPPORT))
    import packtest

    packtest.load_pack()
    return importlib.import_module(f"{packtest.NAME}.kernels")


def load_comfy(before=None):
    """ComfyUI's `comfy` package from COMFYUI_PATH (or already importable), as its main program would import it.

    before: called once its command line is read and before anything else of it is imported.
    """
    arguments, sys.argv = sys.argv, ["main.py"] + ([] if torch.cuda.is_available() else ["--cpu"])
    path = os.environ.get("COMFYUI_PATH")
    if path:
        sys.path.insert(0, str(Path(path).resolve()))
    importlib.import_module("comfy.options").enable_args_parsing()
    if before is not None:
        before()
    for name in ("comfy.sd", "comfy.utils", "comfy.quant_ops", "comfy.patcher_extension", "comfy.model_management"):
        importlib.import_module(name)
    sys.argv = arguments
    return sys.modules["comfy"]


def version_of(module: str) -> str:
    """Version of an installed distribution, or "none"."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(module)
    except PackageNotFoundError:
        return getattr(sys.modules.get(module.replace("-", "_")), "__version__", "none")


def describe() -> dict[str, str]:
    """GPU, driver, versions and path (native, or the architecture that kernels were told to compile for)."""
    import triton

    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,power.draw,temperature.gpu", "--format=csv,noheader"]
    state = []
    if shutil.which(query[0]):
        state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    driver, clock, power, temperature = state[0].split(", ") if state else ["unknown"] * 4
    return {
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none",
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        # unpacked from its wheel it carries no version to read
        "comfy_kitchen": os.environ.get("NATIVE_INT8_KITCHEN") or version_of("comfy-kitchen"),
        "path": os.environ.get("TRITON_OVERRIDE_ARCH", "native"),
        "idle_clock": clock,
        "idle_power": power,
        "idle_temperature": temperature,
    }


class Timer:
    """Times calls with CUDA events, each after a write that clears the L2, interleaving the contestants.

    Before each call the GPU is given idle work that outlasts the call's host time, so that all of the call's kernels
    are queued when the clock starts: the result is the GPU's time alone. Host time is measured beside it.
    """

    def __init__(self, l2_bytes: int = 256 << 20):
        self._flush = torch.empty(l2_bytes, dtype=torch.int8, device="cuda")
        cycles = 2_000_000
        torch.cuda._sleep(cycles)
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        torch.cuda._sleep(cycles)
        end.record()
        end.synchronize()
        self._cycles_per_us = cycles / (start.elapsed_time(end) * 1e3)

    def _once(self, call, cover_us: float) -> tuple[float, float]:
        """(GPU microseconds, host microseconds) of one call."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(int(cover_us * self._cycles_per_us))
        start.record()
        before = time.perf_counter()
        call()
        host = (time.perf_counter() - before) * 1e6
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3, host

    def warm_up(self, call, warmup: int = 3) -> float:
        """Run a call `warmup` times; returns the microseconds of idle work that cover its host time."""
        host = []
        for _ in range(max(warmup, 1)):
            torch.cuda.synchronize()
            before = time.perf_counter()
            call()
            host.append((time.perf_counter() - before) * 1e6)
        torch.cuda.synchronize()
        return min(2 * min(host) + 30, 5000.0)

    def round_us(self, calls: dict, covers: dict[str, float], samples: dict[str, list[tuple[float, float]]]) -> None:
        """Run every contestant once and append its (GPU, host) microseconds to `samples`."""
        for name, call in calls.items():
            samples[name].append(self._once(call, covers[name]))

    def medians_us(self, calls: dict, rounds: int = 25, warmup: int = 3) -> dict[str, float]:
        """Median GPU microseconds of each call; a round runs every contestant once, so that clocks drift alike for all."""
        covers = {name: self.warm_up(call, warmup) for name, call in calls.items()}
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
        for _ in range(rounds):
            self.round_us(calls, covers, samples)
        return {name: sorted(gpu for gpu, _ in values)[len(values) // 2] for name, values in samples.items()}


def geometric_mean(values) -> float:
    """Geometric mean of positive numbers."""
    return float(torch.tensor(list(values), dtype=torch.float64).log().mean().exp())


def commit() -> str:
    """Short commit of the pack that is measured, "+" when files differ from it.

    A copy whose git is missing or older is told its commit by NATIVE_INT8_COMMIT; else it is "unknown".
    """
    if os.environ.get("NATIVE_INT8_COMMIT"):
        return os.environ["NATIVE_INT8_COMMIT"]
    git = ["git", "-C", str(SUPPORT)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True).stdout
        status = subprocess.run(
            [*git, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.strip() + ("+" if status.strip() else "")
