"""Each row of CARDS is a made-up device: the facts a driver would report, and the verdict expected of them."""

import subprocess
import sys

import pytest
import torch
from native_int8.kernels import capability

C, P, D = "consumer", "professional", "data-centre"

# name, compute capability, family, market, int8 tensor cores, consumer Ampere
CARDS = [
    ("NVIDIA GeForce GTX 1060 6GB", (6, 1), "pascal", C, False, False),
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), "pascal", C, False, False),
    ("Tesla P40", (6, 1), "pascal", D, False, False),
    ("Quadro P4000", (6, 1), "pascal", P, False, False),
    ("Tesla V100-SXM2-32GB", (7, 0), "volta", D, False, False),
    ("NVIDIA TITAN V", (7, 0), "volta", C, False, False),
    ("NVIDIA GeForce GTX 1650", (7, 5), "turing", C, False, False),
    ("NVIDIA GeForce GTX 1660 SUPER", (7, 5), "turing", C, False, False),
    ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", (7, 5), "turing", C, False, False),
    ("NVIDIA GeForce MX450", (7, 5), "turing", C, False, False),
    ("NVIDIA T1000 8GB", (7, 5), "turing", P, False, False),
    ("NVIDIA CMP 30HX", (7, 5), "turing", None, False, False),
    ("NVIDIA GeForce RTX 2060", (7, 5), "turing", C, True, False),
    ("NVIDIA GeForce RTX 2080 Ti", (7, 5), "turing", C, True, False),
    ("NVIDIA TITAN RTX", (7, 5), "turing", C, True, False),
    ("Quadro RTX 5000", (7, 5), "turing", P, True, False),
    ("Tesla T4", (7, 5), "turing", D, True, False),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "ampere", D, True, False),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), "ampere", D, True, False),
    ("NVIDIA A30", (8, 0), "ampere", D, True, False),
    ("NVIDIA CMP 170HX", (8, 0), "ampere", None, True, False),
    ("NVIDIA GeForce RTX 2050", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce MX570", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3050 Laptop GPU", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3060", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3060 Ti", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3080 12GB", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3080 SUPER", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3090", (8, 6), "ampere", C, True, True),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "ampere", C, True, True),
    ("GeForce RTX 3090", (8, 6), "ampere", C, True, True),
    ("NVIDIA RTX 3090", (8, 6), "ampere", C, True, True),
    ("NVIDIA A40", (8, 6), "ampere", D, True, False),
    ("NVIDIA A40-48Q", (8, 6), "ampere", D, True, False),
    ("NVIDIA A10", (8, 6), "ampere", D, True, False),
    ("NVIDIA A10G", (8, 6), "ampere", D, True, False),
    ("NVIDIA A16", (8, 6), "ampere", D, True, False),
    ("NVIDIA A2", (8, 6), "ampere", D, True, False),
    ("NVIDIA RTX A6000", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTXA6000-24Q", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTX A5000", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTX A4000", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTX A2000 12GB", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTX A3000 12GB Laptop GPU", (8, 6), "ampere", P, True, False),
    ("NVIDIA RTX A500 Laptop GPU", (8, 6), "ampere", P, True, False),
    ("NVIDIA CMP 90HX", (8, 6), "ampere", None, True, False),
    ("NVIDIA Graphics Device", (8, 6), "ampere", None, True, False),
    ("Orin", (8, 7), "ampere", None, True, False),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), "ada", C, True, False),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), "ada", C, True, False),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), "ada", C, True, False),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), "ada", P, True, False),
    ("NVIDIA RTX 4000 SFF Ada Generation", (8, 9), "ada", P, True, False),
    ("NVIDIA L4", (8, 9), "ada", D, True, False),
    ("NVIDIA L40S", (8, 9), "ada", D, True, False),
    ("NVIDIA H100 80GB HBM3", (9, 0), "hopper", D, True, False),
    ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", (9, 0), "hopper", D, True, False),
    ("NVIDIA H200", (9, 0), "hopper", D, True, False),
    ("NVIDIA GH200 480GB", (9, 0), "hopper", D, True, False),
    ("NVIDIA B200", (10, 0), "blackwell", D, True, False),
    ("NVIDIA B300 SXM6 AC", (10, 3), "blackwell", D, True, False),
    ("NVIDIA Thor", (11, 0), "blackwell", None, True, False),
    ("NVIDIA GeForce RTX 5060 Ti", (12, 0), "blackwell", C, True, False),
    ("NVIDIA GeForce RTX 5090", (12, 0), "blackwell", C, True, False),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), "blackwell", C, True, False),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), "blackwell", P, True, False),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "blackwell", D, True, False),
    ("NVIDIA GB10", (12, 1), "blackwell", P, True, False),
    ("NVIDIA GeForce RTX 9090", (99, 0), None, C, True, False),
    ("NVIDIA Graphics Device", (99, 0), None, None, True, False),
]  # fmt: skip

