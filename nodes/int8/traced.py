"""An INT8 Linear as torch.compile traces it: quantised rows that inductor can see, then one opaque matmul.

By default a compiled graph holds the host's own INT8 Linear, one opaque call that quantises and multiplies. With
NATIVE_INT8_COMPILED_QUANTISE=visible it holds

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

from ...kernels import int8_matmul, quantize_rows
from ...kernels.quantize_rows import MIN_SCALE

SWITCH = "NATIVE_INT8_COMPILED_QUANTISE"
OPAQUE, VISIBLE = "opaque", "visible"
CHOICES = (OPAQUE, VISIBLE)
LAYOUT = "TensorWiseINT8Layout"

_FLOATS = (torch.float16, torch.bfloat16, torch.float32)
# what is traced depends on it, so that a compiler compiles again when it changes; set by short_way.inside
visible = False
_lock = threading.Lock()
_count = None


def choice() -> str:
    """How compiled graphs quantise, "opaque" or "visible", as NATIVE_INT8_COMPILED_QUANTISE says.

    Raises:
        ValueError: the variable holds another word.
    """
    found = os.environ.get(SWITCH, OPAQUE)
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


def linear(place, module: torch.nn.Module, input: torch.Tensor, weight, bias) -> torch.Tensor | None:
    """The visible form of one INT8 Linear; None when it must stay as it is. Traced, never called.

    Args:
        place: the Linear's `shared_rows.Place`, or None.
        weight: what the host made of the module's weight; still INT8, or float.
    """
    if not _is_int8(weight) or input.dtype not in _FLOATS or input.requires_grad:
        return None
    rows = None if place is None else _kept(place, input)
    if rows is None:
        params = module.weight._params
        group = params.convrot_groupsize if params.convrot else 0
        rows = torch.ops.native_int8.quantize_rows(input, group) if group else quantise(input)
    if place is not None:
        place.group.kept = None if place.is_last else (input, rows)
    return torch.ops.native_int8.linear_of_rows(*rows, weight, bias, input.dtype)


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
