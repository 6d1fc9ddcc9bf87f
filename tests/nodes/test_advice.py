"""The capability check's text for made-up machines."""

import re

import pytest
from native_int8.kernels.capability import device_from
from native_int8.nodes.int8 import advice, deployment, surroundings
from native_int8.nodes.int8.surroundings import CONDA, PORTABLE, Surroundings

READY = {"torch": "2.9.1+cu130", "cuda": "13.0", "driver": "580.95.05", "triton": "3.5.1"}
KITCHEN = {"kitchen": "0.2.26", "backends": (("eager", "on"), ("cuda", "off: needs cu130"))}
NOT_INSTALLED = "Triton is not installed."


def card(name, compute_capability, **facts):
    return device_from(name=name, compute_capability=compute_capability, **{**READY, **facts})


RTX_3090 = card("NVIDIA GeForce RTX 3090", (8, 6), memory_bytes=24 * 1024**3, multiprocessors=82)


def test_every_number_has_an_evidence_class_and_a_source():
    outlooks = [value for value in vars(deployment).values() if isinstance(value, deployment.Outlook)]
    assert len(outlooks) >= 15
    for outlook in outlooks:
        # ratios and times belong into claims, where their source stands
        assert not re.search(r"\d(?:\.\d)?(?:x| ms| s)\b", f"{outlook.verdict} {outlook.why}"), outlook
        for claim in outlook.claims:
            assert claim.evidence in (deployment.MEASURED, deployment.PUBLISHED, deployment.MODELLED)
            assert claim.source


@pytest.mark.parametrize(
    ("device", "words"),
    [
        (RTX_3090, "fused INT8 kernel (Triton)"),
        (card("NVIDIA GeForce RTX 3090", (8, 6), triton=None, triton_missing=NOT_INSTALLED), NOT_INSTALLED),
        (card("NVIDIA GeForce RTX 2080 Ti", (7, 5)), "not triton: needs"),
        (device_from(name="AMD Ryzen 9 7950X", type="cpu", triton_missing=NOT_INSTALLED), "not fast"),
    ],
    ids=["Triton", "Triton missing", "Turing", "CPU"],
)
def test_layer_paths_say_which_implementation_and_why(device, words):
    paths = advice.layer_paths(device)
    assert len(paths) == len(advice.LAYER_KINDS)
    assert all(words in path for _, path in paths)


def commands(device, **around):
    found = surroundings.missing(device, Surroundings(**{**KITCHEN, **around}))
    return {entry.what: entry.command for entry in found}


LINUX = {"python": "/opt/comfy/venv/bin/python", "triton_requirement": "triton==3.5.1"}
PORTABLE_FOLDER = {"install": PORTABLE, "python": "C:\\ComfyUI_windows_portable\\python_embeded\\python.exe"}
WITHOUT_TRITON = {"triton": None, "triton_missing": NOT_INSTALLED}


def test_nothing_is_missing_on_a_ready_machine():
    assert commands(RTX_3090) == {}
    assert "\nMissing: nothing\n" in advice.report(RTX_3090, Surroundings(**KITCHEN))


@pytest.mark.parametrize(
    ("facts", "around", "command"),
    [
        ({}, LINUX, '/opt/comfy/venv/bin/python -m pip install "triton==3.5.1"'),
        ({}, {**LINUX, "python": "/opt/my venv/bin/python"}, "'/opt/my venv/bin/python' -m pip install \"triton==3.5.1\""),
        ({}, {**LINUX, "install": CONDA, "prefix": "/opt/conda/envs/comfy"},
         'conda run -p /opt/conda/envs/comfy python -m pip install "triton==3.5.1"'),
        ({"platform": "win32"}, PORTABLE_FOLDER, '.\\python_embeded\\python.exe -m pip install -U "triton-windows<3.6"'),
        ({"platform": "win32", "torch": "2.7.1+cu128"}, PORTABLE_FOLDER,
         '.\\python_embeded\\python.exe -m pip install -U "triton-windows<3.4"'),
        ({"platform": "win32", "torch": "3.1.0"}, PORTABLE_FOLDER,
         ".\\python_embeded\\python.exe -m pip install -U triton-windows"),
        ({"platform": "win32"}, {"python": "C:\\comfy\\venv\\Scripts\\python.exe"},
         'C:\\comfy\\venv\\Scripts\\python.exe -m pip install -U "triton-windows<3.6"'),
        ({"triton_missing": "Triton is installed but its import stopped with OSError: libtriton.so"}, LINUX,
         '/opt/comfy/venv/bin/python -m pip install --force-reinstall --no-deps "triton==3.5.1"'),
    ],
    ids=["Linux", "folder with a space", "conda", "portable", "portable torch 2.7", "portable newer torch",
         "Windows venv", "broken on Linux"],
)  # fmt: skip
def test_command_that_brings_triton(facts, around, command):
    device = card("NVIDIA GeForce RTX 3090", (8, 6), **{**WITHOUT_TRITON, **facts})
    assert commands(device, **around) == {"Triton": command}


