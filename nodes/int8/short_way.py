"""The short way: INT8 Linears of a running MODEL call the kernel directly instead of through tensor dispatch.

The general way of one Linear is: the host's forward, its cast of weight and bias, F.linear on a tensor subclass, a custom
op, the registry's validation, our backend, the kernel. On a fast GPU with a small picture the GPU waits for that.
While a MODEL runs, each of its INT8 Linears gets two seats, instance attributes that the host's own forward calls:

- `forward_comfy_cast_weights`: the host has decided that the weight is used as INT8 and nothing changes it. If weight and
  bias lie on the input's device, they go to the kernel as they are ("resident"). That a weight is still the one that was
  checked is seen from the identity of its two parts, so a LoRA that was baked in, or a move, leads to a new check.
- `_forward`: otherwise the host fetches the weight its own way (offload, dynamic VRAM, LoRA on the fly); if what it hands
  over is still INT8, it goes to the kernel ("fetched"). All else is the class's own method ("general").

Why seats below `forward` and not `forward` itself: the host's checks (weight functions, forced casts, full precision, input
scales, interrupts) stay the host's, in every version of it; and packs that replace `forward`, such as bypass LoRAs, can
come and go in any order, above us, without saving or restoring anything of ours. It costs 5 us more per Linear than a
replaced `forward` (tests/bench/host_time.py measures both).

Why in the APPLY_MODEL wrapper and not a ModelPatcher injection: an injection stays on the shared model for as long as the
MODEL is loaded, is seen by every other MODEL of it, and is ejected in insertion order by a host that others rely on. The
wrapper's seats exist during the call only. Setting and deleting both costs about 0.3 us per Linear and forward, since
the instance dictionary is written directly. Clones and multi-GPU copies share the wrapper; seats belong to the model
that runs. A seat does nothing but call the class's method for a thread that is not inside a wrapper, while
torch.compile traces, and if somebody kept it by mistake.

On both short ways Linears that read the same tensor quantise it once; which ones those are says shared_rows.py.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import weakref
from collections import Counter

import torch

from ...kernels.capability import detect
from ...kernels.dispatch import Int8Error, LinearFacts, choose_for
from ...kernels.low_rank import LowRank, add_low_rank
from ...kernels.prepared_linear import PreparedLinear
from . import shared_rows, traced
from .model_run import Run
from .seats import PerModel, Seat, Seats

LAYOUT = "TensorWiseINT8Layout"
SWITCH = "NATIVE_INT8_SHORT_WAY"
RESIDENT, FETCHED, GENERAL = "resident", "fetched", "general"
UPPER, LOWER = "forward_comfy_cast_weights", "_forward"
# the attribute of a Linear that holds the stack of its LoRAs while a MODEL with LoRAs runs (lora_branch.py)
BRANCH = "native_int8_low_rank"

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32})
_thread = threading.local()
_is_compiling = torch.compiler.is_compiling


def is_enabled() -> bool:
    """Whether the short way is allowed; NATIVE_INT8_SHORT_WAY=0 forbids it."""
    return os.environ.get(SWITCH, "1") != "0"


@contextlib.contextmanager
def inside(diffusion_model: torch.nn.Module, add_run):
    """Let the INT8 Linears of `diffusion_model` take the short way in this thread.

    Args:
        add_run: called with the `Run` at the end.
    """
    seats = seats_of(diffusion_model)
    traced.visible, traced.fused = traced.choice() == traced.VISIBLE, False
    outer = getattr(_thread, "run", None)
    run = _thread.run = Run()
    seats.enter_run(run)
    try:
        yield
    finally:
        seats.leave()
        run.shared.forget()
        _thread.run = outer
        add_run(run)


@contextlib.contextmanager
def counting(facts: dict[str, bool]):
    """Count what this thread does from here on in a `Run` of its own, with `facts`; inside `inside`."""
    outer = _thread.run
    run = _thread.run = Run()
    run.facts = facts
    try:
        yield run
    finally:
        run.shared.forget()
        _thread.run = outer


@contextlib.contextmanager
def seated(diffusion_model: torch.nn.Module):
    """Give the INT8 Linears their seats, though they need not take the short way; for what else hangs on a seat."""
    seats = seats_of(diffusion_model)
    seats.enter(Counter())
    try:
        yield
    finally:
        seats.leave()


def is_seated(module: torch.nn.Module) -> bool:
    """Whether what the Linear multiplies with is its seat, and not what another pack put there first."""
    return getattr(module.__dict__.get(LOWER), "__module__", None) == __name__


def current_run() -> Run | None:
    """The run of this thread; None outside a MODEL and while torch.compile traces."""
    return None if _is_compiling() else getattr(_thread, "run", None)


def rows_kind(module: torch.nn.Module, device: torch.device) -> tuple | None:
    """The kind of rows that an INT8 Linear wants on `device` (see PreparedLinear.rows_kind); None without its seats."""
    if _is_compiling():
        return traced.kind_of(module)
    attributes = module.__dict__
    if any(getattr(attributes.get(name), "__module__", "") != __name__ for name in (UPPER, LOWER)):
        return None
    return static_kind(module, device)


def static_kind(module: torch.nn.Module, device: torch.device) -> tuple | None:
    """`rows_kind` of a Linear that need not have seats; None when it is not INT8."""
    weight = module._parameters.get("weight")
    if getattr(weight, "_layout_cls", None) != LAYOUT:
        return None
    columns, group = weight._qdata.shape[1], _rotation_group(weight._params)
    implementation = choose_for(detect(device), LinearFacts(columns, module.out_features, group)).implementation
    return device, implementation, columns, group, None


def low_rank_of(module: torch.nn.Module) -> LowRank | None:
    """The stack of LoRAs that a Linear adds now, for which it reads its input in float."""
    return module.__dict__.get(BRANCH)


def resident_parts(module: torch.nn.Module, input: torch.Tensor) -> tuple | None:
    """(codes, scale, bias) of an INT8 Linear that lies on the input's device as it is; None when the host has to do anything.

    For a caller that multiplies without calling the Linear, and adds what `low_rank_of` gives.
    """
    weight, bias, attributes = module._parameters.get("weight"), module._parameters.get("bias"), module.__dict__
    if (
        "_v" in attributes
        or module.weight_function
        or module.bias_function
        or getattr(module, "comfy_force_cast_weights", False)
        or getattr(module, "_full_precision_mm", False)
        or getattr(module, "pre_quant_scale", None) is not None
        or _unfit_input(input, bias) is not None
        or (bias is not None and bias.dtype != input.dtype)
        or getattr(weight, "_layout_cls", None) != LAYOUT
    ):
        return None
    codes, params = weight._qdata, weight._params
    scale = params.scale
    fits = (
        codes.device == scale.device == input.device
        and codes.shape[1] == input.shape[-1]
        and codes.stride(1) == 1
        and scale.dtype == torch.float32
        and scale.is_contiguous()
        and not getattr(params, "transposed", False)
    )
    return (codes, scale, bias) if fits else None


class _Seats(Seats):
    """The seats of one model's Linears; there while at least one thread runs the model on our kernels."""

    def __init__(self, diffusion_model: torch.nn.Module):
        places, self.not_shared = shared_rows.find(diffusion_model, is_known)
        super().__init__(
            (
                Seat(module.__dict__, LOWER, _lower_seat(module, linear)),
                Seat(module.__dict__, UPPER, _upper_seat(module, linear)),
            )
            for module in diffusion_model.modules()
            if is_known(module)
            for linear in [_Linear(places.get(id(module)))]
        )

    def enter_run(self, run: Run) -> None:
        """`enter`, counted in the thread's run."""
        run.shared.not_shared.update(self.not_shared)
        self.enter(run.reasons)


