"""What software surrounds the pack, what of it is missing, and the command that mends it.

`look` reads this machine; `missing` is pure, so a test can ask it about any machine. Commands name the Python
that runs ComfyUI, because installing into another one is the usual mistake.
"""

import importlib
import importlib.metadata
import logging
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from ...kernels.capability import Device, detect

log = logging.getLogger("native_int8.surroundings")

PIP, CONDA, PORTABLE = "pip", "conda", "portable"
OLDEST_TORCH = (2, 7)
# Smallest driver branch for a CUDA major version, from NVIDIA's compatibility table.
_DRIVER_FOR_CUDA = {12: 525, 13: 580}
# The Triton minor version that each torch was built against.
_TRITON_FOR_TORCH = {
    (2, 7): (3, 3), (2, 8): (3, 4), (2, 9): (3, 5), (2, 10): (3, 6), (2, 11): (3, 6),
    (2, 12): (3, 7), (2, 13): (3, 7), (2, 14): (3, 8),
}  # fmt: skip


@dataclass(frozen=True)
class Surroundings:
    """Facts about the installation.

    Attributes:
        install: "pip" (any virtual environment), "conda", or "portable" (ComfyUI's Windows archive).
        python: path of the interpreter.
        prefix: root folder of its environment.
        triton_requirement: what the installed torch asks for, such as "triton==3.5.1"; None if it asks for nothing.
        kitchen: version of comfy-kitchen, None if it cannot be imported.
        kitchen_missing: why not.
        backends: comfy-kitchen's backends and their states, such as ("cuda", "off: needs cu130").
        forced_cpu: ComfyUI was told to use the CPU although torch sees a GPU.
    """

    install: str = PIP
    python: str = "python"
    prefix: str = ""
    triton_requirement: str | None = None
    kitchen: str | None = None
    kitchen_missing: str | None = None
    backends: tuple[tuple[str, str], ...] = ()
    forced_cpu: bool = False


@dataclass(frozen=True)
class Missing:
    """Something that keeps INT8 from its full speed, and what mends it."""

    what: str
    why: str
    command: str


def look(*, forced_cpu: bool = False) -> Surroundings:
    """Read the facts of this process."""
    kitchen, kitchen_missing, backends = _kitchen()
    return Surroundings(
        install=_install(),
        python=sys.executable,
        prefix=sys.prefix,
        triton_requirement=_triton_requirement(),
        kitchen=kitchen,
        kitchen_missing=kitchen_missing,
        backends=backends,
        forced_cpu=forced_cpu,
    )


def other_gpus(torch_device: torch.device) -> list[tuple[str, Device]]:
    """Name and facts of each further GPU, when a CUDA device runs; mixed cards differ in what INT8 is worth."""
    if torch_device.type != "cuda":
        return []
    here = torch.cuda.current_device() if torch_device.index is None else torch_device.index
    return [(f"cuda:{i}", detect(i)) for i in range(torch.cuda.device_count()) if i != here]


def missing(device: Device, around: Surroundings) -> list[Missing]:
    """What is missing for INT8 at full speed on this device; empty if nothing is."""
    found = [_torch_too_old(device, around), _driver(device, around), _cpu_torch(device, around)]
    if device.type == "cuda" and device.hip is None and device.triton is None:
        found.append(_triton(device, around))
    if around.forced_cpu:
        found.append(
            Missing(
                "GPU", "ComfyUI was started with --cpu, so nothing runs on the GPU.", "Start ComfyUI without --cpu."
            )
        )
    if around.kitchen is None:
        why = around.kitchen_missing or "comfy-kitchen is not installed."
        found.append(Missing("comfy-kitchen", why, pip_install(around, "-r requirements.txt") + _IN_COMFYUI))
    return [entry for entry in found if entry is not None]


_IN_COMFYUI = "   (in the ComfyUI folder)"


def pip_install(around: Surroundings, what: str) -> str:
    """The command line that installs `what` for the Python that runs ComfyUI."""
    if around.install == PORTABLE:
        folder = Path(around.python.replace("\\", "/")).parent.name
        return f".\\{folder}\\python.exe -m pip install {what}"
    if around.install == CONDA:
        return f"conda run -p {_quoted(around.prefix)} python -m pip install {what}"
    return f"{_quoted(around.python)} -m pip install {what}"


def _quoted(path: str) -> str:
    # shlex quotes a backslash, which a Windows path needs bare
    if "\\" in path:
        return f'"{path}"' if " " in path else path
    return shlex.quote(path)


def _torch_too_old(device: Device, around: Surroundings) -> Missing | None:
    version = version_pair(device.torch)
    if version is None or version >= OLDEST_TORCH:
        return None
    why = f"torch {device.torch} is older than {OLDEST_TORCH[0]}.{OLDEST_TORCH[1]}, the oldest that this pack supports."
    return Missing("torch", why, _upgrade_torch(device, around))


