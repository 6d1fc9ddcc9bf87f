"""Moves what a user did to one MODEL onto a freshly loaded twin of it.

Weight patches, options, wrappers, callbacks, hooks and attachments go over by the host's own clone. What holds
parts of the old model (a bound forward, a compiled module, a bypass LoRA) is made anew on the twin where that is
possible; what is not possible is left out, and named in the notes.
"""

import functools
import logging
import types

import torch

MAX_DEPTH = 6
MAX_ITEMS = 512
_LEAVES = (type(None), str, bytes, int, float, type, torch.Tensor, types.ModuleType)

log = logging.getLogger("native_int8.carry")


def carry_over(source, fresh):
    """Return a MODEL with the weights of `fresh` and everything else of `source`, and notes on what stayed behind.

    Neither argument changes. Both are ModelPatchers of the same architecture.

    Returns:
        twin: ModelPatcher; notes: list of one-sentence strings.
    """
    # the host's clone knows every field of this host's version; only what describes the weights is put back
    twin = source.clone(model_override=fresh.get_clone_model_override())
    twin.size = fresh.model_size()
    # the host falls back to the parent's weights when a clone dies; the float model must not come back so
    twin.parent = None
    twin.clone_base_uuid = fresh.clone_base_uuid
    twin.is_multigpu_base_clone = False
    twin.cached_patcher_init = fresh.cached_patcher_init
    twin.is_injected = False
    twin.hook_backup = {}
    twin.cached_hook_patches = {}

    old_paths = {id(module): path for path, module in source.model.diffusion_model.named_modules()}
    notes = _drop_unknown_patches(twin)
    if twin.get_additional_models_with_key("multigpu"):
        twin.remove_additional_models("multigpu")
        notes.append("The copies for other GPUs were left out; put the MultiGPU node after this one.")
    notes += _carry_object_patches(twin, old_paths)
    notes += _carry_compile(twin)
    notes += _carry_injections(twin, old_paths)
    notes += _float_parts(twin, old_paths)
    for note in notes:
        log.warning(note)
    return twin, notes


def _drop_unknown_patches(twin) -> list[str]:
    keys = twin.model_state_dict().keys()
    lost = [key for key in twin.patches if key not in keys]
    for key in lost:
        del twin.patches[key]
    if not lost:
        return []
    return [f"{len(lost)} weight patches name weights that the INT8 model does not have, such as {lost[0]}."]


def _carry_object_patches(twin, old_paths: dict[int, str]) -> list[str]:
    notes = []
    for name, patch in list(twin.object_patches.items()):
        owner = old_paths.get(id(getattr(patch, "__self__", None)))
        if owner is not None and isinstance(patch, types.MethodType):
            module = twin.model.diffusion_model.get_submodule(owner)
            twin.object_patches[name] = types.MethodType(patch.__func__, module)
        elif _holds_module(patch, old_paths):
            del twin.object_patches[name]
            notes.append(f"The patch of {name} holds parts of the float model; put its node after this one.")
    return notes


def _carry_compile(twin) -> list[str]:
    from comfy.patcher_extension import WrappersMP
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY, TORCH_COMPILE_KWARGS, set_torch_compile_wrapper

    wrappers = twin.get_wrappers(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    if not wrappers:
        return []
    twin.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY)
    options = twin.model_options.get(TORCH_COMPILE_KWARGS)
    keys = next((list(cell) for cell in _closure(wrappers[0]) if isinstance(cell, dict)), None)
    if options is None or keys is None:
        return ["torch.compile was left out; put its node after this one."]
    set_torch_compile_wrapper(twin, keys=keys, **options)
    return []


def _carry_injections(twin, old_paths: dict[int, str]) -> list[str]:
    from comfy.weight_adapter.bypass import BypassInjectionManager

    notes = []
    for key, injections in list(twin.injections.items()):
        carried = []
        for injection in injections:
            manager = next((c for c in _closure(injection.inject) if isinstance(c, BypassInjectionManager)), None)
            if manager is not None:
                anew = BypassInjectionManager()
                anew.adapters = dict(manager.adapters)
                carried += anew.create_injections(twin.model)
            elif _holds_module(injection, old_paths):
                notes.append(f"The injection {key} holds parts of the float model; put its node after this one.")
            else:
                carried.append(injection)
        twin.injections[key] = carried
    return notes


def _float_parts(twin, old_paths: dict[int, str]) -> list[str]:
    """Notes on functions that stay, since they may do more, but still reach into the float model."""
    places = {f"wrapper {key}": entries for kind in twin.wrappers.values() for key, entries in kind.items()}
    places |= {f"callback {key}": entries for kind in twin.callbacks.values() for key, entries in kind.items()}
    places |= {f"option {key}": value for key, value in twin.model_options.items()}
    return [
        f"The {place} refers to parts of the float model and keeps it in memory; put its node after this one."
        for place, value in places.items()
        if _holds_module(value, old_paths)
    ]


def _closure(function) -> list:
    cells = getattr(function, "__closure__", None) or ()
    return [cell.cell_contents for cell in cells if _is_filled(cell)]


def _is_filled(cell) -> bool:
    try:
        cell.cell_contents  # noqa: B018 an empty cell is only known by reading it
    except ValueError:
        return False
    return True


def _holds_module(thing, paths: dict[int, str], depth: int = MAX_DEPTH, seen: set[int] | None = None) -> bool:
    """Whether one of the modules in `paths` (by id) can be reached from `thing`."""
    seen = set() if seen is None else seen
    if depth == 0 or id(thing) in seen or isinstance(thing, _LEAVES):
        return False
    seen.add(id(thing))
    if isinstance(thing, torch.nn.Module):
        # a whole BaseModel is only ever kept for its sampling settings
        return id(thing) in paths or (
            not hasattr(thing, "diffusion_model") and any(id(module) in paths for module in thing.modules())
        )
    # a patcher is not a part of the model; patches keep them to read sampling settings
    if hasattr(thing, "model_options") and hasattr(thing, "object_patches"):
        return False
    return any(_holds_module(part, paths, depth - 1, seen) for part in _parts(thing))


def _parts(thing) -> list:
    if isinstance(thing, dict):
        return list(thing.values())[:MAX_ITEMS]
    if isinstance(thing, (list, tuple, set, frozenset)):
        return list(thing)[:MAX_ITEMS]
    if isinstance(thing, functools.partial):
        return [thing.func, *thing.args, *thing.keywords.values()]
    if isinstance(thing, types.MethodType):
        return [thing.__self__, thing.__func__]
    if isinstance(thing, types.FunctionType):
        return [*_closure(thing), *(thing.__defaults__ or ()), *(thing.__kwdefaults__ or {}).values()]
    return list(vars(thing).values())[:MAX_ITEMS] if hasattr(thing, "__dict__") else []