seats_of = PerModel(_Seats)


def is_known(module: torch.nn.Module) -> bool:
    """Whether `module` is an INT8 Linear whose forward is the host's and calls the two methods as they are known here."""
    if getattr(module, "layout_type", None) != LAYOUT or not hasattr(module, "in_features"):
        return False
    methods = [getattr(type(module), name, None) for name in (UPPER, LOWER)]
    if any(getattr(method, "__module__", None) != "comfy.ops" for method in methods):
        return False
    upper, lower = (list(inspect.signature(method).parameters) for method in methods)
    return upper[1] == "input" and "weight_only_quant" in upper and lower[1:] == ["input", "weight", "bias"]


class _Linear:
    """What was checked about one Linear's weight. `resident` and `fetched` are replaced whole, since threads share them.

    resident: (PreparedLinear, weak reference to the codes, weak reference to their parameters); no weight is kept alive.
    fetched: (PreparedLinear, what must be equal for it to fit).
    place: where it stands among Linears that read the same tensor, or None.
    """

    __slots__ = ("fetched", "place", "resident")

    def __init__(self, place: shared_rows.Place | None):
        self.place = place
        self.resident = self.fetched = None


def _upper_seat(module: torch.nn.Module, linear: _Linear):
    of_class = getattr(type(module), UPPER)
    attributes, parameters = module.__dict__, module._parameters

    def forward_comfy_cast_weights(input, *args, **kwargs):
        run = None if _is_compiling() else getattr(_thread, "run", None)
        if run is None:
            return of_class(module, input, *args, **kwargs)
        weight, bias = parameters.get("weight"), parameters.get("bias")
        if not kwargs.get("weight_only_quant") and _is_only_forced(module, weight):
            kwargs["weight_only_quant"] = True
        known = linear.resident
        if not kwargs.get("weight_only_quant"):
            reason = _why_not_int8(module)
        elif "_v" in attributes:
            reason = "the host's dynamic VRAM holds the weight"
        else:
            reason = _unfit_input(input, bias)
            if reason is None and not _is_current(known, weight, input):
                known = _check_resident(weight, input)
                reason = known if type(known) is str else None
                if reason is None:
                    linear.resident = known
        if reason is not None:
            run.reasons[reason] += 1
            return of_class(module, input, *args, **kwargs)
        # the host rounds the bias to the input's type, too
        if bias is not None and bias.dtype is not input.dtype:
            bias = bias.to(input.dtype)
        prepared = known[0]
        run.ways[RESIDENT] += 1
        run.calls[prepared.implementation] += 1
        scale, low_rank = weight._params.scale, attributes.get(BRANCH)
        return run.shared.run(linear.place, prepared, input, weight._qdata, scale, bias, low_rank)

    return forward_comfy_cast_weights