# facts beyond the name; expected sm, market, int8 tensor cores
OTHERS = [
    ({"name": "AMD Radeon RX 7900 XTX", "compute_capability": (11, 0), "hip": "6.4", "gcn_arch": "gfx1100"}, "gfx1100", C, True),
    ({"name": "AMD Radeon RX 6800 XT", "compute_capability": (10, 3), "hip": "6.4", "gcn_arch": "gfx1030"}, "gfx1030", C, False),
    ({"name": "AMD Radeon RX 9070 XT", "compute_capability": (12, 0), "hip": "7.0", "gcn_arch": "gfx1201"}, "gfx1201", C, True),
    ({"name": "AMD Radeon Pro W7900", "compute_capability": (11, 0), "hip": "6.4", "gcn_arch": "gfx1100"}, "gfx1100", P, True),
    ({"name": "AMD Instinct MI300X", "compute_capability": (9, 4), "hip": "6.4", "gcn_arch": "gfx942"}, "gfx942", D, True),
    ({"name": "AMD Radeon RX 6800 [ZLUDA]", "compute_capability": (8, 6)}, "cuda", C, False),
    ({"name": "Intel(R) Arc(TM) B580 Graphics", "type": "xpu"}, "xpu", C, False),
    ({"name": "Intel(R) Arc(TM) Pro B60 Graphics", "type": "xpu"}, "xpu", P, False),
    ({"name": "Intel(R) Data Center GPU Max 1550", "type": "xpu"}, "xpu", D, False),
    ({"name": "Apple GPU", "type": "mps", "platform": "darwin"}, "mps", C, False),
    ({"name": "AMD Ryzen 9 7950X 16-Core Processor", "type": "cpu"}, "cpu", None, False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "compute_capability", "family", "market", "tensor_cores", "consumer_ampere"),
    CARDS,
    ids=[f"{row[0]}-{row[1][0]}.{row[1][1]}" for row in CARDS],
)
def test_verdict_on_nvidia_cards(name, compute_capability, family, market, tensor_cores, consumer_ampere):
    device = capability.device_from(name=name, compute_capability=compute_capability)
    verdict = (device.family, device.market, device.int8_tensor_cores, device.is_consumer_ampere)
    assert verdict == (family, market, tensor_cores, consumer_ampere)
    assert device.sm == "sm_{}{}".format(*compute_capability)


@pytest.mark.parametrize(("facts", "sm", "market", "tensor_cores"), OTHERS, ids=[row[0]["name"] for row in OTHERS])
def test_verdict_on_everything_else(facts, sm, market, tensor_cores):
    device = capability.device_from(**facts)
    assert (device.sm, device.market, device.int8_tensor_cores) == (sm, market, tensor_cores)
    assert device.compute_capability is None and device.family is None
    assert not device.is_consumer_ampere


@pytest.mark.parametrize(
    ("compute_capability", "shared_memory_bytes"),
    [((6, 1), 49152), ((7, 5), 65536), ((8, 0), 166912), ((8, 6), 101376), ((8, 9), 101376), ((9, 0), 232448),
     ((12, 0), 101376), ((12, 1), 101376), ((99, 0), 101376)],
)  # fmt: skip
def test_shared_memory_per_block(compute_capability, shared_memory_bytes):
    device = capability.device_from(name="NVIDIA Graphics Device", compute_capability=compute_capability)
    assert device.shared_memory_per_block_bytes == shared_memory_bytes


