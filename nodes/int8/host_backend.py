"""Our INT8 linear as a backend of comfy_kitchen, switched on per MODEL.

ComfyUI looks every INT8 matrix product up by name in comfy_kitchen's registry. `register` adds a backend called
`native_int8` there without touching the priority list, so nothing uses it by itself. `attach` gives one MODEL a
wrapper around `apply_model` that selects the backend for the calling thread while the model runs, and opens the
short way (short_way.py) past most of the host's dispatch. Calls that the backend declines go to the host's next backend;
both are counted in the MODEL's `CallRecord`.
"""

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...kernels import choose, int8_linear, int8_linear_residual, int8_matmul, quantize_rms_norm
from ...kernels.capability import detect
from ...kernels.dispatch import Int8Error
from . import direct_linears, lora_branch, lora_patcher, own_wrappers, short_way, traced, tuned_tiles
from .call_record import CallRecord
from .cuda_graphs import Graphs
from .fusion import registry as fusion
from .fusion import rope
from .speeds import FUSED, FUSING, GRAPHED, LINEAR_ONLY, OFF, SPEEDS

NAME = "native_int8"

FLOAT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
INPUT_ACTS = {None: None, "none": None, "gelu_tanh": "gelu_tanh", "swiglu": "swiglu"}
RMS_NORM = "rms_norm"
LINEAR_KEYS = frozenset(
    {"x", "weight", "weight_scale", "bias", "out_dtype", "convrot", "convrot_groupsize", "input_act"}
)
# arguments of newer hosts: an RMSNorm in front of the Linear, a gate and a residual behind it
FUSED_KEYS = frozenset({"input_act_weight", "input_act_eps", "residual", "residual_scale"})

log = logging.getLogger("native_int8.host_backend")
_running = threading.local()
_decisions: dict[tuple, str | None] = {}
_implementations: dict[tuple, str] = {}
_lock = threading.Lock()


class _UseNativeInt8:
    """The APPLY_MODEL wrapper: selects our backend, for this thread, while the model runs.

    Clones of a MODEL share this object and so the record and the CUDA graphs. speed: any of SPEEDS but OFF.
    """

    def __init__(self, speed: str = FUSED, tell: Callable[[str], None] | None = None):
        self.record = CallRecord()
        self.speed = speed
        self.graphs = Graphs(tell) if speed == GRAPHED else None

    def __call__(self, executor, *args, **kwargs):
        module = getattr(executor.class_obj, "diffusion_model", None)
        with lora_branch.inside(executor.class_obj), self.running(module, self.speed in FUSING):
            return executor(*args, **kwargs)

    @contextlib.contextmanager
    def running(self, module: torch.nn.Module | None, fused: bool = False):
        """Select our backend for this thread, and the short way for the INT8 Linears of `module`; fuse its blocks."""
        from comfy_kitchen.registry import registry

        if not registry.is_available(NAME):
            self.record.add_declined(f"the backend {NAME} was switched off in comfy_kitchen's registry")
            yield
            return
        outer = getattr(_running, "record", None)
        _running.record = self.record
        short = module is not None and short_way.is_enabled()
        try:
            with (
                registry.use_backend(NAME),
                short_way.inside(module, self.record.add_run) if short else contextlib.nullcontext(),
                direct_linears.seated(module) if short else contextlib.nullcontext(),
                fusion.inside(module) if short and fused and fusion.is_enabled() else contextlib.nullcontext(),
                self.graphs.inside(module) if short and fused and self.graphs else contextlib.nullcontext(),
            ):
                yield
        finally:
            _running.record = outer


def register() -> None:
    """Make the backend known to comfy_kitchen; calling it again changes nothing.

    Raises:
        RuntimeError: comfy_kitchen is missing or cannot take backends.
    """
    try:
        from comfy_kitchen.constraints import FunctionConstraints
        from comfy_kitchen.registry import registry
    except ImportError as error:
        raise RuntimeError(
            f"INT8 models need comfy_kitchen with a backend registry, which could not be imported ({error}). "
            "Install the requirements.txt of this ComfyUI (comfy-kitchen 0.2.26 or newer) and restart it."
        ) from error
    traced.define(lambda codes, weight: _counted(codes, weight, 0, None))
    with _lock:
        if NAME in registry.list_backends():
            return
        rules = {function: _rule(function) for function in _EXTRA_KEYS}
        rules |= {function: _rope_rule(function) for function in rope.FUNCTIONS}
        registry.register(
            NAME,
            _Functions,
            {
                function: FunctionConstraints(default_devices=frozenset({"*"}), call_rules=(rule,))
                for function, rule in rules.items()
            },
        )