def _lower_seat(module: torch.nn.Module, linear: _Linear):
    of_class = getattr(type(module), LOWER)

    def _forward(input, weight, bias):
        run = None if _is_compiling() else getattr(_thread, "run", None)
        # not from the dictionary: a compiler follows attributes
        low_rank = getattr(module, BRANCH, None)
        if run is not None:
            prepared = _fetched(linear, input, weight, bias)
            if type(prepared) is not str:
                run.ways[FETCHED] += 1
                run.calls[prepared.implementation] += 1
                scale = weight._params.scale
                return run.shared.run(linear.place, prepared, input, weight._qdata, scale, bias, low_rank)
            run.reasons[prepared] += 1
            run.ways[GENERAL] += 1
            run.shared.pass_by(linear.place)
            input = run.shared.real(input)
        elif _is_compiling():
            return traced.linear(linear.place, of_class, module, input, weight, bias, low_rank)
        y = of_class(module, input, weight, bias)
        return y if low_rank is None else add_low_rank(y, input, low_rank)

    return _forward


def _is_current(known: tuple | None, weight, input: torch.Tensor) -> bool:
    return (
        known is not None
        and known[1]() is weight._qdata
        and known[2]() is weight._params
        and known[0].device == input.device
        and known[0].columns == input.shape[-1]
    )


def _check_resident(weight, input: torch.Tensor) -> tuple | str:
    prepared = _prepared(weight, input)
    if type(prepared) is str:
        return prepared
    return prepared, weakref.ref(weight._qdata), weakref.ref(weight._params)


def _fetched(linear: _Linear, input: torch.Tensor, weight, bias) -> PreparedLinear | str:
    reason = _unfit_input(input, bias)
    if reason is not None:
        return reason
    if getattr(weight, "_layout_cls", None) != LAYOUT:
        return "the host made the weight float"
    codes, params = weight._qdata, weight._params
    scale = params.scale
    facts = (
        codes.device, codes.dtype, codes.shape, codes.stride(), scale.dtype, scale.device, scale.shape, scale.stride(),
        _rotation_group(params), getattr(params, "transposed", False), input.device, input.shape[-1],
    )  # fmt: skip
    known = linear.fetched
    if known is None or known[0] != facts:
        known = linear.fetched = facts, _prepared(weight, input)
    return known[1]


def _prepared(weight, input: torch.Tensor) -> PreparedLinear | str:
    """The kernel for a weight on the input's device, or one sentence that says why there is none."""
    if getattr(weight, "_layout_cls", None) != LAYOUT:
        return f"the weight is a {type(weight).__name__} in another layout"
    codes, params = weight._qdata, weight._params
    if getattr(params, "transposed", False):
        return "the weight is transposed"
    if codes.device != input.device:
        return f"the weight is on {codes.device} and the input on {input.device}"
    if codes.shape[-1] != input.shape[-1]:
        return f"the input has {input.shape[-1]} features and the weight {codes.shape[-1]}"
    try:
        return PreparedLinear(codes, params.scale, rotation_group=_rotation_group(params))
    except Int8Error as error:
        return str(error)


def _rotation_group(params) -> int:
    # as the host's own handler reads them
    return int(getattr(params, "convrot_groupsize", 256)) if getattr(params, "convrot", False) else 0


def _unfit_input(input, bias) -> str | None:
    if type(input) is not torch.Tensor:
        return f"the input is a {type(input).__name__}"
    if input.dtype not in _FLOATS or input.dim() == 0:
        return f"the input is {input.dtype} with {input.dim()} dimensions"
    if input.requires_grad:
        return "the input requires a gradient"
    if bias is not None and (bias.device != input.device or not bias.is_contiguous()):
        return f"the bias is on {bias.device} and the input on {input.device}, or its values are not contiguous"
    return None


def _is_only_forced(module: torch.nn.Module, weight) -> bool:
    """Whether the host would make the weight float only since a node chose the type to compute in.

    INT8 products come out in the type of the input, which is what such a node asks for.
    """
    return (
        getattr(module, "comfy_force_cast_weights", False)
        and getattr(weight, "_layout_cls", None) == LAYOUT
        and not (module.weight_function or module.bias_function or getattr(module, "_full_precision_mm", False))
    )


def _why_not_int8(module: torch.nn.Module) -> str:
    """Why the host's forward does not ask for the weight as INT8."""
    if module.weight_function:
        return "a function changes the weight at every call, such as a LoRA on an offloaded layer"
    if module.bias_function:
        return "a function changes the bias at every call"
    if getattr(module, "comfy_force_cast_weights", False):
        return "the MODEL forces its weights to be cast"
    if getattr(module, "_full_precision_mm", False):
        return "the host runs the layer in full precision"
    return "the host does not use the weight as INT8"
