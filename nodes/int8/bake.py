"""A weight with its patches (LoRAs) baked in, as the host bakes them for a run.

The host does this with the whole weight in float32, which takes the memory of about eight layers (counted in 16 bit). On a
CPU, rows of an INT8 weight are baked a few at a time: every step works on rows, and the random numbers of the host's
rounding are drawn in the order of the rows. The first rows are also given to the host; where it makes other codes of them,
or a patch is of a kind that needs all rows at once, the host does the whole weight.
"""

import torch

CHUNK_NUMBERS = 1 << 18


def baked(weight: torch.Tensor, module_functions: tuple, patches: list, key: str, device: torch.device) -> torch.Tensor:
    """The patched weight, in the form of `weight`.

    Args:
        weight: without patches; a float tensor or the host's QuantizedTensor. It stays as it is.
        module_functions: (set_weight or None, convert_weight or None) of the module.
        patches: as a ModelPatcher has them for the weight.
        key: of the weight in the model; the seed of its rounding.
        device: where it is done.
    """
    import comfy.utils

    seed = comfy.utils.string_to_seed(key)
    if device.type == "cpu":
        value = _by_rows(weight, module_functions, patches, key, seed)
        if value is not None:
            return value
    return _whole(weight, module_functions, patches, key, device, seed)


def _whole(weight, module_functions, patches, key, device, seed):
    import comfy.float
    import comfy.lora

    set_weight, _ = module_functions
    value = comfy.lora.calculate_weight(patches, _floats(weight, module_functions, device), key)
    if set_weight is not None:
        return set_weight(value, inplace_update=False, seed=seed, return_weight=True)
    return comfy.float.stochastic_rounding(value, weight.dtype, seed=seed)


def _floats(weight, module_functions, device):
    import comfy.model_management

    dtype = comfy.model_management.lora_compute_dtype(device)
    value = comfy.model_management.cast_to_device(weight, device, dtype, copy=True)
    _, convert_weight = module_functions
    return value if convert_weight is None else convert_weight(value, inplace=True)


def _by_rows(weight, module_functions, patches, key, seed):
    """The INT8 weight baked by rows on the CPU; None where that is not what the host would make of it."""
    import comfy.lora
    from comfy.quant_ops import QuantizedTensor

    set_weight, _ = module_functions
    if set_weight is None or not isinstance(weight, QuantizedTensor) or weight._qdata.dtype != torch.int8:
        return None
    codes, params = weight._qdata, weight._params
    if codes.dim() != 2 or params.scale.numel() != codes.shape[0]:
        return None
    count, columns = codes.shape
    step = max(1, CHUNK_NUMBERS // columns)
    group = params.convrot_groupsize if getattr(params, "convrot", False) else 0
    new_codes, new_scale = torch.empty_like(codes, device="cpu"), torch.empty(count, 1)
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, count, step):
        rows = slice(start, min(start + step, count))
        sliced = [_patch_of_rows(patch, rows, codes.shape) for patch in patches]
        if any(patch is None for patch in sliced):
            return None
        part = _with(weight, codes[rows], params.scale.reshape(-1, 1)[rows])
        values = comfy.lora.calculate_weight(sliced, _floats(part, module_functions, torch.device("cpu")), key)
        if values.shape != part.shape or values.dtype != torch.float32:
            return None
        if start == 0:
            first = set_weight(values.clone(), inplace_update=False, seed=seed, return_weight=True)
        new_codes[rows], new_scale[rows] = _rounded(values, group, generator)
        if start == 0 and not (
            isinstance(first, QuantizedTensor)
            and torch.equal(first._qdata, new_codes[rows])
            and torch.equal(first._params.scale, new_scale[rows])
        ):
            return None
    return _with(weight, new_codes, new_scale)


def _rounded(values: torch.Tensor, group: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """floor(v / scale + u), u from [0, 1) in the order of the numbers, scale = max(|row|) / 127; rotated first."""
    from ...kernels.rotate import hadamard

    if group:
        values = (values.view(-1, group) @ hadamard(group, values.device)).view(values.shape)
    scale = (values.abs().amax(dim=-1, keepdim=True) / 127.0).clamp_(min=1e-30)
    values = (values / scale).add_(torch.rand(values.shape, generator=generator))
    return values.floor_().clamp_(-128.0, 127.0).to(torch.int8), scale


def _with(weight, codes: torch.Tensor, scale: torch.Tensor):
    """A QuantizedTensor like `weight` with other rows."""
    import dataclasses

    params = dataclasses.replace(weight._params, scale=scale, orig_shape=tuple(codes.shape))
    return type(weight)(codes, weight._layout_cls, params)


def _patch_of_rows(patch: tuple, rows: slice, shape: torch.Size) -> tuple | None:
    """The part of a patch that concerns some rows; None for kinds that look at the whole weight."""
    from comfy.weight_adapter.lora import LoRAAdapter

    strength, value, strength_model, offset, function = patch
    if offset is not None or function is not None:
        return None
    if isinstance(value, LoRAAdapter):
        up, down, alpha, mid, dora, reshape = value.weights
        if any(part is not None for part in (mid, dora, reshape)) or up.dim() != 2 or down.dim() != 2:
            return None
        if (up.shape[0], down.shape[1]) != tuple(shape):
            return None
        return (
            strength,
            LoRAAdapter(value.loaded_keys, (up[rows], down, alpha, None, None, None)),
            strength_model,
            None,
            None,
        )
    if isinstance(value, tuple) and len(value) in (1, 2) and (len(value) == 1 or value[0] == "diff"):
        content = value[-1]
        diff = content if len(value) == 1 else content[0]
        if isinstance(diff, torch.Tensor) and diff.shape == shape and (len(value) == 1 or len(content) == 1):
            return (strength, ("diff", (diff[rows],)), strength_model, None, None)
    return None
