"""What is in a safetensors file, from its header alone.

Nothing here reads tensor data: a header is a little-endian u64 length, then JSON with dtype, shape and byte range of
every tensor. All the ways in which a download can be broken (empty, cut, a web page, a Git LFS pointer) are found
before a model is built, and each one names the file.

Names in `Header.tensors` are without the prefix under which the file keeps its diffusion transformer.
"""

import json
import math
import os
import struct
from collections import Counter
from dataclasses import dataclass, field

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1, "C64": 8,
}  # fmt: skip
FLOAT_DTYPES = ("F64", "F32", "F16", "BF16")
FP8_DTYPES = ("F8_E4M3", "F8_E5M2")

# longest first: "model.diffusion_model." must not be taken for "model."
PREFIXES = ("model.diffusion_model.", "diffusion_model.", "transformer.", "model.model.", "net.", "model.")

# parts of a whole checkpoint that are not the diffusion model
OTHER_PARTS = (
    "vae.", "first_stage_model.", "cond_stage_model.", "conditioner.", "text_encoders.", "text_encoder.", "clip_l.",
    "clip_g.", "t5xxl.", "model_ema.", "audio_vae.", "vocoder.", "clip_vision.",
)  # fmt: skip

_MAX_HEADER_BYTES = 100_000_000
_BAD_STARTS = (
    (b"version https://git-lfs", "is a Git LFS pointer, not the file itself", "run `git lfs pull`, or download it"),
    (b"<!doctype", "is a web page", "download it again: the link gave a page (log-in or error), not the file"),
    (b"<html", "is a web page", "download it again: the link gave a page (log-in or error), not the file"),
    (
        b"gguf",
        "is a GGUF file",
        "load it with a GGUF loader and put INT8 Patch Model after it, or get a safetensors file",
    ),
    (b"pk\x03\x04", "is a pickled PyTorch file", "convert it to safetensors; pickles can run code when opened"),
    (b"\x80\x02", "is a pickled PyTorch file", "convert it to safetensors; pickles can run code when opened"),
)


class CheckpointError(ValueError):
    """A file or state dict cannot be used; the text says what, what was found, what is needed and what to do."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: dtype as safetensors spells it, shape, and its byte range within the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def count(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """The diffusion transformer's tensors by name without `prefix`, the file's metadata, and the other parts' keys."""

    path: str
    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    prefix: str = ""
    rest: tuple[str, ...] = ()

    def key(self, name: str) -> str:
        """The name as the file spells it."""
        return self.prefix + name


