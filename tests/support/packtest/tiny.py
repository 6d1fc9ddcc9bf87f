"""The emoji DiT with three of its blocks, for tests that run it often: 1.5 million parameters, 11 INT8 Linears or so."""

import torch

from . import ROOT

FILE = ROOT / "tests" / "demo" / "data" / "emoji_flux2_dit_bf16.safetensors"
BLOCKS = ("double_blocks.0.", "single_blocks.0.", "single_blocks.1.")
TEXT_WIDTH, CHANNELS = 384, 128


def state(comfy) -> dict[str, torch.Tensor]:
    """Key -> bf16 tensor of a memory map."""
    whole = comfy.utils.load_torch_file(str(FILE))
    return {key: value for key, value in whole.items() if "_blocks." not in key or key.startswith(BLOCKS)}


def float_model(comfy):
    """A MODEL of the host, computing in the CPU's float32."""
    return comfy.sd.load_diffusion_model_state_dict(state(comfy))


def int8_model(comfy):
    """A MODEL on our kernels, which the host can load again."""
    from native_int8.nodes.int8 import host_backend, loader

    def load(disable_dynamic=False):
        model, _ = loader.load_state_dict(state(comfy), None, disable_dynamic=disable_dynamic)
        model.cached_patcher_init = (load, ())
        host_backend.attach(model)
        return model

    return load()


def conditioning(words: int, seed: int = 1) -> torch.Tensor:
    """Text states [1, words, TEXT_WIDTH]; the host pads them to 512 words."""
    return torch.randn((1, words, TEXT_WIDTH), generator=torch.Generator().manual_seed(seed))


def sample(comfy, model, size=(10, 10), words=512, steps=1, seed=0, cfg=1.0, positive=None):
    """What the host's euler sampler makes of `model`: latent [1, CHANNELS, *size] float32.

    positive: conditioning of the host, for more than one prompt; `words` is then not used.
    """
    latent = torch.zeros((1, CHANNELS, *size))
    text = conditioning(words)
    positive = [[text, {}]] if positive is None else positive
    noise = comfy.sample.prepare_noise(latent, seed)
    negative = [[torch.zeros_like(text), {}]]
    return comfy.sample.sample(
        model, noise, steps, cfg, "euler", "simple", positive, negative, latent, disable_pbar=True, seed=seed
    )