@pytest.mark.parametrize(
    ("around", "command"),
    [(LINUX, "sudo apt install gcc"), ({"install": CONDA, "prefix": "/opt/c"}, "conda install -p /opt/c")],
    ids=["Linux", "conda"],
)
def test_command_that_brings_a_c_compiler(around, command):
    device = card("NVIDIA GeForce RTX 3090", (8, 6), triton=None, triton_missing="Triton 3.5.1 needs a C compiler")
    assert commands(device, **around)["C compiler"].startswith(command)


def test_missing_python_headers_are_named():
    device = card("NVIDIA GeForce RTX 3090", (8, 6), triton=None, triton_missing="found no Python.h in /usr/include")
    assert "python3-dev" in commands(device, **LINUX)["Python's C headers"]


def test_triton_is_not_asked_for_where_it_would_not_be_used():
    assert commands(device_from(name="AMD Ryzen", type="cpu", torch="2.9.1", **WITHOUT_TRITON)) == {}


def test_old_torch_is_named():
    device = card("NVIDIA GeForce RTX 3090", (8, 6), torch="2.5.1+cu124", cuda="12.4")
    assert commands(device, **LINUX)["torch"].startswith("/opt/comfy/venv/bin/python -m pip install --upgrade")
    assert commands(device, **PORTABLE_FOLDER)["torch"] == ".\\update\\update_comfyui_and_python_dependencies.bat"


@pytest.mark.parametrize(
    ("facts", "around", "what", "words"),
    [
        ({"cuda": None, "torch": "2.9.1+cpu", "driver": "580.95"}, LINUX, "torch with CUDA", "whl/cu130"),
        ({"cuda": None, "torch": "2.9.1+cpu", "driver": "560.35"}, LINUX, "torch with CUDA", "whl/cu128"),
        ({"cuda": "13.0", "driver": "560.35"}, LINUX, "driver", "580 or newer"),
        ({"cuda": "13.0", "driver": "580.95"}, LINUX, "GPU", "CUDA_VISIBLE_DEVICES"),
        ({"cuda": "13.0", "driver": "580.95"}, {"forced_cpu": True}, "GPU", "without --cpu"),
    ],
    ids=["CPU torch", "CPU torch, older driver", "old driver", "hidden GPU", "--cpu"],
)
def test_a_gpu_that_torch_does_not_use_is_explained(facts, around, what, words):
    device = device_from(name="AMD Ryzen", type="cpu", **{"torch": "2.9.1+cu130", **facts})
    assert words in commands(device, **around)[what]
    assert len(commands(device, **around)) == 1


def test_missing_kitchen_is_named():
    found = commands(RTX_3090, kitchen=None, kitchen_missing="comfy-kitchen is not installed.", **LINUX)
    assert found["comfy-kitchen"].startswith("/opt/comfy/venv/bin/python -m pip install -r requirements.txt")


def test_look_reads_this_process():
    around = surroundings.look()
    assert around.install in (surroundings.PIP, CONDA, PORTABLE)
    assert around.python
    assert (around.kitchen is None) == (around.kitchen_missing is not None)
