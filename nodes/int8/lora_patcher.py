"""A ModelPatcher that leaves low-rank patches on INT8 Linears out of the weights and bakes the other ones in once.

The host adds every patch to the weight: at load for what is resident, at every use for what is offloaded. `install` gives
one MODEL's patcher a subclass of its own class, which sorts the patches on INT8 weights before each of the host's three
ways to load (`load`, `partially_load`, `partially_unload`; the dynamic patcher's, too):

- low-rank ones are hidden from the host and run beside the product (lora_branch.py);
- the others (LoKr, LoHa, DoRA, differences) are baked in as the host bakes a resident layer, on the load device, whatever
  the layer's place, and the baked codes move between devices like any weight. Under dynamic VRAM this is the host's own.

`patches` itself stays whole, for savers and other packs; only inside these calls the host sees the rest of it. Patches on
other layers are the host's. Why a subclass: the host clones a patcher with its own class, so it survives every node;
nothing is global, and a MODEL without our wrapper is loaded as ever.

Hooks: low-rank patches of hooks join the stacks while their hooks are active, so that no weight changes while sampling;
other kinds on INT8 weights are refused. Merging: `get_key_patches` gives whole weights, which the host's own cannot.

The host compares `patches_uuid` to see whether weights must be loaded again. Weights that differ in the low-rank patches
only are the same here, so `partially_load` tells it so, and another strength costs no reload.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import uuid
import weakref
from collections import Counter
from typing import NamedTuple

import torch

from . import cuda_graphs, lora_branch, short_way

NAME = "native_int8"
# groups of hooks whose stacks are kept at once; two prompts with their own hooks alternate in every step
HOOK_GROUPS = 4

log = logging.getLogger("native_int8.lora")


class Plan(NamedTuple):
    """What becomes of the patches on INT8 weights, by key.

    beside: (module, terms) of those that run beside; baked: those that are baked in; reasons: why baked, counted.
    """

    beside: dict[str, tuple[torch.nn.Module, list]]
    baked: dict[str, torch.nn.Module]
    reasons: Counter[str]


def install(model) -> None:
    """Let the patcher `model` load as described above; calling it again, or for a text encoder, changes nothing."""
    from comfy.patcher_extension import CallbacksMP

    if is_installed(model) or not hasattr(model.model, "diffusion_model"):
        return
    model.__class__ = _subclass(type(model))
    model.add_callback_with_key(CallbacksMP.ON_CLONE, NAME, _keep_class)
    if model.patches:
        # the same patches lie otherwise in the weights than with the host's patcher
        model.patches_uuid = uuid.uuid5(model.patches_uuid, NAME)


def uninstall(model) -> None:
    """Give the patcher its class back."""
    from comfy.patcher_extension import CallbacksMP

    if not is_installed(model):
        return
    model.__class__ = type(model).__mro__[2]
    model.remove_callbacks_with_key(CallbacksMP.ON_CLONE, NAME)
    model.native_int8_branch = None
    if model.patches:
        model.patches_uuid = uuid.uuid5(model.patches_uuid, "host")


def is_installed(model) -> bool:
    """Whether `install` was called on `model` or on the MODEL it was cloned from."""
    return hasattr(type(model), "native_int8_plan")


def _keep_class(source, clone) -> None:
    # the host's clone is of the plain class when it leaves dynamic VRAM
    if not is_installed(clone):
        clone.__class__ = _subclass(type(clone))


@functools.cache
def _subclass(kind: type) -> type:
    return type(f"NativeInt8{kind.__name__}", (_Loading, kind), {"__doc__": _Loading.__doc__})


@functools.cache
def _lazy_piece() -> type:
    from comfy.model_patcher import LazyCastingParamPiece

    class LazyPiece(LazyCastingParamPiece):
        """The host's, which asks codes for a gradient and so cannot hold them."""

        def __new__(cls, caster, state_dict_key, tensor):
            return torch.nn.Parameter.__new__(cls, tensor, False)

    return LazyPiece


