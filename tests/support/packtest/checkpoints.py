"""Small checkpoints for tests, written from the formats' facts and not with the pack's own code."""

import json

import torch

# a Linear of N != K, so that a scale along the wrong axis shows
N, K = 24, 40


def marker(fields) -> torch.Tensor:
    """A marker tensor: uint8 bytes of JSON, or of the given bytes."""
    raw = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    return torch.tensor(list(raw), dtype=torch.uint8)


def codes(rows: int = N, columns: int = K, seed: int = 0) -> torch.Tensor:
    """int8 [rows, columns] that holds -128 and 127."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-128, 128, (rows, columns), generator=generator).to(torch.int8)


def floats(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Normal numbers of standard deviation 0.05, the size of trained weights."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * 0.05).to(dtype)


def int8_layer(name: str, fields: dict | None, scale: torch.Tensor, rows: int = N, columns: int = K) -> dict:
    """The tensors of an INT8 Linear; without a marker when `fields` is None."""
    tensors = {f"{name}.weight": codes(rows, columns), f"{name}.weight_scale": scale}
    if fields is not None:
        tensors[f"{name}.comfy_quant"] = marker(fields)
    return tensors


def metadata_twin(layers: dict[str, dict]) -> dict[str, str]:
    """File metadata that holds the markers of all layers."""
    return {"_quantization_metadata": json.dumps({"format_version": "1.0", "layers": layers})}


def regular_matrix(group: int) -> torch.Tensor:
    """ConvRot's matrix, float64 [group, group], written out from its definition."""
    base = torch.tensor([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], dtype=torch.float64)
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < group:
        matrix = torch.kron(matrix, base)
    return matrix / group**0.5


def dequantised(weight: torch.Tensor, scale: torch.Tensor, group: int = 0) -> torch.Tensor:
    """w = q * scale, rotated back by groups of `group` columns: float64 [N, K], written out from the definition."""
    values = weight.double() * scale.double().reshape(-1, 1)
    if not group:
        return values
    return (values.reshape(-1, group) @ regular_matrix(group)).reshape(values.shape)


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two tensors of the same number of elements."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))