def attach(model) -> None:
    """Let the INT8 linears of `model` (a ModelPatcher) run on our kernels; calling it again changes nothing."""
    enable(model)
    own_wrappers.install(model)
    lora_patcher.install(model)


def enable(model) -> _UseNativeInt8:
    """Give `model` (any patcher) what selects our backend, if it has none; the host calls it for a MODEL only."""
    from comfy.patcher_extension import WrappersMP

    register()
    tuned_tiles.use(model.load_device)
    found = _wrapper_of(model)
    if found is None:
        found = _UseNativeInt8()
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, NAME, found)
    return found


def set_speed(model, speed: str, tell: Callable[[str], None] | None = None) -> None:
    """Choose how much of `model` runs on our kernels, one of SPEEDS; other clones keep theirs.

    GRAPHED: as FUSED, started as a CUDA graph. FUSED: Linears and the passes around them. LINEAR_ONLY: INT8 Linears.
    OFF: nothing, as `detach`.

    Args:
        tell: gets a sentence for the user when a CUDA graph was recorded, or why there is none.
    """
    from comfy.patcher_extension import WrappersMP

    if speed not in SPEEDS:
        raise ValueError(f"The INT8 speed is {speed!r}. Needed: one of {SPEEDS}. Choose one of these in the node.")
    if speed == OFF:
        detach(model)
        return
    attach(model)
    if _wrapper_of(model).speed != speed:
        model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, NAME)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, NAME, _UseNativeInt8(speed, tell))


def speed_of(model) -> str:
    """How much of `model` runs on our kernels, one of SPEEDS; a text encoder has no blocks to fuse."""
    wrapper = _wrapper_of(model)
    if wrapper is None:
        return OFF
    return wrapper.speed if hasattr(model.model, "diffusion_model") else LINEAR_ONLY


def detach(model) -> None:
    """Take the wrapper of `attach` off `model` again."""
    from comfy.patcher_extension import WrappersMP

    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, NAME)
    own_wrappers.uninstall(model)
    lora_patcher.uninstall(model)


def is_attached(model) -> bool:
    """Whether `attach` was called on `model` or on the MODEL it was cloned from."""
    return _wrapper_of(model) is not None


def record_of(model) -> CallRecord | None:
    """The call record of `model`, shared with its clones; None when it is not attached."""
    wrapper = _wrapper_of(model)
    return None if wrapper is None else wrapper.record


def _wrapper_of(model) -> _UseNativeInt8 | None:
    from comfy.patcher_extension import WrappersMP

    # by attribute, not by class: a reloaded pack has another class of the same meaning
    wrappers = model.get_wrappers(WrappersMP.APPLY_MODEL, NAME)
    return next((wrapper for wrapper in wrappers if hasattr(wrapper, "record")), None)


