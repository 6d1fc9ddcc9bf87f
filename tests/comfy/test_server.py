"""The pack in a real ComfyUI server: prompts over HTTP, with stock nodes before, after and beside ours."""

import asyncio
import json
import shutil
import struct
import urllib.request

import pytest
import torch
from packtest import ROOT, server
from safetensors.torch import load_file, save_file

from .conftest import MODEL_FILE

pytestmark = pytest.mark.comfy

NODES = ("LoadDiTNativeINT8", "INT8PatchModel", "INT8CapabilityCheck")
STEPS = 3
CLOSE = 0.995
LORA = "blocks.safetensors"

FLOAT = {"float": ("UNETLoader", {"unet_name": MODEL_FILE.name, "weight_dtype": "default"})}
LOADED = {"loaded": ("LoadDiTNativeINT8", {"model_name": MODEL_FILE.name, "rotation": True})}
PATCHED = {**FLOAT, "patched": ("INT8PatchModel", {"model": ["float", 0]})}


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """One server for this file; it knows the emoji model and a LoRA for its blocks."""
    base = tmp_path_factory.mktemp("comfyui")
    (base / "models/diffusion_models").mkdir(parents=True)
    (base / "models/loras").mkdir()
    shutil.copy(MODEL_FILE, base / "models/diffusion_models")
    save_file(block_lora(), base / "models/loras" / LORA)
    packs = {"native-int8-dit": ROOT, "emoji_pack": ROOT / "tests/demo/emoji_pack"}
    with server.start(base, packs) as running:
        yield running


@pytest.fixture
def run(host):
    """A function (loaders, *names, seed=1) -> latents of the named MODELs, all sampled in one prompt."""

    def run(loaders, *names, seed=1):
        # without its caches the server runs every node again
        free(host)
        result = host.run(graph(loaders, names, seed))
        return [load_file(result.files(f"{name} latent", "latents")[0])["latent_tensor"] for name in names]

    return run


def block_lora():
    generator = torch.Generator().manual_seed(11)
    state = {}
    for key, weight in load_file(MODEL_FILE).items():
        if key.endswith(".weight") and "_blocks." in key and weight.ndim == 2:
            name = "diffusion_model." + key.removesuffix(".weight")
            n, k = weight.shape
            state[f"{name}.lora_A.weight"] = torch.randn(4, k, generator=generator) * weight.float().std()
            state[f"{name}.lora_B.weight"] = torch.randn(n, 4, generator=generator) * 0.3
    return state


def graph(loaders, names, seed):
    nodes = {
        **loaders,
        "prompt": ("EmojiPrompt", {"prompt": "penguin"}),
        "empty": ("EmptyFlux2LatentImage", {"width": 256, "height": 256, "batch_size": 1}),
    }
    for name in names:
        nodes[f"{name} sampler"] = (
            "KSampler",
            {
                "model": [name, 0], "positive": ["prompt", 0], "negative": ["prompt", 1], "latent_image": ["empty", 0],
                "seed": seed, "steps": STEPS, "cfg": 3.0, "sampler_name": "euler", "scheduler": "simple", "denoise": 1.0,
            },
        )  # fmt: skip
        nodes[f"{name} latent"] = ("SaveLatent", {"samples": [f"{name} sampler", 0], "filename_prefix": name})
    return {key: {"class_type": kind, "inputs": inputs} for key, (kind, inputs) in nodes.items()}


def free(host):
    body = json.dumps({"unload_models": True, "free_memory": True}).encode()
    request = urllib.request.Request(f"{host.url}/free", body, {"Content-Type": "application/json"})
    urllib.request.urlopen(request, timeout=60).close()


def lora(model, name):
    return {name: ("LoraLoaderModelOnly", {"model": [model, 0], "lora_name": LORA, "strength_model": 1.0})}


def sampling(model, name):
    shift = {"max_shift": 4.0, "base_shift": 3.0, "width": 256, "height": 256}
    return {name: ("ModelSamplingFlux", {"model": [model, 0], **shift})}


def cosine(a, b):
    return torch.nn.functional.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


