"""Which card is this, and what can INT8 do on it?

`device_from` turns facts (name, compute capability, versions) into a `Device` without touching any hardware;
`detect` reads the facts of this machine and hands them to it. Nothing here runs at import, and the driver
version comes from NVML, so that looking creates no CUDA context.

A compute capability alone does not name a market: 8.6 is shared by the GeForce RTX 3090, the A10, A40 and RTX A6000,
and 7.5 by the RTX 2080 and by the GTX 1660, which has no tensor cores. Both come from the pair (capability, name).
"""

import ctypes
import functools
import importlib
import logging
import os
import re
import shutil
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger("native_int8.capability")

CONSUMER, PROFESSIONAL, DATA_CENTRE = "consumer", "professional", "data-centre"

_FAMILY_BY_MAJOR = {
    6: "pascal",
    7: "volta",
    8: "ampere",
    9: "hopper",
    10: "blackwell",
    11: "blackwell",
    12: "blackwell",
}
_FAMILY_EXCEPTIONS = {(7, 5): "turing", (8, 9): "ada"}

# Largest shared memory one block may ask for, by compute capability (CUDA programming guide, bytes).
_SHARED_MEMORY_PER_BLOCK_BYTES = {
    (7, 0): 96 * 1024, (7, 2): 96 * 1024, (7, 5): 64 * 1024,
    (8, 0): 163 * 1024, (8, 6): 99 * 1024, (8, 7): 163 * 1024, (8, 9): 99 * 1024,
    (9, 0): 227 * 1024, (10, 0): 227 * 1024, (10, 3): 227 * 1024, (11, 0): 227 * 1024,
    (12, 0): 99 * 1024, (12, 1): 99 * 1024,
}  # fmt: skip
_SHARED_MEMORY_WITHOUT_OPT_IN_BYTES = 48 * 1024

_TRANSLATED = re.compile(r"ZLUDA", re.I)
_EMBEDDED_OR_MINING = re.compile(r"\b(Orin|Xavier|Thor|Tegra|Jetson|DRIVE|CMP)\b", re.I)
_NVIDIA_CONSUMER = re.compile(
    r"GeForce|\bTITAN\b|\bMX\d{3}\b|\bGTX \d{3,4}\b|\bRTX (?:2050|2060|2070|2080|[3-9]0[5-9]0)\b", re.I
)
_NVIDIA_DATA_CENTRE = re.compile(
    r"\b(?:Tesla|GRID|A2|A10[GM]?|A16|A30X?|A40|A100X?|A800|H20|H100|H200|H800|GH200|L2|L4|L20|L40[SG]?"
    r"|B100|B200|B300|GB200|GB300|T4G?|T10|T40|P4|P6|P40|P100|V100S?|M10|M40|M60|K80|PG\d{3})\b|Server Edition",
    re.I,
)
_NVIDIA_PROFESSIONAL = re.compile(
    r"Quadro|\bNVS\b|\bRTX PRO\b|Ada Generation|\bRTX ?A\d{3,4}\b|\bRTX ?\d{3,4}\b|\bT\d{3,4}\b|\bGB10\b", re.I
)
_AMD_DATA_CENTRE = re.compile(r"Instinct|\bMI\d{2,3}", re.I)
_AMD_PROFESSIONAL = re.compile(r"Radeon (?:Pro|AI PRO)|FirePro|\bW\d{4}\b", re.I)
_AMD_CONSUMER = re.compile(r"Radeon|\bRX \d|\b[78]\d{2}M\b|\b8\d{3}S\b", re.I)
_INTEL_DATA_CENTRE = re.compile(r"Data Center|\bMax 1\d{3}\b|\bFlex\b", re.I)
_INTEL_PROFESSIONAL = re.compile(r"\bArc Pro\b|Arc\(TM\) Pro", re.I)
_INTEL_CONSUMER = re.compile(r"\bArc\b|Arc\(TM\)|Iris|UHD|Graphics", re.I)

# TU116 and TU117 report 7.5 like the RTX 20 series; their multiprocessors were built without tensor cores.
_TURING_WITHOUT_TENSOR_CORES = re.compile(
    r"\bGTX 16\d{2}\b|\bMX[45]\d{2}\b|\bT(?:400|500|550|600|1000|1200|2000)\b|\bCMP 30HX\b", re.I
)
_AMD_INT8_MATRIX = re.compile(r"gfx(?:908|90a|94\d|950|11\d\d|12\d\d)\b", re.I)


