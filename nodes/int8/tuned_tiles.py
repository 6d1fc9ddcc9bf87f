"""The user's measured tiles: where the file lives, when it is read, and which shapes a MODEL asks for."""

import functools
import logging
from dataclasses import replace
from pathlib import Path

import torch

from ...kernels import tiles, tuned
from ...kernels.capability import detect
from ...kernels.tuning import TuningResult
from ...kernels.warmup import LinearKind
from . import direct_linears

log = logging.getLogger("native_int8.tuned_tiles")

FOLDER = "native_int8"
# latents with this many channels hold 2 x 2 patches already
PACKED_CHANNELS = 64


def path_of(device: torch.device) -> Path:
    """The tile file of a device, in ComfyUI's user folder."""
    import folder_paths

    return Path(folder_paths.get_user_directory()) / FOLDER / f"tiles-{tuned.slug(detect(device))}.json"


@functools.cache
def use(device: torch.device) -> tuned.Tuned:
    """Apply the file of a CUDA device, once per process; a file that does not count is logged with the reason."""
    if device.type != "cuda":
        return tuned.Tuned({})
    path = path_of(device)
    found = tuned.read(path, detect(device))
    if found.entries:
        tiles.use_tuned(detect(device), found.entries)
        log.info("%d measured tiles are used, from %s", len(found.entries), path)
    return found


def keep(device: torch.device, result: TuningResult) -> Path:
    """Write a result to the device's file and use it from the next call on.

    Raises:
        OSError: the file cannot be written; the tiles of this result are used all the same.
    """
    path, facts = path_of(device), detect(device)
    tiles.use_tuned(facts, {**tuned.read(path, facts).entries, **result.table()})
    tuned.write(path, facts, result)
    return path


def linears_of(model) -> tuple[LinearKind, ...]:
    """The kinds of INT8 Linear in a MODEL or in a CLIP's patcher, each once, in the order of its modules."""
    from comfy.quant_ops import QuantizedTensor

    diffusion_model = getattr(model.model, "diffusion_model", None)
    # the host runs text encoders in float32
    dtype = torch.float32 if diffusion_model is None else model.model.get_dtype_inference()
    kinds = []
    root = model.model if diffusion_model is None else diffusion_model
    acts = direct_linears.acts_of(root)
    for module in root.modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, QuantizedTensor) or weight._qdata.dtype != torch.int8 or weight._qdata.dim() != 2:
            continue
        params = weight._params
        n, k = weight._qdata.shape
        kinds.append(
            LinearKind(
                k,
                n,
                dtype,
                # the host casts a bias to the type of the input
                None if getattr(module, "bias", None) is None else dtype,
                params.convrot_groupsize if getattr(params, "convrot", False) else 0,
                row_scales=params.scale.numel() > 1,
            )
        )
        if module in acts:
            # it is called, too: with a LoRA, and where another pack looks at it
            kinds.append(replace(kinds[-1], input_act=acts[module]))
    return tuple(dict.fromkeys(kinds))


def pixels_per_token(model) -> int:
    """Pixels along one side of what becomes one token: 16 for most diffusion transformers."""
    latent = model.model.latent_format
    ratio = latent.spacial_downscale_ratio
    if latent.latent_channels >= PACKED_CHANNELS:
        return ratio
    patch = getattr(model.model.diffusion_model, "patch_size", 2)
    patch = patch[-1] if isinstance(patch, list | tuple) else patch
    return ratio * int(patch)


def rows_of(model, width: int, height: int, batch_size: int, text_tokens: int) -> tuple[int, ...]:
    """The numbers of rows (tokens x batch) that Linears see at this size: image, image and text, and text alone;
    for one branch of the guidance and for both in one batch. Sorted, without doubles."""
    side = pixels_per_token(model)
    image = -(-width // side) * -(-height // side)
    rows = {tokens * batch_size * both for tokens in (image, image + text_tokens) for both in (1, 2)}
    if text_tokens:
        rows.add(text_tokens * batch_size)
    return tuple(sorted(rows))