class _Loading:
    """The host's patcher with patches on INT8 Linears beside the weights; see lora_patcher.py."""

    native_int8_branch: lora_branch.BranchSet | None = None
    _hook_branches: tuple[lora_branch.BranchSet, ...] = ()
    _codes_hidden = False

    def native_int8_plan(self) -> Plan:
        """Sort the patches on INT8 weights."""
        plan = Plan({}, {}, Counter())
        for key, module, found in self._int8_patches(self.patches):
            if not isinstance(found, str):
                plan.beside[key] = module, found
            else:
                plan.reasons[found] += 1
                if not self.is_dynamic():
                    plan.baked[key] = module
        return plan

    def _int8_patches(self, all_patches: dict):
        """(key, module, terms or why there are none) of the patches on INT8 weights."""
        import comfy.utils
        from comfy.patcher_extension import WrappersMP

        if not self.get_wrappers(WrappersMP.APPLY_MODEL, NAME):
            return
        for key, patches in all_patches.items():
            path, _, name = key.rpartition(".")
            try:
                module = comfy.utils.get_attr(self.model, path)
            except AttributeError:
                # another pack took the layer away; the host finds no weight there either
                continue
            if name != "weight" or not short_way.is_known(module):
                continue
            why_not = lora_branch.why_not_beside(self.model, path, module)
            yield key, module, why_not or lora_branch.terms_of(patches, module)

    def load(self, device_to=None, lowvram_model_memory=0, force_patch_weights=False, full_load=False, **more):
        """The host's load without the patches on INT8 weights, then those that are baked in, then callbacks."""
        from comfy.patcher_extension import CallbacksMP

        plan = self.native_int8_plan()
        facts = (device_to, lowvram_model_memory, force_patch_weights, full_load)
        callbacks = self.callbacks.pop(CallbacksMP.ON_LOAD, {})
        try:
            with self._hidden(plan):
                result = super().load(*facts, **more)
        finally:
            self.callbacks[CallbacksMP.ON_LOAD] = callbacks
        self._bake(plan, device_to)
        self._loaded(plan)
        for callback in self.get_all_callbacks(CallbacksMP.ON_LOAD):
            callback(self, *facts)
        return result

    def partially_load(self, device_to, *args, **kwargs):
        """The host's, told beforehand when the weights are already those of this MODEL."""
        plan = self.native_int8_plan()
        self._settle(plan)
        result = super().partially_load(device_to, *args, **kwargs)
        if self.model.current_weight_patches_uuid == self.patches_uuid:
            self._loaded(plan)
        return result

    def partially_unload(self, *args, **kwargs):
        """The host's; baked codes move, and the stacks are made again at the next run."""
        self._drop()
        cuda_graphs.drop(self.model.diffusion_model)
        with self._hidden(self.native_int8_plan()):
            return super().partially_unload(*args, **kwargs)

    def unpatch_model(self, device_to=None, unpatch_weights=True):
        """The host's; without weights there are no stacks."""
        if unpatch_weights:
            self._drop()
            cuda_graphs.drop(self.model.diffusion_model)
            lora_branch.set_loaded(self.model, None)
        return super().unpatch_model(device_to, unpatch_weights)

    def detach(self, *args, **kwargs):
        """The host's; the MODEL that comes next makes its own stacks."""
        self._drop()
        return super().detach(*args, **kwargs)

    def patch_hooks(self, hooks):
        """The host's; low-rank patches of hooks on INT8 weights are added to the stacks while their hooks are active."""
        super().patch_hooks(hooks)
        terms = self._hook_terms(super().get_combined_hook_patches(hooks))
        if not terms or self.native_int8_branch is None:
            self._add(self.native_int8_branch)
            return
        modules = dict(self.native_int8_branch.modules)
        for module, more in terms.values():
            modules[module] = [*modules.get(module, ()), *more]
        made = [old for old in self._hook_branches if old.uuid == self.patches_uuid]
        found = next((old for old in made if old.is_made_of(modules)), None)
        if found is None:
            found = lora_branch.BranchSet(self.patches_uuid, modules)
            made = [found, *made[: HOOK_GROUPS - 1]]
        self._hook_branches = tuple(made)
        self._add(found)

    def unpatch_hooks(self, whitelist_keys_set=None):
        """The host's; without hooks the stacks are those of the MODEL's own patches."""
        super().unpatch_hooks(whitelist_keys_set)
        if not whitelist_keys_set:
            self._add(self.native_int8_branch)

    def _add(self, branch: lora_branch.BranchSet | None) -> None:
        """Let `branch` be what runs beside the product, if the patches of this MODEL are those that are loaded."""
        state = lora_branch.loaded(self.model)
        if branch is not None and state is not None and state.uuid == branch.uuid == self.patches_uuid:
            state.branch = weakref.ref(branch)

    def get_combined_hook_patches(self, hooks):
        """The host's, without what runs beside the product."""
        combined = super().get_combined_hook_patches(hooks)
        beside = self._hook_terms(combined)
        return {key: patches for key, patches in combined.items() if key not in beside}

    def _hook_terms(self, combined: dict) -> dict[str, tuple[torch.nn.Module, list]]:
        """INT8 Linears and their terms by key. Raises: RuntimeError for patches that only the weight could take."""
        found = {}
        for key, module, terms in self._int8_patches(combined):
            if isinstance(terms, str):
                raise RuntimeError(
                    f"A LoRA that hooks schedule cannot change the INT8 weight {key} while sampling: {terms}. A LoRA of two "
                    "small matrices is needed; load this one with a LoRA loader without hooks, or use the float model."
                )
            found[key] = module, terms
        return found

    def get_key_patches(self, filter_prefix=None):
        """The host's, of whole weights only; it looks for the scale of an INT8 weight as for a weight and finds none."""
        self._codes_hidden = True
        try:
            return super().get_key_patches(filter_prefix)
        finally:
            self._codes_hidden = False

    def model_state_dict(self, filter_prefix=None):
        """The host's."""
        state = super().model_state_dict(filter_prefix)
        if self._codes_hidden:
            for path, module in self.model.named_modules():
                if short_way.is_known(module):
                    name = f"{path}.weight"
                    for part in {f"{path}.comfy_quant", *module.weight.state_dict(name)} - {name}:
                        state.pop(part, None)
        return state

    def memory_required(self, *args, **kwargs):
        """Bytes that a run needs beside the weights: the host's estimate and the stacks that are still to be made."""
        branch = self.native_int8_branch
        if branch is None or branch.uuid != self.patches_uuid:
            branch = self._branch_of(self.native_int8_plan())
        return super().memory_required(*args, **kwargs) + branch.missing_bytes(self.model.get_dtype_inference())

    def model_state_dict_for_saving(self, model=None, prefix=""):
        """The host's, with every patch on an INT8 weight baked in once, when a saver asks for the tensor."""
        from comfy.model_patcher import LazyCastingQuantizedParam

        modules = (self.model if model is None else model).named_modules()
        int8 = {path: module for path, module in modules if short_way.is_known(module)}
        before = {module: module.__dict__.get("comfy_patched_weights") for module in int8.values()}
        try:
            # to the host: take it as it is
            for module in before:
                module.comfy_patched_weights = True
            state = super().model_state_dict_for_saving(model, prefix)
        finally:
            for module, flag in before.items():
                if flag is None:
                    del module.comfy_patched_weights
                else:
                    module.comfy_patched_weights = flag
        for path, module in int8.items():
            name = f"{path}.weight"
            if prefix + name in self.patches and prefix + name not in self.backup:
                lazy = LazyCastingQuantizedParam(self, prefix + name)
                for part in module.weight.state_dict(name).keys() & state.keys():
                    state[part] = _lazy_piece()(lazy, prefix + part, state[part])
        return state

    @contextlib.contextmanager
    def _hidden(self, plan: Plan):
        """The host sees neither the patches of `plan` nor the original weights behind baked ones."""
        whole = self.patches
        baked = {key: self.backup.pop(key) for key in plan.baked if key in self.backup}
        self.patches = {key: found for key, found in whole.items() if key not in plan.beside and key not in plan.baked}
        try:
            yield
        finally:
            self.patches = whole
            self.backup.update(baked)

    def _bake(self, plan: Plan, device_to) -> None:
        import comfy.utils

        for key, module in plan.baked.items():
            if key in self.backup:
                continue
            home, pinned = module.weight.device, key in self.pinned
            if pinned:
                self.unpin_weight(key)
            self.patch_weight_to_device(key, device_to=device_to)
            if module.weight.device != home:
                comfy.utils.set_attr_param(self.model, key, module.weight.to(home))
            if pinned:
                self.pin_weight_to_device(key)

    def _rest(self, plan: Plan) -> tuple[tuple, list]:
        """What makes the weights as they are: everything but the low-rank patches, compared by identity."""
        facts, kept = [self.force_cast_weights], []
        for key in sorted(self.patches.keys() - plan.beside.keys()):
            for strength, patch, strength_model, offset, function in self.patches[key]:
                facts.append((key, strength, id(patch), strength_model, offset, id(function)))
                kept += [patch, function]
        for key in sorted(self.weight_wrapper_patches):
            facts.append((key, *map(id, self.weight_wrapper_patches[key])))
            kept += self.weight_wrapper_patches[key]
        # an id means something only while its object lives
        return tuple(facts), kept

    def _settle(self, plan: Plan) -> None:
        base = self.model
        if base.current_weight_patches_uuid is None:
            return
        state = lora_branch.loaded(base)
        if state is not None and state.rest[0] == self._rest(plan)[0]:
            base.current_weight_patches_uuid = state.uuid = self.patches_uuid
        elif state is None and (plan.beside or plan.baked) and base.current_weight_patches_uuid == self.patches_uuid:
            # another kind of patcher loaded these patches, all of them into the weights
            base.current_weight_patches_uuid = uuid.uuid4()

    def _loaded(self, plan: Plan) -> None:
        """Keep what was loaded, for `lora_branch.inside` and the next `_settle`."""
        state, branch = lora_branch.loaded(self.model), self.native_int8_branch
        if state is not None and branch is not None and state.branch() is branch and branch.uuid == self.patches_uuid:
            return
        branch = self.native_int8_branch = self._branch_of(plan)
        lora_branch.set_loaded(
            self.model, lora_branch.Loaded(self.patches_uuid, self._rest(plan), branch, self.load_device)
        )
        if plan.beside or plan.reasons:
            reasons = "; ".join(f"{reason} ({count} layers)" for reason, count in plan.reasons.items())
            log.info(
                "LoRA on INT8 layers: %d run it beside the product, %d have it in the weight%s",
                len(plan.beside),
                sum(plan.reasons.values()),
                f": {reasons}" if reasons else "",
            )

    def _branch_of(self, plan: Plan) -> lora_branch.BranchSet:
        return lora_branch.BranchSet(self.patches_uuid, dict(plan.beside.values()))

    def _drop(self) -> None:
        for branch in (self.native_int8_branch, *self._hook_branches):
            if branch is not None:
                branch.drop()