def test_reported_shared_memory_wins_over_the_table():
    device = capability.device_from(name="x", compute_capability=(8, 6), shared_memory_per_block_bytes=1234)
    assert device.shared_memory_per_block_bytes == 1234


def test_mig_slice_is_recognised():
    whole = capability.device_from(name="NVIDIA A100-SXM4-40GB", compute_capability=(8, 0))
    part = capability.device_from(name="NVIDIA A100-SXM4-40GB MIG 1g.5gb", compute_capability=(8, 0))
    assert (whole.is_mig_slice, part.is_mig_slice) == (False, True)


def test_two_mixed_cards_get_their_own_verdicts():
    cards = [("NVIDIA GeForce RTX 3090", (8, 6)), ("NVIDIA RTX A6000", (8, 6)), ("NVIDIA GeForce RTX 4090", (8, 9))]
    devices = [capability.device_from(name=name, compute_capability=number) for name, number in cards]
    assert [device.is_consumer_ampere for device in devices] == [True, False, False]


def _failing_import(error):
    def import_module(_name):
        raise error

    return import_module


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ModuleNotFoundError("No module named 'triton'", name="triton"), "not installed"),
        (ModuleNotFoundError("No module named 'triton._C'", name="triton._C"), "triton._C"),
        (ImportError("DLL load failed while importing libtriton"), "DLL load failed"),
        (OSError("libtriton.so: cannot open shared object file"), "cannot open shared object file"),
        (AttributeError("module 'triton' has no attribute 'language'"), "no attribute 'language'"),
    ],
    ids=["absent", "half removed", "ImportError", "OSError", "AttributeError"],
)
def test_triton_that_cannot_be_imported_gives_its_reason(error, words):
    version, reason = capability.probe_triton(_failing_import(error))
    assert version is None
    assert words in reason


def test_triton_without_a_version_is_a_reason_not_a_crash():
    version, reason = capability.probe_triton(lambda _name: object())
    assert version is None and "__version__" in reason


@pytest.mark.skipif(sys.platform != "linux", reason="only Triton on Linux builds its launchers with a C compiler")
def test_triton_without_a_c_compiler_gives_its_reason(monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", "")
    module = type("Triton", (), {"__version__": "3.8.0"})
    version, reason = capability.probe_triton(lambda _name: module)
    assert version is None and "C compiler" in reason


def test_triton_without_python_headers_gives_its_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "cc")
    monkeypatch.setattr("sysconfig.get_paths", lambda *_: {"include": str(tmp_path)})
    module = type("Triton", (), {"__version__": "3.8.0"})
    version, reason = capability.probe_triton(lambda _name: module)
    assert version is None and str(tmp_path) in reason


def test_detect_describes_this_machine():
    device = capability.detect()
    assert device is capability.detect()
    assert device.type == ("cuda" if torch.cuda.is_available() else device.type)
    assert device.torch == torch.__version__ and device.platform == sys.platform
    assert (device.triton is None) != (device.triton_missing is None)


def test_detect_cpu_whatever_else_is_there():
    device = capability.detect("cpu")
    assert (device.type, device.sm, device.int8_tensor_cores) == ("cpu", "cpu", False)
    assert device.name


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_detect_agrees_with_torch_on_a_gpu():
    device = capability.detect("cuda:0")
    assert device.name == torch.cuda.get_device_name(0)
    if torch.version.hip is None:
        assert device.compute_capability == torch.cuda.get_device_capability(0)
        assert device.driver is not None and device.driver.split(".")[0].isdigit()


def test_import_and_driver_look_up_leave_cuda_uninitialised():
    code = (
        "import importlib.util, sys, torch\n"
        "spec = importlib.util.spec_from_file_location('capability', sys.argv[1])\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['capability'] = module\n"
        "spec.loader.exec_module(module)\n"
        "module.nvidia_driver_version()\n"
        "module.probe_triton()\n"
        "module.device_from(name='NVIDIA GeForce RTX 3090', compute_capability=(8, 6))\n"
        "sys.exit(3 if torch.cuda.is_initialized() else 0)\n"
    )
    result = subprocess.run([sys.executable, "-c", code, capability.__file__], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