@dataclass(frozen=True)
class Device:
    """What one device and the software around it can do.

    Attributes:
        type: torch device type: "cuda" (NVIDIA, and AMD under ROCm), "cpu", "mps", "xpu", ...
        name: the driver's name of the card.
        compute_capability: (major, minor) of an NVIDIA card; None for every other device.
        family: "pascal", "volta", "turing", "ampere", "ada", "hopper", "blackwell"; None if not one of these.
        market: "consumer", "professional", "data-centre"; None where the name does not tell (embedded, mining, new).
        int8_tensor_cores: the hardware multiplies int8 matrices into int32.
        shared_memory_per_block_bytes: the most that one block can ask for.
        driver, torch, cuda, hip, triton: versions; None if absent.
        triton_missing: one sentence saying why Triton cannot be used, None if it can.
        platform: sys.platform of the machine, "linux", "win32" or "darwin".
        gcn_arch: AMD's name of the instruction set, such as "gfx1100".
    """

    type: str
    name: str
    compute_capability: tuple[int, int] | None
    family: str | None
    market: str | None
    int8_tensor_cores: bool
    multiprocessors: int | None
    shared_memory_per_block_bytes: int | None
    memory_bytes: int | None
    driver: str | None
    torch: str
    cuda: str | None
    hip: str | None
    triton: str | None
    triton_missing: str | None
    platform: str
    gcn_arch: str | None = None

    @property
    def is_consumer_ampere(self) -> bool:
        """True for GeForce RTX 30 cards, the RTX 2050 and the MX570: Ampere, and sold to consumers."""
        return self.family == "ampere" and self.market == CONSUMER

    @property
    def is_mig_slice(self) -> bool:
        """True for a part of a card made by NVIDIA's MIG, which has a part of its multiprocessors."""
        return re.search(r"\bMIG\b", self.name) is not None

    @property
    def sm(self) -> str:
        """The architecture in one word: "sm_86", "gfx1100" or the device type."""
        if self.compute_capability is not None:
            return "sm_{}{}".format(*self.compute_capability)
        return self.gcn_arch or self.type


def device_from(
    *,
    name: str,
    type: str = "cuda",
    compute_capability: tuple[int, int] | None = None,
    multiprocessors: int | None = None,
    shared_memory_per_block_bytes: int | None = None,
    memory_bytes: int | None = None,
    driver: str | None = None,
    torch: str = "",
    cuda: str | None = None,
    hip: str | None = None,
    triton: str | None = None,
    triton_missing: str | None = None,
    platform: str = "linux",
    gcn_arch: str | None = None,
) -> Device:
    """Classify a device from its facts alone; looks at no hardware.

    A capability newer than this table keeps family None; int8_tensor_cores is then True, because PTX promises int8
    `mma` to every target from sm_75 on. Under ROCm and ZLUDA the "compute capability" is not NVIDIA's and is dropped.
    """
    translated = _TRANSLATED.search(name) is not None
    nvidia = type == "cuda" and hip is None and not translated
    capability = compute_capability if nvidia else None
    if shared_memory_per_block_bytes is None and capability is not None:
        shared_memory_per_block_bytes = _shared_memory_per_block_bytes(capability)
    return Device(
        type=type,
        name=name,
        compute_capability=capability,
        family=_family(capability),
        market=_market(name, type, capability, amd=hip is not None or translated),
        int8_tensor_cores=_has_int8_tensor_cores(name, capability, gcn_arch if hip is not None else None),
        multiprocessors=multiprocessors,
        shared_memory_per_block_bytes=shared_memory_per_block_bytes,
        memory_bytes=memory_bytes,
        driver=driver,
        torch=torch,
        cuda=cuda,
        hip=hip,
        triton=triton,
        triton_missing=triton_missing,
        platform=platform,
        gcn_arch=gcn_arch,
    )


def _family(capability: tuple[int, int] | None) -> str | None:
    if capability is None:
        return None
    return _FAMILY_EXCEPTIONS.get(capability, _FAMILY_BY_MAJOR.get(capability[0]))


def _shared_memory_per_block_bytes(capability: tuple[int, int]) -> int:
    if capability in _SHARED_MEMORY_PER_BLOCK_BYTES:
        return _SHARED_MEMORY_PER_BLOCK_BYTES[capability]
    # 99 KB is the least that any card since Ampere gives, so a tile that fits it fits an unknown one.
    return 99 * 1024 if capability >= (8, 0) else _SHARED_MEMORY_WITHOUT_OPT_IN_BYTES


def _has_int8_tensor_cores(name: str, capability: tuple[int, int] | None, gcn_arch: str | None) -> bool:
    if capability is not None:
        if capability == (7, 5):
            return _TURING_WITHOUT_TENSOR_CORES.search(name) is None
        return capability >= (7, 2)
    return gcn_arch is not None and _AMD_INT8_MATRIX.match(gcn_arch) is not None


def _market(name: str, type: str, capability: tuple[int, int] | None, *, amd: bool) -> str | None:
    if amd:
        return _first_match(name, (_AMD_DATA_CENTRE, _AMD_PROFESSIONAL, _AMD_CONSUMER))
    if type == "xpu":
        return _first_match(name, (_INTEL_DATA_CENTRE, _INTEL_PROFESSIONAL, _INTEL_CONSUMER))
    if type == "mps":
        return CONSUMER
    if type != "cuda" or _EMBEDDED_OR_MINING.search(name):
        return None
    if re.search("GeForce", name, re.I):
        return CONSUMER
    market = _first_match(name, (_NVIDIA_DATA_CENTRE, _NVIDIA_PROFESSIONAL, _NVIDIA_CONSUMER))
    # "RTX 3090" without "GeForce" reads like a professional "RTX 4000"; the last two digits tell them apart.
    if market == PROFESSIONAL and _NVIDIA_CONSUMER.search(name) and not re.search("Quadro|Ada Gen|RTX PRO", name, re.I):
        market = CONSUMER
    if market is None and capability in ((8, 0), (9, 0), (10, 0), (10, 3)):
        market = DATA_CENTRE
    return market