def _broken(path: str, got: str, todo: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: incomplete or not a safetensors file: {got}. A whole safetensors file is needed; {todo}."
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    out = dict(pairs)
    if len(out) != len(pairs):
        twice = [k for k, n in Counter(k for k, _ in pairs).items() if n > 1]
        raise ValueError(f"the key {twice[0]!r} is listed twice")
    return out


def read_header(path: str) -> Header:
    """Read and check the header of a safetensors file.

    Raises:
        CheckpointError: the file is missing, empty, cut short, another kind of file, has a damaged header, or holds
            two diffusion models.
    """
    return _split(str(path), *read_tensors(path))


def read_tensors(path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors of a safetensors file by their full names, and its metadata.

    Raises:
        CheckpointError: as `read_header`, except for what the tensors are.
    """
    path = str(path)
    if not os.path.isfile(path):
        raise CheckpointError(
            f"{path}: no such file. A safetensors file is needed; check the name and refresh the list."
        )
    size = os.path.getsize(path)
    again = "download it again and compare its size with the publisher's"
    with open(path, "rb") as file:
        start = file.read(64)
        lowered = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
        for magic, got, todo in _BAD_STARTS:
            # a header of 640 bytes starts as a pickle does
            if lowered.startswith(magic) and not (magic == b"\x80\x02" and start[7:9] == b"\0{"):
                raise _broken(path, f"it {got}", todo)
        if size < 8:
            raise _broken(path, f"it has {size} bytes", again)
        length = struct.unpack("<Q", start[:8])[0]
        if length > _MAX_HEADER_BYTES or length < 2:
            raise _broken(path, f"its header claims {length} bytes", again)
        if 8 + length > size:
            raise _broken(path, f"its header needs {8 + length} bytes and the file has {size}", again)
        file.seek(8)
        raw = file.read(length)
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"its header is not valid JSON ({error})", again) from error
    if not isinstance(entries, dict):
        raise _broken(path, "its header is not a table of tensors", again)
    metadata = entries.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict):
        raise _broken(path, "its __metadata__ is not a table", again)
    data_bytes = size - 8 - length
    tensors = {name: _tensor_info(path, name, entry, data_bytes) for name, entry in entries.items()}
    _check_ranges(path, tensors, data_bytes)
    return tensors, {str(k): v for k, v in metadata.items() if isinstance(v, str)}


_TORCH_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
    "complex64": "C64",
}  # fmt: skip


def dtype_name(dtype) -> str:
    """A torch.dtype as safetensors spells it; its own name where safetensors has none."""
    name = str(dtype).removeprefix("torch.")
    return _TORCH_NAMES.get(name, name)


def header_of(tensors: dict, metadata: dict[str, str] | None = None, source: str = "the MODEL") -> Header:
    """The header that a file with these tensors would have.

    Args:
        tensors: name -> torch.Tensor, any prefix.
    """
    infos = {name: TensorInfo(dtype_name(t.dtype), tuple(t.shape), 0, 0) for name, t in tensors.items()}
    return _split(source, infos, dict(metadata or {}))


def header_from(path: str, infos: dict[str, TensorInfo], metadata: dict[str, str] | None = None) -> Header:
    """The header of a file of another kind whose tensors are listed already, under any prefix."""
    return _split(path, infos, dict(metadata or {}))


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _tensor_info(path: str, name: str, entry: object, data_bytes: int) -> TensorInfo:
    again = "download it again, or ask its publisher"
    if not isinstance(entry, dict):
        raise _broken(path, f"the entry {name!r} is not a table", again)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise _broken(path, f"{name!r} has the dtype {dtype!r}, which is none of {', '.join(DTYPE_BYTES)}", again)
    if not isinstance(shape, list) or not all(_is_size(n) for n in shape):
        raise _broken(path, f"{name!r} has the shape {shape!r}", again)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(n) for n in offsets):
        raise _broken(path, f"{name!r} has the byte range {offsets!r}", again)
    info = TensorInfo(dtype, tuple(shape), offsets[0], offsets[1])
    need = info.count * DTYPE_BYTES[dtype]
    if info.end - info.start != need:
        raise _broken(path, f"{name!r} is {dtype} {list(shape)}, {need} bytes, but has {info.end - info.start}", again)
    if info.end > data_bytes:
        raise _broken(
            path,
            f"{name!r} ends at byte {info.end} of the data and the file holds {data_bytes}",
            "the download was cut short: download it again",
        )
    return info


def _check_ranges(path: str, tensors: dict[str, TensorInfo], data_bytes: int) -> None:
    if not tensors:
        raise _broken(path, "it lists no tensor", "choose another file")
    last_end, last_name = 0, ""
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if info.start != last_end:
            raise _broken(
                path,
                f"the bytes of {name!r} and {last_name!r} overlap or leave a gap",
                "ask its publisher for a sound file",
            )
        last_end, last_name = info.end, name
    if last_end != data_bytes:
        raise _broken(path, f"its tensors end at byte {last_end} and its data at {data_bytes}", "download it again")


def _split(path: str, tensors: dict[str, TensorInfo], metadata: dict[str, str]) -> Header:
    """Find the prefix of the diffusion model; the keys that do not carry it are `rest`."""
    groups: dict[str, list[str]] = {}
    for name in tensors:
        if name.startswith(OTHER_PARTS):
            groups.setdefault("other", []).append(name)
        else:
            groups.setdefault(next((p for p in PREFIXES if name.startswith(p)), ""), []).append(name)
    candidates = {p: names for p, names in groups.items() if p != "other"}
    if not candidates:
        raise CheckpointError(
            f"{path}: holds no diffusion model: its parts are {', '.join(part_names(tensors))}. "
            "A diffusion transformer is needed; load this file with the loader for its kind."
        )
    prefix = max(candidates, key=lambda p: len(candidates[p]))
    chosen = {name.removeprefix(prefix) for name in candidates[prefix]}
    roots = {name.split(".")[0] for name in chosen}
    for other, names in candidates.items():
        if other == prefix:
            continue
        clash = next((n for n in names if n.removeprefix(other).split(".")[0] in roots), None)
        if clash is not None:
            raise CheckpointError(
                f"{path}: holds two diffusion models, or one under two prefixes: {clash!r} beside "
                f"{candidates[prefix][0]!r}. One model under one prefix is needed; "
                "save the part you want to its own file."
            )
    found = {name.removeprefix(prefix): tensors[name] for name in candidates[prefix]}
    taken = set(candidates[prefix])
    rest = tuple(name for name in tensors if name not in taken)
    return Header(path, found, metadata, prefix, rest)


def part_names(keys) -> list[str]:
    """The first components of the keys, most frequent first, at most six."""
    return [name for name, _ in Counter(key.split(".")[0] for key in keys).most_common(6)]
