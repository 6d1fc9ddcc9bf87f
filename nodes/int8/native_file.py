"""Write the host's native INT8 format to a safetensors file while its layers are being made.

The file grows layer by layer, so only the tensors at hand are in memory. Space for the header is left free at the start
and filled in last; JSON may end in blanks, which take up the rest. The markers go to the file twice: as the
`.comfy_quant` tensors that arrive, and together under `_quantization_metadata`. Until everything is on the disk the file
has a temporary name in the same folder; then it is renamed, so a file under its final name is whole.

Tensors of a size that is no multiple of 8 bytes come last: every tensor then starts at a multiple of its element size,
without gaps, which the format does not allow.
"""

import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from .checkpoint import TensorInfo, dtype_name
from .formats import MARKER, METADATA

TEMPORARY = ".part"
_SUM_WORDS = 1 << 17
# of a JSON entry beside the name: dtype, shape and offsets
_ENTRY_BYTES = 160
# a stored tensor may become a weight, a scale and a marker, and a line of the metadata
_ENTRIES_PER_NAME = 4


class NativeFile:
    """A file that is being written; a context manager. Leaving it by an exception removes what was written.

    Args:
        path: final name; an existing file is replaced in one step at the end.
        names: of the tensors that the content is made of, for the size of the header.
        metadata: str -> str of the source, kept; `_quantization_metadata` is replaced.
        table_key: name under which the metadata gets the hash of the table of tensors; "" for none.
        data_key: name under which the metadata gets `data_hash` of the tensors; "" for none.
    Raises:
        OSError: the disk is full, or the folder is not there or cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike,
        names: Iterable[str],
        metadata: Mapping[str, str] | None = None,
        table_key: str = "",
        data_key: str = "",
    ):
        self.path = Path(path)
        self._table_key, self._data_key = table_key, data_key
        self._sums: dict[str, bytes] = {}
        self.metadata = {key: value for key, value in (metadata or {}).items() if key != METADATA}
        self.tensors: dict[str, TensorInfo] = {}
        self._layers: dict[str, dict] = {}
        self._last: dict[str, torch.Tensor] = {}
        spent = len(json.dumps(self.metadata).encode()) + 4096
        # quotes are escaped within the metadata, and a name may be escaped too
        spent += sum(_ENTRIES_PER_NAME * (2 * len(json.dumps(name)) + _ENTRY_BYTES) for name in names)
        self._header_bytes = -(-spent // 8) * 8
        self._position = 0

    def __enter__(self) -> "NativeFile":
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")
        self._file = open(self._temporary, "xb")
        self._file.seek(8 + self._header_bytes)
        return self

    def update(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Add tensors on any device, with any strides; two names of one tensor are stored twice.

        Raises:
            OSError: the disk is full.
            ValueError: a name is there already.
        """
        for name, tensor in tensors.items():
            self[name] = tensor

    def __setitem__(self, name: str, tensor: torch.Tensor) -> None:
        if name in self.tensors or name in self._last:
            raise ValueError(f"{name} was added twice. Each tensor needs its own name; leave one of them out.")
        if name.endswith(MARKER):
            self._layers[name.removesuffix(MARKER)] = json.loads(bytes(tensor.tolist()))
        if tensor.numel() * tensor.element_size() % 8:
            self._last[name] = tensor
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        count = flat.numel() * flat.element_size()
        if count:
            self._file.write(memoryview(flat.view(torch.uint8).numpy()))
        if self._data_key:
            self._sums[name] = data_sums(flat)
        end = self._position + count
        self.tensors[name] = TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape), self._position, end)
        self._position = end

    def __exit__(self, kind, value, trace) -> None:
        try:
            if kind is None:
                self._finish()
        finally:
            self._file.close()
            self._last.clear()
            self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        for name, tensor in sorted(self._last.items(), key=lambda item: -item[1].element_size()):
            self._write(name, tensor)
        if self._layers:
            self.metadata[METADATA] = json.dumps({"format_version": "1.0", "layers": self._layers})
        if self._table_key:
            self.metadata[self._table_key] = table_hash(self.tensors)
        if self._data_key:
            self.metadata[self._data_key] = _hash_of(self._sums)
        header = header_json(self.tensors, self.metadata)
        if len(header) > self._header_bytes:
            raise ValueError(
                f"{self.path}: the header takes {len(header)} bytes and {self._header_bytes} were left for it. The names "
                "of the written tensors must come from the names given at the start; give all of them."
            )
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._header_bytes) + header.ljust(self._header_bytes))
        self._file.flush()
        os.fsync(self._file.fileno())
        # an open file cannot be renamed on Windows
        self._file.close()
        os.replace(self._temporary, self.path)
        if os.name == "posix":
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def header_json(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> bytes:
    """The JSON of a safetensors header."""
    entries: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for name, info in tensors.items():
        entries[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.start, info.end]}
    return json.dumps(entries, separators=(",", ":")).encode("utf-8")


def table_hash(tensors: Mapping[str, TensorInfo]) -> str:
    """SHA-256 over names, dtypes, shapes and places of tensors, in any order."""
    return hashlib.sha256(header_json(dict(sorted(tensors.items())), {})).hexdigest()


def data_sums(tensor: torch.Tensor) -> bytes:
    """Sums modulo 2^64 of the 8-byte words of a contiguous CPU tensor, one for each MiB; a flipped bit changes its sum."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)
    pieces = words[: words.numel() // _SUM_WORDS * _SUM_WORDS].view(-1, _SUM_WORDS).sum(1)
    rest = words[pieces.numel() * _SUM_WORDS :].sum()
    return pieces.numpy().tobytes() + rest.numpy().tobytes() + bytes(flat[words.numel() * 8 :].tolist())


def data_hash(tensors: Mapping[str, torch.Tensor]) -> str:
    """SHA-256 over the names and `data_sums` of tensors, in any order; reads all data once, at about memory speed."""
    return _hash_of({name: data_sums(tensor) for name, tensor in tensors.items()})


def _hash_of(sums: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, sum_bytes in sorted(sums.items()):
        digest.update(f"{name}\0{len(sum_bytes)}\0".encode())
        digest.update(sum_bytes)
    return digest.hexdigest()
