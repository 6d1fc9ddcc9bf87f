"""Run a MODEL as a sampler does, but step by step under our own eyes.

The host's sampling does everything around it: loading, conditioning, wrappers, noise, guidance. Only the loop over the
steps is ours, so that the same point can be put to two MODELs, and a forward can be watched and timed.
"""

import inspect
from collections.abc import Callable, Mapping

import torch

from ...kernels.dispatch import Int8Error

SCHEDULER = "simple"
# what models call the width of their text states, as a detected setting or as an argument of their class
_TEXT_WIDTHS = (
    "context_in_dim", "cap_feat_dim", "joint_attention_dim", "text_in_dim", "text_dim", "text_embed_dim",
    "llm_features_dim", "crossattn_emb_channels", "text_feat_dim", "caption_channels", "cross_attention_dim",
    "context_dim",
)  # fmt: skip

Denoise = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class NoInputs(Int8Error, RuntimeError):
    """What a MODEL's forward takes cannot be made without a conditioning."""


def run(
    model,
    loop: Callable[[Denoise, torch.Tensor, torch.Tensor], torch.Tensor],
    positive: list,
    negative: list | None,
    latent: dict,
    *,
    seed: int,
    steps: int,
    cfg: float = 1.0,
) -> torch.Tensor:
    """Sample with a loop of the caller's.

    Args:
        loop: called with (denoise, x, sigmas): denoise(x, sigma) is what the MODEL makes of x with guidance, x the starting
            point, sigmas [steps + 1] with 0 at the end. Returns the last x.
        negative: None for the positive one, which at cfg 1 is never used.
        latent: as LATENT wires carry it; an empty one may have the channels of another model.
    Returns:
        the latent, on the host's device for results.
    """
    import comfy.sample
    import comfy.samplers

    samples = comfy.sample.fix_empty_latent_channels(
        model, latent["samples"], latent.get("downscale_ratio_spacial"), latent.get("downscale_ratio_temporal")
    )
    noise = comfy.sample.prepare_noise(samples, seed, latent.get("batch_index"))
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), SCHEDULER, steps)

    def sampler_function(wrapped, x, sigmas, extra_args=None, callback=None, disable=None):
        ones = x.new_ones([x.shape[0]])
        return loop(lambda x, sigma: wrapped(x, sigma * ones, **(extra_args or {})), x, sigmas)

    return comfy.sample.sample_custom(
        model,
        noise,
        cfg,
        comfy.samplers.KSAMPLER(sampler_function),
        sigmas,
        positive,
        positive if negative is None else negative,
        samples,
        noise_mask=latent.get("noise_mask"),
        disable_pbar=True,
        seed=seed,
    )


def euler(x: torch.Tensor, denoised: torch.Tensor, sigma: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Euler's step from `sigma` to `following`: x + (x - denoised) / sigma * (following - sigma)."""
    return x + (x - denoised) / sigma * (following - sigma)


def empty_latent(model, width: int, height: int, frames: int, batch_size: int) -> dict:
    """Zeros of the size that the MODEL's latents have for pictures, or for videos, of this many pixels."""
    latent_format = model.get_model_object("latent_format")
    ratio = latent_format.spacial_downscale_ratio
    # a whole number of the model's patches, as latents from the host's nodes are
    sides = [max(2, -(-pixels // ratio) // 2 * 2 if ratio < 16 else -(-pixels // ratio)) for pixels in (height, width)]
    if latent_format.latent_dimensions == 3:
        sides.insert(0, (frames - 1) // latent_format.temporal_downscale_ratio + 1)
    return {"samples": torch.zeros([batch_size, latent_format.latent_channels, *sides])}


def made_up_conditioning(model, text_tokens: int) -> list:
    """A conditioning of random text states [1, text_tokens, width], of the width that the model's settings tell.

    Raises:
        NoInputs: they do not tell it.
    """
    base = model.model
    settings = _settings(type(base.diffusion_model), base.model_config.unet_config)
    width = text_width(settings)
    if width is None:
        raise NoInputs(
            f"{type(base).__name__} does not tell how wide its text states are, so no input can be made up for it. "
            "Connect a conditioning."
        )
    generator = torch.Generator().manual_seed(0)
    states = torch.randn((1, max(text_tokens, 1), width), generator=generator)
    pooled = settings.get("vec_in_dim")
    return [[states, {"pooled_output": torch.zeros((1, pooled))} if isinstance(pooled, int) else {}]]


def text_width(settings: Mapping[str, object]) -> int | None:
    """Numbers in a text state of a model with these settings; None when they do not tell."""
    layers, each = settings.get("txtlayers"), settings.get("txtdim")
    if isinstance(layers, int) and isinstance(each, int):
        return layers * each
    return next((width for name in _TEXT_WIDTHS if isinstance(width := settings.get(name), int)), None)


def _settings(kind: type, detected: Mapping[str, object]) -> dict[str, object]:
    """What the host detected, over the defaults of the model's class."""
    parameters = inspect.signature(kind.__init__).parameters
    return {name: parameter.default for name, parameter in parameters.items()} | dict(detected)
