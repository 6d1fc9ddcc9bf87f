"""What every benchmark shares: the machine's description, interleaved timing, ComfyUI inside the process."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import torch

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def load_kernels():
    """The pack's kernels package, loaded by path as in the tests."""
    sys.path.insert(0, str(SUPPORT))
    import packtest

    packtest.load_pack()
    return importlib.import_module(f"{packtest.NAME}.kernels")


def load_comfy():
    """ComfyUI's `comfy` package from COMFYUI_PATH (or already importable), as its main program would import it."""
    arguments, sys.argv = sys.argv, ["main.py"]
    path = os.environ.get("COMFYUI_PATH")
    if path:
        sys.path.insert(0, str(Path(path).resolve()))
    importlib.import_module("comfy.options").enable_args_parsing()
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
    state = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    driver, clock, power, temperature = state[0].split(", ") if state else ["unknown"] * 4
    return {
        "gpu": torch.cuda.get_device_name(0),
        "driver": driver,
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "comfy_kitchen": version_of("comfy-kitchen"),
        "path": os.environ.get("TRITON_OVERRIDE_ARCH", "native"),
        "idle_clock": clock,
        "idle_power": power,
        "idle_temperature": temperature,
    }


class Timer:
    """Times calls with CUDA events, each after a write that clears the L2, interleaving the contestants."""

    def __init__(self, l2_bytes: int = 256 << 20):
        self._flush = torch.empty(l2_bytes, dtype=torch.int8, device="cuda")

    def _once(self, call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def medians_us(self, calls: dict, rounds: int = 25, warmup: int = 3) -> dict[str, float]:
        """Median microseconds of each call; round r runs every contestant once, so that clocks drift alike for all."""
        for call in calls.values():
            for _ in range(warmup):
                call()
        torch.cuda.synchronize()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                times[name].append(self._once(call))
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def geometric_mean(values) -> float:
    """Geometric mean of positive numbers."""
    return float(torch.tensor(list(values), dtype=torch.float64).log().mean().exp())
