"""ComfyUI's memory options: where weights lie changes nothing that an INT8 MODEL computes."""

import os
import subprocess
import sys

import packtest
import pytest
import torch
from native_int8.nodes.int8 import host_backend
from packtest import tiny
from packtest.loras import add_lora, int8_linears, lora_file

pytestmark = pytest.mark.comfy

RUN = {"size": (6, 6), "steps": 2, "cfg": 3.0}
GPU_OPTIONS = [
    ("--disable-dynamic-vram", "--lowvram"),
    ("--disable-dynamic-vram", "--novram"),
    ("--disable-dynamic-vram", "--reserve-vram", "2"),
    ("--reserve-vram", "2"),
    # dynamic VRAM with no room to keep a weight
    ("--vram-headroom", "1000"),
]
# which of flag_run.py's latents is that of a patch which lies in the weights
BAKED = 2
PROGRAM = packtest.ROOT / "tests" / "support" / "packtest" / "flag_run.py"


def seen(folder, *options) -> dict:
    """What flag_run.py sees with these start options of ComfyUI."""
    file = folder / f"{'_'.join(options) or 'none'}.pt"
    done = subprocess.run(
        [os.environ.get("PYTHON", sys.executable), str(PROGRAM), str(file), *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(file, weights_only=True)


@pytest.fixture
def models(comfy):
    model = tiny.int8_model(comfy)
    return [model, add_lora(model, lora_file(model)), add_lora(model, lora_file(model, "lokr")), model]


def test_cpu(comfy, models, tmp_path):
    found = seen(tmp_path, "--cpu")["latents"]
    if not torch.cuda.is_available():
        assert all(torch.equal(a, tiny.sample(comfy, b, **RUN)) for a, b in zip(found, models, strict=True))
    assert torch.equal(found[0], found[3]) and not torch.equal(found[0], found[1])


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """What is seen with room for everything: whether by dynamic VRAM -> what flag_run.py saw."""
    folder = tmp_path_factory.mktemp("plain")
    found = {False: seen(folder, "--disable-dynamic-vram", "--highvram"), True: seen(folder)}
    assert found[False]["record"]["ways"].keys() == {"resident"}
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_OPTIONS, ids=" ".join)
def test_on_a_gpu(plain, tmp_path, options):
    """Weights that dynamic VRAM or the host's older way holds, here or in host memory: the same bits, and all INT8."""
    found, dynamic = seen(tmp_path, *options), "--disable-dynamic-vram" not in options
    assert found["dynamic"] == dynamic
    for number, (got, expected) in enumerate(zip(found["latents"], plain[False]["latents"], strict=True)):
        # dynamic VRAM bakes in bf16 what the older way bakes in float32
        if number == BAKED and dynamic:
            expected = plain[True]["latents"][BAKED]
        assert torch.equal(got, expected), f"latent {number}"
    record = found["record"]
    assert record["declined"] == {} and record["calls"] == plain[False]["record"]["calls"]
    assert record["ways"].keys() <= {"resident", "fetched"}


@pytest.mark.parametrize("state", ["NO_VRAM", "LOW_VRAM", "NORMAL_VRAM"])
def test_the_hosts_low_memory_ways_on_a_cpu(comfy, models, monkeypatch, state):
    """The host never takes them for a CPU; told that this is none, it leaves layers where they are and casts at each use."""
    management = comfy.model_management
    expected = [tiny.sample(comfy, model, **RUN) for model in models]
    management.unload_all_models()
    record = host_backend.record_of(models[0])
    record.reset()
    monkeypatch.setattr(management, "vram_state", getattr(management.VRAMState, state))
    monkeypatch.setattr(management, "is_device_cpu", lambda device: False)
    loads = []
    host = comfy.model_patcher.ModelPatcher
    original = host.partially_load
    monkeypatch.setattr(
        host,
        "partially_load",
        lambda self, device, budget=0, **more: (loads.append(budget), original(self, device, budget, **more))[1],
    )
    for model, wanted in zip(models, expected, strict=True):
        assert torch.equal(tiny.sample(comfy, model, **RUN), wanted)
        # everything else of the machine's memory is free
        if state == "NO_VRAM":
            assert model.loaded_size() < 0.2 * model.model_size()
    assert loads and (state != "NO_VRAM" or max(loads) <= 1)
    calls = record.snapshot()
    assert calls["declined"] == {} and sum(calls["calls"].values()) % len(int8_linears(models[0])) == 0
    assert record.ways_taken()["ways"].keys() <= {"resident", "fetched"}
    management.unload_all_models()