class _Functions:
    """What the registry calls, by the host's function names and with the host's keyword arguments."""

    rms_rope, rms_rope_split_half = staticmethod(rope.rms_rope), staticmethod(rope.rms_rope_split_half)

    @staticmethod
    def int8_linear(
        x,
        weight,
        weight_scale,
        bias=None,
        out_dtype=None,
        convrot=False,
        convrot_groupsize=256,
        input_act=None,
        input_act_weight=None,
        input_act_eps=0.0,
        residual=None,
        residual_scale=None,
    ):
        """y [..., N] = act(x [..., K]) @ weight [N, K].T, or residual + residual_scale * y; see `kernels.int8_linear`."""
        # the host's own default, though it always passes one
        out_dtype = out_dtype or torch.bfloat16
        if input_act == RMS_NORM:
            return _Functions._normed(
                x, input_act_weight, input_act_eps, weight, weight_scale, bias, out_dtype, convrot, convrot_groupsize
            )
        group = int(convrot_groupsize) if convrot else 0
        act = INPUT_ACTS[input_act]
        implementation = _counted(x, weight, group, act)
        static = {"rotation_group": group, "input_act": act, "implementation": implementation}
        if residual is not None:
            gate = None if residual_scale is None else residual_scale.reshape(-1)
            return int8_linear_residual(x, weight, weight_scale, bias, residual=residual, gate=gate, **static)
        return int8_linear(x, weight, weight_scale, bias, out_dtype=out_dtype, **static)

    @staticmethod
    def int8_linear_modulated(x, modulation_scale, **linear):
        """`int8_linear` of x * (1 + modulation_scale), one modulation row [K] for all tokens."""
        # with a backend selected, the host takes this path without asking whether it is fused;
        # composed here it costs what the host's unfused path costs
        return _Functions.int8_linear(x * (1.0 + modulation_scale.reshape(x.shape[-1])), **linear)

    @staticmethod
    def int8_linear_rms_modulated(x, norm_weight, norm_eps, modulation_scale, weight, weight_scale, **linear):
        """`int8_linear` of rms_norm(x) * (1 + modulation_scale), norm_weight and modulation_scale [K]."""
        factors = norm_weight.reshape(-1).float() * (1.0 + modulation_scale.reshape(-1).float())
        return _Functions._normed(x, factors, norm_eps, weight, weight_scale, **linear)

    @staticmethod
    def _normed(
        x, factors, eps, weight, weight_scale, bias=None, out_dtype=None, convrot=False, convrot_groupsize=256, **_
    ):
        """The Linear of x / rms(x) * factors: the norm is part of the pass that quantises."""
        group = int(convrot_groupsize) if convrot else 0
        implementation = _counted(x, weight, group, None)
        codes, scale = quantize_rms_norm(x, factors, eps, rotation_group=group, implementation=implementation)
        return int8_matmul(
            codes,
            scale,
            weight,
            weight_scale,
            bias,
            out_dtype=out_dtype or torch.bfloat16,
            implementation=implementation,
        )


def _counted(x: torch.Tensor, weight: torch.Tensor, group: int, act: str | None) -> str:
    """The implementation of a layer, counted in the record of the MODEL that is running."""
    implementation = _implementation(x.device, weight.shape, group, act)
    record = getattr(_running, "record", None)
    if record is not None:
        record.add_call(implementation)
    return implementation


_EXTRA_KEYS = {
    "int8_linear": frozenset(),
    "int8_linear_modulated": frozenset({"modulation_scale"}),
    "int8_linear_rms_modulated": frozenset({"modulation_scale", "norm_weight", "norm_eps"}),
}


def _rule(function: str):
    """The registry's question "can you run this call?" for one function, answered by `_refusal`."""

    def rule(kwargs: Mapping[str, Any]):
        from comfy_kitchen.constraints import ValidationResult

        reason = _refusal(function, kwargs)
        if reason is None:
            return ValidationResult.ok()
        record = getattr(_running, "record", None)
        if record is not None:
            record.add_declined(reason)
        return ValidationResult.fail(function, reason)

    return rule


def _rope_rule(function: str):
    def rule(kwargs: Mapping[str, Any]):
        from comfy_kitchen.constraints import ValidationResult

        reason = rope.refusal(function, kwargs)
        return ValidationResult.ok() if reason is None else ValidationResult.fail(function, reason)

    return rule


def _refusal(function: str, kwargs: Mapping[str, Any]) -> str | None:
    """None if the call can run on our kernels, else one sentence that says why not."""
    if not kwargs:
        return None
    extra = _EXTRA_KEYS[function]
    for name in kwargs:
        if name in LINEAR_KEYS or name in extra:
            continue
        if name not in FUSED_KEYS:
            return f"the argument {name} is not known here"
    x, weight, scale = (kwargs.get(name) for name in ("x", "weight", "weight_scale"))
    missing = [name for name in ("x", "weight") if not isinstance(kwargs.get(name), torch.Tensor)]
    if missing:
        return f"{' and '.join(missing)} must be tensors"
    for name in extra - {"norm_eps"}:
        if kwargs.get(name) is None or kwargs[name].numel() != weight.shape[-1]:
            return f"{name} must hold one row of {weight.shape[-1]} values"
    fused = _fused_refusal(x, weight, kwargs)
    if fused is not None:
        return fused
    # everything below is a static fact of a layer, so it is worked out once
    key = (
        x.dtype, x.device, x.ndim, x.shape[-1:], weight.dtype, weight.device, weight.shape,
        None if scale is None else (scale.dtype, scale.device, scale.numel()),
        kwargs.get("out_dtype"), kwargs.get("convrot"), kwargs.get("convrot_groupsize"), kwargs.get("input_act"),
    )  # fmt: skip
    if key not in _decisions:
        _decisions[key] = _static_refusal(x, weight, scale, kwargs)
    return _decisions[key]


