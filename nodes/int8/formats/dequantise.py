"""What stored codes mean as numbers.

w = undo(q * scale + zero_point + up @ down), each term only where the layer has it, and undo = the inverse rotation, then
a division of the columns. For the regular and the Sylvester matrix H = H^T = H^-1; a stored matrix M (M M^T = c I) is
undone by M / c.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from ....kernels.rotate import hadamard
from ..checkpoint import CheckpointError
from . import gguf
from .spec import LayerSpec


def dequantise(
    spec: LayerSpec, take: Callable[[str], torch.Tensor], device: torch.device | str = "cpu"
) -> torch.Tensor:
    """The weight of a layer whose kind is "int8" or "gguf", as float32 of `spec.shape` on `device`.

    Args:
        take: name -> tensor as the file stores it.
    Raises:
        CheckpointError: a stored matrix is no rotation, a divisor is zero, or a number is not finite.
    """
    if spec.kind == "gguf":
        return gguf.dequantised(take(spec.weight).to(device), spec.shape)
    parts = {role: take(name).to(device).float() for role, name in spec.parts}
    codes, scale = take(spec.weight).to(device), take(spec.scale).to(device).float()
    if spec.transposed:
        codes, scale = codes.t(), scale.t()
        parts = {role: part if role == "divide" else part.t() for role, part in parts.items()}
    if spec.scale_divisor != 1:
        scale = scale / spec.scale_divisor
    values = _scaled(spec, codes, scale, parts.get("zero"))
    if "up" in parts:
        values = values + parts["up"] @ parts["down"]
    values = _unrotated(spec, values, parts.get("matrix"))
    if "divide" in parts:
        divisor = parts["divide"].reshape(1, -1)
        if bool((divisor == 0).any()):
            raise _stop(spec, "its column scale holds zeros", "numbers other than zero are needed")
        values = values / divisor
    if not bool(torch.isfinite(values).all()):
        raise _stop(spec, "it holds NaN or Inf", "finite weights are needed")
    return values


def _stop(spec: LayerSpec, got: str, needed: str) -> CheckpointError:
    return CheckpointError(f"{spec.weight}: {got}. {needed[0].upper()}{needed[1:]}; use another file of this model.")


def _scaled(spec: LayerSpec, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> torch.Tensor:
    """q * scale (+ zero_point), [N, K] or [O, I, kh, kw]."""
    values = codes.float()
    if codes.dim() == 3 and len(spec.shape) == 2:
        values = values * scale
        return (values if zero is None else values + zero).reshape(spec.shape)
    if scale.dim() == 2 and not spec.per_row and scale.numel() > 1:
        size = spec.shape[0] // scale.shape[0]
        return values * scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
    column = (-1, *(1,) * (values.dim() - 1))
    values = values * (scale.reshape(column) if scale.numel() > 1 else scale.reshape(()))
    if zero is not None:
        values = values + (zero.reshape(column) if zero.numel() > 1 else zero.reshape(()))
    return values


def _unrotated(spec: LayerSpec, values: torch.Tensor, matrix: torch.Tensor | None) -> torch.Tensor:
    group = spec.rotation_group
    if not group:
        return values
    if matrix is not None:
        factor = _rotation_factor(spec, matrix)
        matrix = matrix / factor
    else:
        matrix = sylvester(group, values.device) if spec.sylvester else hadamard(group, values.device)
    if values.dim() == 4:
        # a convolution is rotated along its input channels
        last = values.permute(0, 2, 3, 1)
        return (last.reshape(-1, group) @ matrix).reshape(last.shape).permute(0, 3, 1, 2).contiguous()
    return (values.reshape(-1, group) @ matrix).reshape(values.shape)


def _rotation_factor(spec: LayerSpec, matrix: torch.Tensor) -> float:
    """c of M M^T = c I."""
    product = matrix.double() @ matrix.double().t()
    factor = float(product.diagonal().mean())
    off = product - factor * torch.eye(len(matrix), dtype=torch.float64, device=matrix.device)
    if not 0 < factor < float("inf") or float(off.abs().max()) > 1e-2 * factor:
        raise _stop(spec, "the matrix beside it is no rotation", "an orthogonal matrix is needed")
    return factor


@functools.lru_cache(maxsize=8)
def sylvester(group: int, device: torch.device) -> torch.Tensor:
    """The Sylvester Hadamard matrix / sqrt(group), [group, group] float32; group is a power of 2."""
    index = torch.arange(group)
    both = index[:, None] & index[None, :]
    odd = torch.zeros_like(both)
    for bit in range(group.bit_length()):
        odd ^= (both >> bit) & 1
    return ((1 - 2 * odd).float() / group**0.5).to(device)
