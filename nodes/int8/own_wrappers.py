"""A MODEL runs with its own wrappers, also as the second MODEL of a guider.

The host's Dual Model Guider calls the negative MODEL with the options of the positive one. The wrappers in them that belong
to one MODEL, ours and torch.compile's, would then run the negative MODEL without its low-rank LoRAs when the positive one
is not INT8, or put the compiled positive model in its place. So while a MODEL of ours runs, from the host's ON_PRE_RUN to
its ON_CLEANUP, an instance attribute `apply_model` of its model puts these wrappers right where they are another MODEL's.
"""

from __future__ import annotations

NAME = "native_int8"


def install(model) -> None:
    """Let the patcher `model` and its clones run with their own wrappers; calling it again changes nothing."""
    from comfy.patcher_extension import CallbacksMP

    uninstall(model)
    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, NAME, _before)
    model.add_callback_with_key(CallbacksMP.ON_CLEANUP, NAME, _after)


def uninstall(model) -> None:
    """Take back what `install` did."""
    from comfy.patcher_extension import CallbacksMP

    for kind in (CallbacksMP.ON_PRE_RUN, CallbacksMP.ON_CLEANUP):
        model.remove_callbacks_with_key(kind, NAME)


def _before(patcher) -> None:
    base = patcher.model
    # somebody else's is left alone; ours is there when two MODELs of one model run at once
    if "apply_model" in vars(base) or not hasattr(base, "apply_model"):
        return
    of_class, kind = base.apply_model, _kind()
    own = {key: list(patcher.get_wrappers(kind, key)) for key in _keys()}

    def apply_model(*args, **kwargs):
        options = kwargs.get("transformer_options")
        given = {} if options is None else options.get("wrappers", {}).get(kind, {})
        # clones share the wrapper, and the host adds wrappers of hooks
        if options is not None and not any(wrapper in given.get(NAME, ()) for wrapper in own[NAME]):
            mine = {key: found for key, found in given.items() if key not in own}
            mine |= {key: found for key, found in own.items() if found}
            kwargs["transformer_options"] = options | {"wrappers": options.get("wrappers", {}) | {kind: mine}}
        return of_class(*args, **kwargs)

    apply_model.native_int8 = True
    base.__dict__["apply_model"] = apply_model


def _after(patcher) -> None:
    if getattr(vars(patcher.model).get("apply_model"), "native_int8", False):
        del patcher.model.__dict__["apply_model"]


def _kind() -> str:
    from comfy.patcher_extension import WrappersMP

    return WrappersMP.APPLY_MODEL


def _keys() -> tuple[str, str]:
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY

    return NAME, COMPILE_KEY
