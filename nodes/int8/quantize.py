"""One layer at a time: the tensors that the host's native INT8 format wants, from what the file stores.

Kept layers come out as plain floats. An fp8 weight that is kept becomes bfloat16: cards without fp8 units would expand it
at every use, and its three mantissa bits fit.
"""

import json
from collections.abc import Callable

import torch

from ...kernels import quantize_rows
from .checkpoint import CheckpointError
from .formats import MARKER, NATIVE, LayerSpec, dequantise
from .policy import Decision
from .scale_search import quantize_rows_mse
from .transfer import Mover

# counts up when the same weight would give other codes or scales; converted copies carry it
VERSION = 2
# numbers of a weight that are float32 at a time
_CHUNK_NUMBERS, _CHUNK_NUMBERS_GPU = 1 << 21, 1 << 24
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def marker_tensor(rotation_group: int = 0, full_precision: bool = False) -> torch.Tensor:
    """The host's per-layer marker: uint8 [bytes] of JSON."""
    fields: dict[str, object] = {"format": NATIVE}
    if full_precision:
        fields["full_precision_matrix_mult"] = True
    if rotation_group:
        fields.update(convrot=True, convrot_groupsize=rotation_group)
    return torch.tensor(list(json.dumps(fields).encode("utf-8")), dtype=torch.uint8)


def native_layer(
    decision: Decision,
    take: Callable[[str], torch.Tensor],
    device: torch.device,
    share: bool = True,
    mse: bool = False,
    mover: Mover | None = None,
) -> dict[str, torch.Tensor]:
    """The native tensors of a layer that is INT8 in the model: adopted, converted or quantised.

    Args:
        take: name -> tensor as the file stores it, each once.
        device: where weights are converted and quantised.
        share: adopted codes may be the file's own tensor, not a copy.
        mse: search the scales of quantised rows for the least squared error.
        mover: moves tensors to the device and back; None for torch's own copies.
    Raises:
        CheckpointError: a number is not finite, or the layer's tensors contradict each other.
    """
    spec = decision.spec
    if decision.action == "adopt":
        weight, scale = take(spec.weight), take(spec.scale)
        if spec.transposed:
            return adopted(decision, weight.t().contiguous(), scale)
        return adopted(decision, weight if share else weight.clone(), scale)
    if decision.action == "convert" or spec.kind == "gguf":
        return quantised(decision, dequantise(spec, take, device), None, device, mse, mover)
    return quantised(decision, take(spec.weight), take(spec.scale) if spec.scale else None, device, mse, mover)


def kept_layer(spec: LayerSpec, take: Callable[[str], torch.Tensor], share: bool = True) -> torch.Tensor:
    """The weight of a layer that is float in the model; INT8 and GGUF codes become bfloat16.

    Args:
        take, share: as for `native_layer`.
    """
    if spec.kind in ("int8", "gguf"):
        return dequantise(spec, take).to(torch.bfloat16)
    tensor = take(spec.weight)
    value = kept(tensor, take(spec.scale) if spec.scale else None)
    return value.clone() if value is tensor and not share else value


def adopted(decision: Decision, weight: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The native tensors of a layer that is INT8 already; the codes are passed on as they are.

    Args:
        weight: [N, K] int8 (or [E, N, K] for a bank of experts).
        scale: any float dtype, 1 or N elements in any shape.
    Raises:
        CheckpointError: a scale is not finite.
    """
    scale = _checked(decision, scale.to(torch.float32)) / decision.spec.scale_divisor
    if len(decision.shape) == 2:
        scale = scale.reshape(-1, 1) if decision.spec.per_row else scale.reshape(())
    return _native(decision, weight.contiguous(), scale, decision.spec.full_precision)


def quantised(
    decision: Decision,
    weight: torch.Tensor,
    scale: torch.Tensor | None,
    device: torch.device,
    mse: bool = False,
    mover: Mover | None = None,
) -> dict[str, torch.Tensor]:
    """Quantise one float or fp8 weight by rows on `device`; the result is on the CPU.

    q = round_half_even(W' / scale), scale = max(|row|) / 127, W' = W, or W H^T by groups of `decision.rotation_group`.

    Args:
        weight: [N, K] any float dtype or fp8.
        scale: of an fp8 weight, 1 or N elements; None otherwise.
        mse: with the scale of least squared error of each row; see `scale_search`.
        mover: as for `native_layer`.
    Returns:
        `<layer>.weight` [N, K] int8, `<layer>.weight_scale` [N, 1] float32, `<layer>.comfy_quant` uint8.
    Raises:
        CheckpointError: the weight or its scale holds NaN or Inf.
    """
    mover = mover or Mover(device)
    values = mover.to_device(weight)
    quantise = quantize_rows_mse if mse else quantize_rows
    group = decision.rotation_group
    if scale is None and values.dtype not in FP8 and values.dtype != torch.float64:
        codes, row_scale = quantise(values, rotation_group=group)
    else:
        codes = torch.empty(values.shape, dtype=torch.int8, device=values.device)
        row_scale = torch.empty((len(values), 1), device=values.device)
        factor = None if scale is None else scale.to(device=device, dtype=torch.float32).reshape(-1, 1)
        rows = max(1, (_CHUNK_NUMBERS if device.type == "cpu" else _CHUNK_NUMBERS_GPU) // values.shape[1])
        for start in range(0, len(values), rows):
            part = slice(start, start + rows)
            floats = values[part].to(torch.float32)
            if factor is not None:
                floats = floats * (factor if len(factor) == 1 else factor[part])
            codes[part], row_scale[part] = quantise(floats, rotation_group=group)
    return _native(decision, mover.to_host(codes), _checked(decision, row_scale.cpu()))


def kept(weight: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """A float tensor as it is; fp8 expanded to bfloat16, with its scale (1 or N elements) where there is one."""
    if weight.dtype not in FP8:
        return weight
    if scale is None:
        return weight.to(torch.bfloat16)
    rows = (
        scale.to(torch.float32).reshape(-1, *(1,) * (weight.dim() - 1))
        if scale.numel() > 1
        else scale.float().reshape(())
    )
    return (weight.to(torch.float32) * rows).to(torch.bfloat16)


def _native(
    decision: Decision, codes: torch.Tensor, scale: torch.Tensor, full_precision: bool = False
) -> dict[str, torch.Tensor]:
    layer = decision.layer
    return {
        f"{layer}.weight": codes,
        f"{layer}.weight_scale": scale,
        layer + MARKER: marker_tensor(decision.rotation_group, full_precision),
    }


def _checked(decision: Decision, scale: torch.Tensor) -> torch.Tensor:
    if not torch.isfinite(scale).all():
        bad = int((~torch.isfinite(scale)).sum())
        raise CheckpointError(
            f"{decision.layer}.weight: {bad} of {scale.numel()} rows hold NaN or Inf. Finite weights are needed; "
            "the file was damaged when it was made: use another file of this model."
        )
    return scale
