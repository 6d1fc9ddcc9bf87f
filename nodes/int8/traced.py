"""An INT8 Linear as torch.compile traces it: quantised rows that inductor can see, then one opaque matmul.

With NATIVE_INT8_COMPILED_QUANTISE=opaque a compiled graph holds the host's own INT8 Linear, one opaque call that quantises
and multiplies. By default it holds

    codes, scale = quantise(x)              plain operations, which inductor fuses with the norm or SiLU that makes x
    y = matmul(codes, scale, weight, bias)  opaque: our kernel

A rotation is no elementwise operation: inductor would make a matmul in fp32 of it, which costs a GPU more than the whole
Linear saves. Rotated rows are therefore quantised by our kernel, by itself.
Compiling for inference, neither AOTAutograd nor inductor merges equal parts of a graph. So Linears that read the same
tensor (shared_rows.py) pass the rows on while they are traced.
"""

from __future__ import annotations

import os
import threading

import torch

from ...kernels import add_low_rank, int8_matmul, quantize_rows
from ...kernels.quantize_rows import MIN_SCALE

SWITCH = "NATIVE_INT8_COMPILED_QUANTISE"
OPAQUE, VISIBLE = "opaque", "visible"
CHOICES = (OPAQUE, VISIBLE)
LAYOUT = "TensorWiseINT8Layout"

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# what is traced depends on these, so that a compiler compiles again when they change; short_way.inside sets them, and
# fusion.inside the second
visible = fused = False
_lock = threading.Lock()
_count = None


