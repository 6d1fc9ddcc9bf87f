"""The passes around Linears as torch.library ops, for torch.compile: one opaque call each, with known outputs.

A graph passes quantised rows on as (codes [M, K] int8, scale [M] float32); no two outputs of an op, and no output and
input, share memory, which PyTorch says it refuses from 2.12 on. Which implementation runs is decided when the graph runs.
The functions here are for traced code only; they take what the ops of the same names take.
"""

from __future__ import annotations

import torch

from .capability import detect
from .int8_matmul import matmul_2d


def _contiguous(t: torch.Tensor | None) -> torch.Tensor | None:
    return None if t is None else t.contiguous()


def _residual_norm(x, y, y_weight, y_gate, weight, bias, scale, shift, eps, flags, group):
    from .residual_norm import Branch, Norm, residual_norm

    y_once, has_norm, centred, once = flags
    branch = norm = None
    if y is not None:
        branch = Branch(y.contiguous(), _contiguous(y_weight), eps[0], _contiguous(y_gate), y_once)
    if has_norm:
        parts = _contiguous(scale), _contiguous(shift), _contiguous(bias)
        norm = Norm(_contiguous(weight), eps[1], *parts, centred, once)
    out, rows = residual_norm(x.contiguous(), branch, norm, rotation_group=group, packed=False)
    # without rows there is nothing to add to
    found = [] if branch is None else [out if x.numel() else out.clone()]
    return found if norm is None else [*found, *rows]


def _rows_fake(x: torch.Tensor, m, k) -> list[torch.Tensor]:
    return [x.new_empty((m, k), dtype=torch.int8), x.new_empty((m,), dtype=torch.float32)]


def _residual_norm_fake(x, y, y_weight, y_gate, weight, bias, scale, shift, eps, flags, group):
    found = [] if y is None else [x.new_empty(x.shape)]
    return [*found, *_rows_fake(x, x.numel() // x.shape[-1], x.shape[-1])] if flags[1] else found


def residual_norm(x: torch.Tensor, branch, norm, group: int) -> tuple[torch.Tensor, tuple | None]:
    """`kernels.residual_norm` inside a graph; x' and the rows, or None without a norm."""
    y, y_weight, y_eps, y_gate, y_once = (None, None, 0.0, None, False) if branch is None else branch
    weight, eps, scale, shift, bias, centred, once = (
        (None, 0.0, None, None, None, False, False) if norm is None else norm
    )
    found = torch.ops.native_int8.residual_norm(
        x,
        y,
        y_weight,
        y_gate,
        weight,
        bias,
        scale,
        shift,
        [y_eps, eps],
        [y_once, norm is not None, centred, once],
        group,
    )
    rows = None if norm is None else (found[-2], found[-1])
    return x if branch is None else found[0], rows


def _quantize_activation(gate, up, before, group):
    from .quantize_activation import quantize_gelu, quantize_swiglu

    options = {"before": _contiguous(before), "rotation_group": group, "packed": False}
    return quantize_gelu(gate, **options) if up is None else quantize_swiglu(gate, up, **options)


def _quantize_activation_fake(gate, up, before, group):
    k = gate.shape[-1] + (0 if before is None else before.shape[-1])
    return tuple(_rows_fake(gate, gate.numel() // gate.shape[-1], k))


def _swiglu_of_rows(x, codes, scale, gate, gate_scale, gate_bias, up, up_scale, up_bias):
    from .dispatch import choose
    from .int8_linear_fused import fits_swiglu, swiglu_of_rows

    device = detect(x.device)
    chosen = choose(device, in_features=gate.shape[1], out_features=gate.shape[0]).implementation
    linears = (gate, gate_scale, gate_bias), (up, up_scale, up_bias)
    if fits_swiglu(*linears):
        return swiglu_of_rows(x, (codes, scale), *linears, chosen)
    halves = [matmul_2d(codes, scale, w, s.view(-1), b, x.dtype, chosen, device) for w, s, b in linears]
    return (torch.nn.functional.silu(halves[0]) * halves[1]).view(*x.shape[:-1], gate.shape[0])


def _swiglu_of_rows_fake(x, codes, scale, gate, *rest):
    return x.new_empty((*x.shape[:-1], gate.shape[0]))


_OPS = (
    (
        "residual_norm(Tensor x, Tensor? y, Tensor? y_weight, Tensor? y_gate, Tensor? weight, Tensor? bias, Tensor? scale, "
        "Tensor? shift, float[] eps, bool[] flags, int group) -> Tensor[]",
        _residual_norm,
        _residual_norm_fake,
    ),
    (
        "quantize_activation(Tensor gate, Tensor? up, Tensor? before, int group) -> (Tensor, Tensor)",
        _quantize_activation,
        _quantize_activation_fake,
    ),
    (
        "swiglu_of_rows(Tensor x, Tensor codes, Tensor scale, Tensor gate, Tensor gate_scale, Tensor? gate_bias, Tensor up, "
        "Tensor up_scale, Tensor? up_bias) -> Tensor",
        _swiglu_of_rows,
        _swiglu_of_rows_fake,
    ),
)

_library = torch.library.Library("native_int8", "FRAGMENT")
if not hasattr(torch.ops.native_int8, "residual_norm"):
    for _schema, _run, _fake in _OPS:
        _name = _schema.partition("(")[0]
        _library.define(_schema)
        _library.impl(_name, _run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"native_int8::{_name}", _fake, lib=_library)
