"""Converted copies: a native INT8 file for a source and a recipe, so that the second start quantises nothing.

An entry is named by the hash of its key: the source's path, size, time and header, and everything that decides the
result. It is complete when it has its name, since it is renamed only after it is on the disk; what was damaged afterwards
shows in its size, in the hash of its header or in the sums of its data, which each start reads once for that: about
a tenth of a second per GB that is in the page cache, else the time the disk takes, which the model would wait for later.
Two starts at once write under two temporary names and leave one entry.
"""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from . import quantize
from .checkpoint import CheckpointError, Header, read_header
from .native_file import TEMPORARY, NativeFile, data_hash, table_hash
from .shards import files_of

log = logging.getLogger("native_int8.cache")

FOLDER = ("native_int8", "cache")
# metadata of an entry: its key, and the hashes of its table of tensors and of their data
KEY, TABLE, DATA = "native_int8_cache_key", "native_int8_cache_table", "native_int8_cache_data"
# options that do not change the result
_NO_RECIPE = ("cache", "device")
_ABANDONED_SECONDS = 24 * 3600


def folder() -> Path:
    """Where entries are kept: native_int8/cache in ComfyUI's user folder. It may be cleared at any time."""
    import folder_paths

    return Path(folder_paths.get_user_directory()).joinpath(*FOLDER)


def key_of(header: Header, options) -> dict[str, object]:
    """What an entry depends on: plain values, for JSON."""
    table = [[n, i.dtype, list(i.shape), i.start, i.end] for n, i in header.tensors.items()]
    content = json.dumps([header.prefix, table, sorted(header.metadata.items())]).encode()
    recipe = {k: v for k, v in dataclasses.asdict(options).items() if k not in _NO_RECIPE}
    files = [os.path.realpath(file) for file in files_of(header.path)]
    return {
        "files": files,
        "sizes": [os.path.getsize(file) for file in files],
        "times_ns": [os.stat(file).st_mtime_ns for file in files],
        "header": hashlib.sha256(content).hexdigest(),
        "recipe": recipe,
        "quantiser": quantize.VERSION,
    }


def path_of(key: dict[str, object]) -> Path:
    """The entry's file."""
    digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
    return folder() / f"{Path(key['files'][0]).stem}-{digest[:16]}.safetensors"


def fault(key: dict[str, object]) -> str | None:
    """Why the entry's header says that it cannot be used; "" when there is none, None when it can."""
    path = path_of(key)
    if not path.is_file():
        return ""
    try:
        header = read_header(str(path))
    except (CheckpointError, OSError) as error:
        return str(error)
    if header.metadata.get(KEY) != json.dumps(key, sort_keys=True):
        return f"{path}: it was made from another source"
    names = {header.key(name): info for name, info in header.tensors.items()}
    if header.rest or header.metadata.get(TABLE) != table_hash(names):
        return f"{path}: its header was changed after it was written"
    return None


def fetch(
    header: Header,
    options,
    convert: Callable[[object], None],
    read: Callable[[str], dict[str, torch.Tensor]],
    metadata: dict[str, str],
) -> tuple[dict[str, torch.Tensor] | None, list[str]]:
    """The native tensors from the entry, which is made first where it is missing or damaged.

    Args:
        header: of the source file.
        options: `loader.LoadOptions`.
        convert: called with an object that takes tensors as a dict does; it writes all of them to it.
        read: path -> tensors of a safetensors file.
    Returns:
        (name -> tensor, or None when no entry can be had, notes for the user).
    """
    try:
        key = key_of(header, options)
        path = path_of(key)
        reason = fault(key)
        if reason is None:
            with _as_os_error():
                native = read(str(path))
            if data_hash(native) == read_header(str(path)).metadata.get(DATA):
                log.info("using the converted copy %s", path)
                return native, []
            # a file that is mapped cannot be replaced on Windows
            native = None
            reason = f"{path}: its data was changed after it was written"
        notes = [f"The converted copy was damaged and has been made again: {reason}"] if reason else []
        path.parent.mkdir(parents=True, exist_ok=True)
        own = {KEY: json.dumps(key, sort_keys=True)}
        with NativeFile(path, header.tensors, {**metadata, **own}, TABLE, DATA) as file:
            convert(file)
        _clean(path, key)
        log.info("kept a converted copy of %.2f GB: %s", path.stat().st_size / 1e9, path)
        with _as_os_error():
            return read(str(path)), notes
    except OSError as error:
        note = (
            f"No converted copy could be kept or used in {folder()}: {error}. A folder that can be written, with free space of "
            "about half the bf16 file, is needed. The model was converted in memory; free some space, or switch keep_copy off."
        )
        return None, [note]


@contextlib.contextmanager
def _as_os_error():
    """An entry that goes away while it is opened is no fault of the source."""
    try:
        yield
    except CheckpointError as error:
        raise OSError(str(error)) from error


def _clean(path: Path, key: dict[str, object]) -> None:
    """Remove entries of older versions of the same file, and what a crashed start left."""
    with contextlib.suppress(OSError):
        for part in path.parent.glob(f".*{TEMPORARY}"):
            if time.time() - part.stat().st_mtime > _ABANDONED_SECONDS:
                part.unlink()
    for other in path.parent.glob("*.safetensors"):
        if other == path:
            continue
        # an entry that another start is reading or removing stays
        with contextlib.suppress(OSError, ValueError, KeyError):
            theirs = json.loads(read_header(str(other)).metadata[KEY])
            same = theirs["files"] == key["files"]
            if same and [theirs[k] for k in ("sizes", "times_ns")] != [key[k] for k in ("sizes", "times_ns")]:
                other.unlink()
                log.info("removed the copy of an older version of the file: %s", other)
