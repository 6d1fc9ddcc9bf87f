"""GGUF files: their Q8_0, F16, BF16 and F32 tensors, through the `gguf` package when it is installed.

Q8_0 keeps blocks of 32 columns as one float16 scale and 32 int8 codes: w = q * scale. Such a weight is a source like
fp8: the rule says what is quantised by rows and what is kept as bfloat16.
"""

import os

import torch

from ..checkpoint import CheckpointError, Header, TensorInfo, header_from
from .spec import LayerSpec, Stored

Q8_0 = "Q8_0"
_BLOCK, _BLOCK_BYTES = 32, 34
_SHAPES = "comfy.gguf.orig_shape."
_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F64": torch.float64}


def is_gguf(path: str) -> bool:
    """The file starts as a GGUF file does."""
    try:
        with open(path, "rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def read_gguf(path: str) -> tuple[Header, dict[str, torch.Tensor]]:
    """The header, and the tensors by their names in the file; Q8_0 tensors are uint8 [N, K / 32 * 34].

    Raises:
        CheckpointError: the package is missing, the file is damaged, or a tensor is of another type.
    """
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise CheckpointError(
            f"{path}: is a GGUF file, and the Python package gguf is not installed. It is needed to read one; run "
            "`python -m pip install gguf` in ComfyUI's Python, or get the model's safetensors file."
        ) from error
    try:
        # copy on write: torch warns about read-only memory
        reader = GGUFReader(path, "c")
        stored = list(reader.tensors)
        shapes = {
            name.removeprefix(_SHAPES): tuple(int(n) for n in field.contents())
            for name, field in reader.fields.items()
            if name.startswith(_SHAPES)
        }
    except (ValueError, IndexError, KeyError, TypeError, OSError, OverflowError, MemoryError) as error:
        raise CheckpointError(
            f"{path}: incomplete or not a sound GGUF file: {error}. A whole file is needed; download it again."
        ) from error
    infos, tensors = {}, {}
    size = os.path.getsize(path)
    for item in stored:
        kind, name = item.tensor_type.name, str(item.name)
        shape = shapes.get(name) or tuple(int(n) for n in reversed(item.shape))
        if kind != Q8_0 and kind not in _FLOATS:
            raise CheckpointError(
                f"{path}: {name}: the GGUF type {kind}. Q8_0, {', '.join(_FLOATS)} are needed; use the Q8_0 file of this "
                "model, or keep this one with a GGUF loader."
            )
        if item.data_offset + item.n_bytes > size:
            raise CheckpointError(
                f"{path}: {name}: incomplete: it ends at byte {item.data_offset + item.n_bytes} and the file has {size}. "
                "A whole file is needed; download it again."
            )
        raw = torch.from_numpy(item.data)
        if kind in _FLOATS:
            raw = raw.contiguous().view(_FLOATS[kind]).reshape(shape)
        tensors[name] = raw
        infos[name] = TensorInfo(kind, shape, 0, 0)
    header = header_from(path, infos)
    return header, tensors


def blocks(stored: Stored) -> LayerSpec | None:
    """A Q8_0 weight."""
    if stored.weight.dtype != Q8_0:
        return None
    return LayerSpec("gguf", "GGUF Q8_0", Q8_0, stored.weight.shape, stored.name, extras=stored.extras)


def dequantised(raw: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """float32 of `shape` from the bytes of its blocks, w = q * scale."""
    rows = raw.reshape(-1, _BLOCK_BYTES)
    scale = rows[:, :2].contiguous().view(torch.float16).float()
    return (rows[:, 2:].view(torch.int8).float() * scale).reshape(shape)
