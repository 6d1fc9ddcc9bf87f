"""MODEL -> a native INT8 file that stock ComfyUI and this pack load.

The weights are taken one by one from where they are: loaded, partly loaded or still in a memory map. Patches (LoRAs) are
baked in as the host does it for a run: dequantise, add in the same precision on the same device, quantise again with the
seed of the weight's name, so that a saved weight equals the one that ran. A LoRA that runs beside the weight
(lora_branch.py) is baked in the same way; in the file it is rounded to INT8.
"""

import logging
import os
from collections.abc import Callable
from pathlib import Path

import torch

from . import bake, patcher
from .checkpoint import read_header
from .native_file import NativeFile
from .report import REPORT_KEY

log = logging.getLogger("native_int8.save")

LORA_CHOICES = ("bake", "refuse")


class SaveError(RuntimeError):
    """The MODEL or the name is none that can be saved."""


def save_model(model, path: str, loras: str = "bake", progress: Callable[[int, int], None] | None = None) -> int:
    """Write the diffusion model of an INT8 MODEL to `path`.

    Args:
        model: ModelPatcher, loaded or not; not changed.
        path: final name; an existing file is replaced in one step when the new one is complete.
        loras: "bake" the patches on the weights into the file, or "refuse" a MODEL that has any.
        progress: called with (tensors done, tensors in all); None for the host's progress bar.
    Returns:
        number of weights that a patch was baked into.
    Raises:
        SaveError: the MODEL holds no INT8 weight, or has patches and `loras` is "refuse".
        OSError: the disk is full or the folder cannot be written.
    """
    import comfy.model_management
    import comfy.utils

    if not patcher.is_int8(model):
        raise SaveError(
            "INT8 Save Model got a MODEL without INT8 weights. An INT8 MODEL is needed; load the file with "
            "Load DiT (Native INT8), or put INT8 Patch Model before this node."
        )
    patched = [key for key in model.patches if key.startswith(patcher.PREFIX)]
    if patched and loras == "refuse":
        raise SaveError(
            f"INT8 Save Model got a MODEL with patches (LoRAs) on {len(patched)} weights, such as {patched[0]}. With loras "
            "set to refuse, a MODEL without patches is needed; take it from before the LoRA loader, or set loras to bake."
        )
    if model.hook_patches:
        log.warning("LoRAs that are scheduled by hooks change while sampling; they are not in the saved file.")
    state = patcher.pristine_state_dict(model)
    if progress is None:
        progress = comfy.utils.ProgressBar(max(len(state), 1)).update_absolute
    os.makedirs(Path(path).parent, exist_ok=True)
    names, baked = list(state), 0
    with torch.no_grad(), NativeFile(path, names, source_metadata(model)) as file:
        for done, name in enumerate(names):
            comfy.model_management.throw_exception_if_processing_interrupted()
            if patcher.PREFIX + name in model.patches:
                changed = _baked(model, patcher.PREFIX + name)
                file.update(changed)
                baked += 1
                # the scale of the new codes has replaced the old one
                for other in changed:
                    state.pop(other, None)
                # not beside the next one
                del changed
            elif name in state:
                file[name] = state.pop(name)
            progress(done + 1, len(names))
    log.info("%s: saved %d tensors, patches baked into %d weights", path, len(file.tensors), baked)
    return baked


def source_metadata(model) -> dict[str, str]:
    """The metadata of the file that a MODEL came from; empty when that is not known."""
    report = model.get_attachment(REPORT_KEY)
    if report is not None:
        return dict(report.metadata)
    path = patcher.source_file(model)
    return read_header(path).metadata if path is not None else {}


def _baked(model, key: str) -> dict[str, torch.Tensor]:
    """One weight with its patches, as the tensors of a file."""
    from comfy.model_patcher import get_key_weight
    from comfy.quant_ops import QuantizedTensor

    weight, *functions = get_key_weight(model.model, key)
    if key in model.backup:
        weight = model.backup[key].weight
    if key in model.hook_backup:
        weight = model.hook_backup[key][0]
    value = bake.baked(weight, tuple(functions), model.patches[key], key, model.load_device)
    name = key.removeprefix(patcher.PREFIX)
    return value.state_dict(name) if isinstance(value, QuantizedTensor) else {name: value}


def free_name(folder: str, prefix: str, ending: str = ".safetensors") -> Path:
    """The next file name of a prefix in `folder`: "<prefix>_00001_.safetensors" and so on, as the host counts.

    Raises:
        SaveError: the prefix is empty or leads out of the folder.
    """
    import folder_paths

    # a name that is harmless here may lead elsewhere on another system
    parts = prefix.replace("\\", "/").split("/")
    if not parts[-1].strip(". ") or ".." in parts or os.path.isabs(prefix) or ":" in prefix or "\0" in prefix:
        raise SaveError(
            f"INT8 Save Model got the file name {prefix!r}. A name inside the output folder is needed, without '..', "
            "a drive or a leading slash; change filename_prefix, for instance to diffusion_models/my_model."
        )
    try:
        target, stem, counter, _, _ = folder_paths.get_save_image_path("/".join(parts), folder)
    except Exception as error:
        # the host raises this bare type, for links that lead out of the folder
        raise SaveError(
            f"INT8 Save Model got the file name {prefix!r}, which leads out of the output folder. A name inside it is "
            "needed; change filename_prefix, for instance to diffusion_models/my_model."
        ) from error
    path = Path(target) / f"{stem}_{counter:05}_{ending}"
    while path.exists():
        counter += 1
        path = path.with_name(f"{stem}_{counter:05}_{ending}")
    return path
