"""MODEL -> INT8 MODEL, leaving the incoming one as it was.

A MODEL that is INT8 already is cloned and gets our kernels. A float MODEL is rebuilt through the loader: from the
file it came from when ComfyUI's diffusion model loader read it, else from its weights without their patches. Then
everything that was done to it is carried over (carry.py).
"""

import os

import torch

from . import host_backend, loader
from .carry import carry_over
from .report import REPORT_KEY

PREFIX = "diffusion_model."
# what ComfyUI's own loader node may pass along; with anything else the file alone does not say what the MODEL is
PLAIN_OPTIONS = frozenset({"dtype", "fp8_optimizations"})


class PatchError(RuntimeError):
    """The MODEL cannot be turned into an INT8 MODEL."""


def patch_model(model, options: loader.LoadOptions | None = None, progress=None):
    """Return an INT8 MODEL that runs on our kernels, and the report of what was decided.

    Args:
        model: ModelPatcher; not changed.
        options: what to quantise and how; not used for a MODEL that is INT8 already.
        progress: as in `loader.load_state_dict`.
    Returns:
        (ModelPatcher, LoadReport).
    Raises:
        PatchError: the weights are of a kind that cannot be quantised, or the rebuilt model is of another class.
    """
    if is_int8(model):
        twin = model.clone()
        host_backend.attach(twin)
        return twin, loader.describe(twin)
    options = options or loader.LoadOptions()
    fresh, report = _rebuild(model, options, progress)
    twin, notes = carry_over(model, fresh)
    report = report.with_notes(notes)
    host_backend.attach(twin)
    twin.set_attachments(REPORT_KEY, report)
    return twin, report


def is_int8(model) -> bool:
    """Whether a Linear of `model` holds the host's INT8 weights."""
    from comfy.quant_ops import QuantizedTensor

    return any(
        isinstance(weight, QuantizedTensor) and weight._qdata.dtype == torch.int8
        for weight in model.model.diffusion_model.parameters()
    )


def rebuild(init: tuple, options, disable_dynamic: bool = False):
    """Load a MODEL again by its `cached_patcher_init` and quantise it; ComfyUI calls this for deep clones."""
    source = init[0](*init[1])
    fresh, _ = loader.load_state_dict(
        pristine_state_dict(source[init[2]] if len(init) > 2 else source),
        None,
        options,
        disable_dynamic=disable_dynamic,
    )
    fresh.cached_patcher_init = (rebuild, (init, options))
    return fresh


def reload(base, options, disable_dynamic: bool = False):
    """Build another MODEL from the INT8 weights of `base`; for MODELs whose loader left no way to load them again."""
    fresh, _ = loader.load_state_dict(pristine_state_dict(base), None, options, disable_dynamic=disable_dynamic)
    fresh.cached_patcher_init = (reload, (base, options))
    return fresh


def pristine_state_dict(model) -> dict[str, torch.Tensor]:
    """The weights of the diffusion model by checkpoint key, without the patches that are baked in at the moment."""
    from comfy.quant_ops import QuantizedTensor

    state = {}
    for key, weight in model.model_state_dict(PREFIX).items():
        state[key.removeprefix(PREFIX)] = weight
    originals = {key: saved[0] for key, saved in model.hook_backup.items()}
    originals.update({key: saved.weight for key, saved in model.backup.items()})
    for key, weight in originals.items():
        if not key.startswith(PREFIX):
            continue
        name = key.removeprefix(PREFIX)
        state.update(weight.state_dict(name) if isinstance(weight, QuantizedTensor) else {name: weight})
    return state


def source_file(model) -> str | None:
    """The file that `model` was loaded from when the file alone says what it is, else None."""
    import comfy.sd

    init = model.cached_patcher_init
    if init is None or init[0] is not comfy.sd.load_diffusion_model:
        return None
    path, model_options = (*init[1], {})[:2]
    return path if set(model_options) <= PLAIN_OPTIONS and os.path.isfile(path) else None


def _rebuild(model, options, progress):
    disable_dynamic = not model.is_dynamic()
    path = source_file(model)
    if path is not None:
        fresh = loader.load_model(path, options, disable_dynamic)
        report = fresh.get_attachment(REPORT_KEY)
    else:
        state = pristine_state_dict(model)
        _check_weights(state)
        fresh, report = loader.load_state_dict(state, None, options, progress, disable_dynamic=disable_dynamic)
        init = model.cached_patcher_init
        base = fresh.clone()
        fresh.cached_patcher_init = (reload, (base, options)) if init is None else (rebuild, (init, options))
    if type(fresh.model) is not type(model.model):
        raise PatchError(
            f"The INT8 model was recognised as {type(fresh.model).__name__}, but the incoming MODEL is "
            f"{type(model.model).__name__}. Both must be the same class. Load the checkpoint with "
            "Load DiT (Native INT8) instead, or report this model."
        )
    return fresh, report


def _check_weights(state: dict[str, torch.Tensor]) -> None:
    for key, weight in state.items():
        if type(weight) not in (torch.Tensor, torch.nn.Parameter):
            raise PatchError(
                f"The weight {key} is packed in a {type(weight).__name__}; plain float weights are needed. "
                "Load the model from a float file (bf16, fp16 or fp8 safetensors) with Load DiT (Native INT8)."
            )