def choice() -> str:
    """How compiled graphs quantise, "opaque" or "visible", as NATIVE_INT8_COMPILED_QUANTISE says.

    Raises:
        ValueError: the variable holds another word.
    """
    found = os.environ.get(SWITCH, VISIBLE)
    if found not in CHOICES:
        raise ValueError(f"{SWITCH} is {found!r}. Needed: one of {CHOICES}. Correct it or remove it.")
    return found


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.quantize_rows` without a rotation, in operations that a compiler can fuse.

    Args:
        x: [..., K] float16, bfloat16 or float32.
    Returns:
        codes [..., K] int8 and scale [..., 1] float32. Codes differ from the kernel's by 1 at most where a product lies
        within two roundings of a half; more often when the compiler did not round x to its dtype before.
    """
    v = x.float()
    amax = v.abs().amax(dim=-1, keepdim=True)
    fine = amax < float("inf")
    top = amax.clamp(min=127 * MIN_SCALE)
    # a tensor, not a Python number: a number is divided through a reciprocal, which rounds differently
    most = torch.full_like(top, 127.0)
    codes = torch.where(fine, v * (most / top), 0.0).round().clamp(-127, 127).to(torch.int8)
    return codes, torch.where(fine, top / most, float("nan"))


class _Shared:
    """`shared_rows.SharedRows` of a traced block."""

    def __init__(self):
        self.given = None


class _Run:
    """`short_way.Run` of a traced block. It is nobody's: what is set on it while tracing is undone in the same graph."""

    def __init__(self):
        self.shared = _Shared()


run = _Run()


def linear(place, of_class, module: torch.nn.Module, input: torch.Tensor, weight, bias, low_rank) -> torch.Tensor:
    """One INT8 Linear as it is traced; never called outside of that.

    Args:
        place: the Linear's `shared_rows.Place`, or None.
        of_class: the host's method, for what must stay as it is.
        input: the input, or the stand-in of a fused block.
        weight: what the host made of the module's weight; still INT8, or float.
        low_rank: the module's stack of LoRAs, or None.
    """
    int8, given, rows = _is_int8(weight), run.shared.given, None
    if given is not None and given.stand_in is input:
        given.used += 1
        if int8 and kind_of(module) == given.kind:
            rows = given.rows
        if rows is None or low_rank is not None:
            input = given.input()
    if rows is None and (visible or fused) and int8 and input.dtype in _FLOATS and not input.requires_grad:
        rows = _own_rows(place, module, input)
    if rows is None:
        y = of_class(module, input, weight, bias)
    else:
        y = torch.ops.native_int8.linear_of_rows(*rows, weight, bias, input.dtype)
        y = y.view(*input.shape[:-1], y.shape[-1])
    return y if low_rank is None else add_low_rank(y, input, low_rank)


def kind_of(module: torch.nn.Module) -> tuple | None:
    """What `short_way.rows_kind` is while tracing: the device and the implementation show when the graph runs."""
    weight = module.weight
    if getattr(weight, "_layout_cls", None) != LAYOUT:
        return None
    params = weight._params
    return None, None, module.in_features, params.convrot_groupsize if params.convrot else 0, None


def _own_rows(place, module: torch.nn.Module, input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = None if place is None else _kept(place, input)
    if rows is None:
        group = kind_of(module)[3]
        rows = quantise(input) if visible and not group else torch.ops.native_int8.quantize_rows(input, group)
    if place is not None:
        place.group.kept = None if place.is_last else (input, rows)
    return rows


def _kept(place, input: torch.Tensor):
    kept = place.group.kept
    return kept[1] if kept is not None and kept[0] is input and place.host.is_the_hosts() else None


def _is_int8(weight) -> bool:
    from comfy_kitchen.tensor import QuantizedTensor

    return isinstance(weight, QuantizedTensor)


def define(count) -> None:
    """Define the ops of traced Linears and tell the host's INT8 layout how to take them; repeating it changes nothing.

    Args:
        count: called with (codes, weight) when a matmul runs; returns the name of the implementation.
    """
    global _count
    from comfy_kitchen.tensor import TensorWiseINT8Layout, register_layout_op

    with _lock:
        _count = count
        if hasattr(torch.ops.native_int8, "linear_of_rows"):
            return
        for schema, run, fake in _OPS:
            name = schema.partition("(")[0]
            _library.define(schema)
            _library.impl(name, run, "CompositeExplicitAutograd")
            torch.library.register_fake(f"native_int8::{name}", fake, lib=_library)
        register_layout_op(torch.ops.native_int8.linear_of_rows.default, TensorWiseINT8Layout)(_of_int8_weight)


_library = torch.library.Library("native_int8", "FRAGMENT")


def _rows(x, group):
    return quantize_rows(x, rotation_group=group)


def _rows_fake(x, group):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _matmul(codes, scale, weight, weight_scale, bias, out_dtype):
    implementation = _count(codes, weight)
    return int8_matmul(codes, scale, weight, weight_scale, bias, out_dtype=out_dtype, implementation=implementation)


def _of_int8_weight(_, args, kwargs):
    """The op for a weight in the host's INT8 layout: the same on what the weight is made of."""
    codes, scale, weight, bias, out_dtype = args
    return torch.ops.native_int8.matmul_of_rows(
        codes, scale, weight._qdata.contiguous(), weight._params.scale, bias, out_dtype
    )


def _of_float_weight(codes, scale, weight, bias, out_dtype):
    raise TypeError(
        f"native_int8::linear_of_rows: the weight is a {type(weight).__name__}. Needed: an INT8 weight of the host. Call "
        "the Linear instead."
    )


def _fake(codes, scale, weight, *rest):
    return codes.new_empty((*codes.shape[:-1], weight.shape[0]), dtype=rest[-1])


_OPS = (
    ("quantize_rows(Tensor x, int group) -> (Tensor, Tensor)", _rows, _rows_fake),
    (
        "linear_of_rows(Tensor codes, Tensor scale, Tensor weight, Tensor? bias, ScalarType out_dtype) -> Tensor",
        _of_float_weight,
        _fake,
    ),
    (
        "matmul_of_rows(Tensor codes, Tensor scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype) "
        "-> Tensor",
        _matmul,
        _fake,
    ),
)