def _first_match(name: str, patterns: tuple[re.Pattern, re.Pattern, re.Pattern]) -> str | None:
    for market, pattern in zip((DATA_CENTRE, PROFESSIONAL, CONSUMER), patterns, strict=True):
        if pattern.search(name):
            return market
    return None


def detect(device: torch.device | str | int | None = None) -> Device:
    """The facts of one device of this machine.

    Args:
        device: what torch.device takes, or an index of the "cuda" type; None is torch's current accelerator, else the CPU.
    Returns:
        Device, cached per type and index for the life of the process.
    Raises:
        RuntimeError: torch has no such device (torch's own message).
    """
    if device is None:
        resolved = _default_device()
    elif isinstance(device, int):
        resolved = torch.device("cuda", device)
    else:
        resolved = torch.device(device)
    index = resolved.index
    if index is None and resolved.type in ("cuda", "xpu"):
        index = getattr(torch, resolved.type).current_device()
    return _detect(resolved.type, index)


def _default_device() -> torch.device:
    if torch.cuda.is_available():
        return torch.device("cuda")
    if hasattr(torch, "xpu") and torch.xpu.is_available():
        return torch.device("xpu")
    if torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")


@functools.cache
def _detect(type: str, index: int | None) -> Device:
    triton, triton_missing = probe_triton()
    software = {
        "driver": nvidia_driver_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "triton": triton,
        "triton_missing": triton_missing,
        "platform": sys.platform,
    }
    if type == "cuda":
        facts = torch.cuda.get_device_properties(index)
        return device_from(
            name=facts.name,
            compute_capability=(facts.major, facts.minor),
            multiprocessors=facts.multi_processor_count,
            shared_memory_per_block_bytes=getattr(facts, "shared_memory_per_block_optin", None),
            memory_bytes=facts.total_memory,
            gcn_arch=facts.gcnArchName.split(":")[0] if torch.version.hip else None,
            **software,
        )
    if type == "xpu":
        facts = torch.xpu.get_device_properties(index)
        return device_from(type="xpu", name=facts.name, memory_bytes=facts.total_memory, **software)
    name = {"mps": "Apple GPU", "cpu": _cpu_name()}.get(type, type)
    return device_from(type=type, name=name, **software)


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        log.debug("no /proc/cpuinfo on this platform")
    return os.environ.get("PROCESSOR_IDENTIFIER", "CPU")


def probe_triton(import_module: Callable[[str], ModuleType] = importlib.import_module) -> tuple[str | None, str | None]:
    """Find out whether Triton can compile and launch here.

    Args:
        import_module: what imports "triton"; a test hands in one that fails.
    Returns:
        (version, None) if Triton can be used, else (None, one sentence with the reason).
    """
    try:
        module = import_module("triton")
        import_module("triton.language")
        version = module.__version__
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return None, "Triton is not installed."
        return None, f"Triton is installed but its import stopped: {error}."
    # A broken binary raises OSError, a half-removed or mismatched package AttributeError.
    except (ImportError, OSError, AttributeError) as error:
        return None, f"Triton is installed but its import stopped with {error.__class__.__name__}: {error}"
    gap = _launcher_gap()
    return (version, None) if gap is None else (None, f"Triton {version} {gap}")


def _launcher_gap() -> str | None:
    """What Triton lacks to build the small C module that launches kernels; None if nothing."""
    # Triton for Windows brings its own compiler
    if sys.platform == "linux" and not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "needs a C compiler to build its launchers and found none (gcc, clang or CC)."
    scheme = sysconfig.get_default_scheme()
    # Debian's own scheme names a folder without headers; Triton looks at this one too
    folder = sysconfig.get_paths("posix_prefix" if scheme == "posix_local" else scheme)["include"]
    if not (Path(folder) / "Python.h").is_file():
        return f"needs Python's C headers to build its launchers and found no Python.h in {folder}."
    return None


@functools.cache
def nvidia_driver_version() -> str | None:
    """The NVIDIA driver's version, such as "580.95.05"; None without a driver. Creates no CUDA context."""
    try:
        nvml = ctypes.CDLL("nvml.dll" if sys.platform == "win32" else "libnvidia-ml.so.1")
    except OSError:
        return _driver_version_from_proc()
    if nvml.nvmlInit_v2() != 0:
        return _driver_version_from_proc()
    try:
        version = ctypes.create_string_buffer(96)
        failed = nvml.nvmlSystemGetDriverVersion(version, ctypes.c_uint(len(version)))
        return None if failed else version.value.decode("ascii", "replace")
    finally:
        nvml.nvmlShutdown()


def _driver_version_from_proc() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return found.group(1) if found else None
