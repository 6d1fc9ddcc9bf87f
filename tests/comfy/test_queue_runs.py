"""Fifty prompts in the queue of one server: same latents, as much memory and as much time at the end as at the start."""

import statistics
import sys
import time
from pathlib import Path

import pytest
import torch
from packtest import ROOT, server
from safetensors.torch import load_file, save_file

from .test_server import LOADED, LORA, MODEL_FILE, block_lora, graph, lora

pytestmark = [
    pytest.mark.comfy,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="resident memory is read from /proc"),
]

RUNS = 50
# glibc gives back at once what is larger than this; by default it may keep up to 64 MB of what was freed
MALLOC = ("env", f"MALLOC_MMAP_THRESHOLD_={1 << 20}", f"MALLOC_TRIM_THRESHOLD_={1 << 20}")
# the host collects garbage so often while it waits for prompts
GARBAGE_SECONDS = 10
# the kinds of prompts that take turns: a plain MODEL, a LoRA, the same at another strength
STRENGTHS = (None, 1.0, 0.4)


@pytest.fixture
def host(tmp_path):
    models = tmp_path / "models/diffusion_models"
    models.mkdir(parents=True)
    (tmp_path / "models/loras").mkdir()
    (models / MODEL_FILE.name).symlink_to(MODEL_FILE)
    save_file(block_lora(), tmp_path / "models/loras" / LORA)
    packs = {"native-int8-dit": ROOT, "emoji_pack": ROOT / "tests/demo/emoji_pack"}
    # by default the host keeps the outputs of every prompt while there is memory, and would run six of fifty
    with server.start(tmp_path, packs, ["--cache-classic"], prefix=MALLOC) as running:
        yield running


def prompt(number: int) -> dict:
    """Run `number` of the queue. Seeds alternate, so that the sampler runs each time and the loader only once."""
    strength, seed = STRENGTHS[number % 3], number % 2
    name = "loaded" if strength is None else "with_lora"
    nodes = graph({**LOADED, **({} if strength is None else lora("loaded", name))}, [name], seed)
    nodes[f"{name} sampler"]["inputs"]["steps"] = 1
    if strength is not None:
        nodes[name]["inputs"]["strength_model"] = strength
    return nodes


def memory(host) -> tuple[int, int]:
    """(bytes that the server holds in host memory, bytes in use on its GPU or 0), the least of a while without prompts."""
    held, on_device, end = [], [], time.monotonic() + GARBAGE_SECONDS + 1
    while time.monotonic() < end:
        held.append(int(Path(f"/proc/{host.process.pid}/statm").read_text().split()[1]) * 4096)
        device = host.get("/system_stats")["devices"][0]
        on_device.append(device["vram_total"] - device["vram_free"] if device["type"] == "cuda" else 0)
        time.sleep(0.5)
    return min(held), min(on_device)


def test_b32_fifty_prompts_change_no_bit_and_take_neither_memory_nor_time(host, record_property):
    latents, seconds, held = {}, [], {}
    for number in range(1, RUNS + 1):
        result = host.run(prompt(number))
        name = "loaded" if STRENGTHS[number % 3] is None else "with_lora"
        latent = load_file(result.files(f"{name} latent", "latents")[0])["latent_tensor"]
        seconds.append(result.seconds)
        # six different prompts; the first of a process may be another one's bits on a GPU
        if number > 6:
            assert torch.equal(latent, latents.setdefault(number % 6, latent))
        if number in (12, RUNS):
            held[number] = memory(host)
    assert len({tuple(latent.flatten().tolist()) for latent in latents.values()}) == 6
    record_property("seconds", seconds)
    record_property("bytes on host and device after so many prompts", held)
    for limit, early, late in zip((1.02, 1.01), held[12], held[RUNS], strict=True):
        assert late <= limit * early, held
    # other work on the machine slows single runs down
    assert min(seconds[-6:]) <= statistics.median(seconds[2:8]) * 1.1, seconds
    # every prompt ran, and the weights became INT8 once
    assert host.log().count("Prompt executed in") == RUNS and min(seconds) > 0.01, seconds
    assert host.log().count("quantised while loading") == 1, host.log()