def _driver(device: Device, around: Surroundings) -> Missing | None:
    if device.type != "cpu" or device.driver is None or device.cuda is None or around.forced_cpu:
        return None
    needed = _DRIVER_FOR_CUDA.get(int(device.cuda.split(".")[0]))
    if needed is None or int(device.driver.split(".")[0]) >= needed:
        why = f"torch {device.torch} sees no GPU although driver {device.driver} is loaded."
        return Missing("GPU", why, "Unset CUDA_VISIBLE_DEVICES, restart the machine, and start ComfyUI again.")
    why = f"Driver {device.driver} is too old for the CUDA {device.cuda} of this torch, which needs {needed} or newer."
    return Missing("driver", why, f"Install NVIDIA driver {needed} or newer and restart the machine.")


def _cpu_torch(device: Device, around: Surroundings) -> Missing | None:
    if device.type != "cpu" or device.driver is None or device.cuda is not None or device.hip is not None:
        return None
    why = f"torch {device.torch} is built for the CPU only, but an NVIDIA driver ({device.driver}) is loaded."
    return Missing("torch with CUDA", why, _upgrade_torch(device, around))


def _upgrade_torch(device: Device, around: Surroundings) -> str:
    if around.install == PORTABLE:
        return ".\\update\\update_comfyui_and_python_dependencies.bat"
    cuda = "cu130" if device.driver is None or int(device.driver.split(".")[0]) >= _DRIVER_FOR_CUDA[13] else "cu128"
    packages = (
        f"--upgrade --force-reinstall torch torchvision torchaudio --index-url https://download.pytorch.org/whl/{cuda}"
    )
    return pip_install(around, packages)


def _triton(device: Device, around: Surroundings) -> Missing:
    why = device.triton_missing or "Triton cannot be used."
    if "C compiler" in why:
        if device.platform == "win32":
            return Missing("C compiler", why, pip_install(around, f"--force-reinstall {_triton_windows(device)}"))
        if around.install == CONDA:
            command = f"conda install -p {_quoted(around.prefix)} -c conda-forge c-compiler"
        else:
            command = "sudo apt install gcc   (Debian, Ubuntu; dnf or pacman elsewhere)"
        return Missing("C compiler", why, command)
    if "Python.h" in why:
        if device.platform == "win32":
            command = "Copy the folders include and libs of a Python of the same version into the folder of python.exe."
        elif around.install == CONDA:
            command = f"conda install -p {_quoted(around.prefix)} --force-reinstall python"
        else:
            command = "sudo apt install python3-dev   (Debian, Ubuntu; python3-devel with dnf)"
        return Missing("Python's C headers", why, command)
    if device.platform == "win32":
        return Missing("Triton", why, pip_install(around, f"-U {_triton_windows(device)}"))
    requirement = around.triton_requirement or "triton"
    reinstall = "" if "not installed" in why else "--force-reinstall --no-deps "
    return Missing("Triton", why, pip_install(around, f'{reinstall}"{requirement}"'))


def _triton_windows(device: Device) -> str:
    triton = _TRITON_FOR_TORCH.get(version_pair(device.torch))
    return "triton-windows" if triton is None else f'"triton-windows<{triton[0]}.{triton[1] + 1}"'


def version_pair(version: str) -> tuple[int, int] | None:
    """(major, minor) of a version such as "2.14.1+cu130"; None if it does not start with two numbers."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found.group(1)), int(found.group(2))) if found else None


def _install() -> str:
    if sys.platform == "win32" and Path(sys.executable).parent.name.lower().startswith("python_embed"):
        return PORTABLE
    if os.path.isdir(os.path.join(sys.prefix, "conda-meta")):
        return CONDA
    return PIP


def _triton_requirement() -> str | None:
    try:
        requirements = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    for requirement in requirements:
        found = re.match(r"(?:pytorch-)?triton\s*[=<>~!]=?[^;]*", requirement)
        if found:
            return found.group(0).strip()
    return None


def _kitchen() -> tuple[str | None, str | None, tuple[tuple[str, str], ...]]:
    try:
        kitchen = importlib.import_module("comfy_kitchen")
        states = kitchen.list_backends()
    except ModuleNotFoundError as error:
        why = "comfy-kitchen is not installed." if error.name == "comfy_kitchen" else f"comfy-kitchen stopped: {error}."
        return None, why, ()
    except (ImportError, OSError, AttributeError) as error:
        return None, f"comfy-kitchen stopped with {error.__class__.__name__}: {error}", ()
    try:
        version = importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        version = "of unknown version"
    return version, None, tuple((name, _state(facts)) for name, facts in states.items())


def _state(facts: dict) -> str:
    if not facts.get("available"):
        return f"off: {facts.get('unavailable_reason') or 'no reason given'}"
    if facts.get("disabled"):
        return "off: switched off by ComfyUI"
    return "on" if "int8_linear" in facts.get("capabilities", ()) else "on, without an INT8 linear"