def _fused_refusal(x, weight, kwargs) -> str | None:
    """What is wrong with a norm in front or a residual behind; None when both are absent or can run."""
    if x.requires_grad and torch.is_grad_enabled():
        return "x needs a gradient, which rounding to INT8 has not"
    normed = kwargs.get("input_act") == RMS_NORM
    norm_weight, residual, scale = (kwargs.get(name) for name in ("input_act_weight", "residual", "residual_scale"))
    if normed and (norm_weight is None or norm_weight.numel() != weight.shape[-1]):
        return f"input_act_weight must hold {weight.shape[-1]} values for an RMSNorm"
    if norm_weight is not None and not normed:
        return "input_act_weight is only known for an RMSNorm"
    if residual is None:
        return None if scale is None else "residual_scale is given without a residual"
    if normed:
        return "an RMSNorm together with a residual is not supported"
    if residual.dtype not in FLOAT_DTYPES or residual.shape != (*x.shape[:-1], weight.shape[0]):
        return f"residual is {residual.dtype} {tuple(residual.shape)}; floats {(*x.shape[:-1], weight.shape[0])} are needed"
    if kwargs.get("out_dtype") not in (None, residual.dtype):
        return f"residual is {residual.dtype} where the output is {kwargs['out_dtype']}"
    if scale is not None and scale.numel() != weight.shape[0]:
        return f"residual_scale holds {scale.numel()} values; {weight.shape[0]} are needed"
    return None


def _static_refusal(x, weight, scale, kwargs) -> str | None:
    if x.dtype not in FLOAT_DTYPES:
        return f"x is {x.dtype}; float16, bfloat16 or float32 is needed"
    if not 1 <= x.ndim <= 5:
        return f"x has {x.ndim} dimensions; 1 to 5 are supported"
    if weight.dtype != torch.int8 or weight.ndim != 2:
        return f"weight is {weight.dtype} with {weight.ndim} dimensions; int8 [N, K] is needed"
    if kwargs.get("input_act") not in (*INPUT_ACTS, RMS_NORM):
        return f"the input activation {kwargs['input_act']} is not supported"
    n, k = weight.shape
    act = INPUT_ACTS.get(kwargs.get("input_act"))
    expected = 2 * k if act == "swiglu" else k
    if x.shape[-1] != expected:
        return f"x has {x.shape[-1]} features where the weight [{n}, {k}] needs {expected}"
    if weight.device != x.device:
        return f"weight is on {weight.device} and x on {x.device}"
    if scale is not None and (scale.numel() not in (1, n) or not scale.dtype.is_floating_point):
        return f"weight_scale holds {scale.numel()} values of {scale.dtype}; 1 or {n} floats are needed"
    if scale is not None and scale.device != x.device:
        return f"weight_scale is on {scale.device} and x on {x.device}"
    if kwargs.get("out_dtype") not in (None, *FLOAT_DTYPES):
        return f"the output type {kwargs['out_dtype']} is not supported"
    group = int(kwargs.get("convrot_groupsize") or 256) if kwargs.get("convrot") else 0
    try:
        _implementation(x.device, weight.shape, group, act)
    except Int8Error as error:
        return str(error)
    return None


def _implementation(device: torch.device, weight_shape: torch.Size, group: int, act: str | None) -> str:
    """The implementation that the kernels choose for a layer; chosen once, since only static facts count."""
    key = (device, weight_shape, group, act)
    found = _implementations.get(key)
    if found is None:
        n, k = weight_shape
        choice = choose(detect(device), in_features=k, out_features=n, rotation_group=group, input_act=act)
        log.debug("Linear [%d, %d] on %s: %s", n, k, device, choice.sentence())
        found = _implementations[key] = choice.implementation
    return found