def test_the_pack_is_imported_and_its_nodes_are_listed(host):
    info = host.object_info()
    assert set(NODES) <= info.keys()
    assert {info[name]["category"] for name in NODES} == {"model/int8"}
    assert info["INT8PatchModel"]["output"] == ["MODEL"]
    assert info["LoadDiTNativeINT8"]["output"] == ["MODEL"]
    assert info["INT8CapabilityCheck"]["output"] == ["BOOLEAN", "STRING"]
    for name in NODES:
        assert info[name]["description"]
        assert all(info[name]["output_tooltips"])
    assert "IMPORT FAILED" not in host.log()


def test_int8_is_close_to_float_and_both_nodes_agree(run):
    floating, loaded, patched = run({**PATCHED, **LOADED}, "float", "loaded", "patched")
    assert cosine(loaded, floating) > CLOSE
    assert torch.equal(loaded, patched)
    assert not torch.equal(loaded, floating)


def test_models_in_one_graph_do_not_meet_and_bypass_is_bit_equal(run):
    alone = run(FLOAT, "float")[0]
    int8_alone = run(LOADED, "loaded")[0]
    together = run({**PATCHED, **LOADED}, "patched", "float", "loaded")
    assert torch.equal(together[1], alone)
    assert torch.equal(together[2], int8_alone)
    assert torch.equal(run(FLOAT, "float")[0], alone)


def test_lora_before_and_after_the_patch_node(run):
    loaders = {
        **FLOAT,
        **lora("float", "float_lora"),
        "lora_patched": ("INT8PatchModel", {"model": ["float_lora", 0]}),
        "patched": ("INT8PatchModel", {"model": ["float", 0]}),
        **lora("patched", "patched_lora"),
        **LOADED,
        **lora("loaded", "loaded_lora"),
    }
    plain, expected, before, after, loaded = run(
        loaders, "float", "float_lora", "lora_patched", "patched_lora", "loaded_lora"
    )
    effect = 1 - cosine(plain, expected)
    assert effect > 0.02
    # a random LoRA takes the model out of what it knows, where it amplifies every error
    assert 1 - cosine(before, expected) < effect / 4
    assert torch.equal(before, after)
    assert torch.equal(before, loaded)


def test_model_sampling_before_and_after_the_patch_node(run):
    loaders = {
        **FLOAT,
        **sampling("float", "float_shift"),
        "shift_patched": ("INT8PatchModel", {"model": ["float_shift", 0]}),
        "patched": ("INT8PatchModel", {"model": ["float", 0]}),
        **sampling("patched", "patched_shift"),
    }
    plain, expected, before, after = run(loaders, "float", "float_shift", "shift_patched", "patched_shift")
    assert cosine(plain, expected) < 0.98
    assert cosine(before, expected) > CLOSE
    assert torch.equal(before, after)


def test_the_host_logged_no_fault(host):
    log = host.log()
    for words in ("ERROR lora", "Traceback", "lora key not loaded", "unet unexpected", "unet missing"):
        assert words not in log


@pytest.mark.parametrize(("loaders", "node"), [(LOADED, "loaded"), (PATCHED, "patched")], ids=["load", "patch"])
def test_the_node_shows_what_happened(host, loaders, node):
    free(host)
    line = asyncio.run(first_text(host, node, graph(loaders, [node], seed=2)))
    words = line.split()
    assert line.endswith("kernel native_int8 on cpu") or " on sm_" in line
    assert int(words[0]) > 0
    assert words[1:3] == ["layers", "INT8,"]


async def first_text(host, node, prompt):
    import aiohttp

    async with aiohttp.ClientSession() as session, session.ws_connect(f"{host.url.replace('http', 'ws')}/ws") as socket:
        prompt_id = await asyncio.to_thread(host.queue, prompt)
        try:
            return await asyncio.wait_for(text_of(socket, node), 120)
        finally:
            await asyncio.to_thread(host.wait, prompt_id)


async def text_of(socket, node):
    import aiohttp

    async for message in socket:
        # a binary event: its kind (3 is text), the node id's length, the node id, the text
        if message.type is aiohttp.WSMsgType.BINARY and struct.unpack(">I", message.data[:4])[0] == 3:
            length = struct.unpack(">I", message.data[4:8])[0]
            if message.data[8 : 8 + length].decode() == node:
                return message.data[8 + length :].decode()
    return ""
