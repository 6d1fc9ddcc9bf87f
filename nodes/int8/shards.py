"""A model in several safetensors files: which files belong together.

Two spellings: names ending in -00001-of-00003, any of which stands for all, and an index (`*.safetensors.index.json`,
{"weight_map": {tensor: file name}}). A weight and its scale may lie in different files.
"""

import json
import os
import re
from pathlib import Path

from .checkpoint import CheckpointError, Header, TensorInfo, header_from, read_tensors

INDEX = ".index.json"
_NUMBERED = re.compile(r"(.*-)(\d{5})-of-(\d{5})(\.(?:safetensors|sft))", re.IGNORECASE)
_MAX_INDEX_BYTES = 100_000_000


def files_of(path: str) -> tuple[str, ...]:
    """All files of the model that `path` is a part or the index of; (path,) for a single file.

    Raises:
        CheckpointError: a part is missing, or the index cannot be read.
    """
    path = str(path)
    if path.lower().endswith(INDEX):
        names = tuple(dict.fromkeys(_weight_map(path).values()))
    else:
        found = _NUMBERED.fullmatch(os.path.basename(path))
        if found is None:
            return (path,)
        start, number, count, end = found.groups()
        if not 1 <= int(number) <= int(count):
            return (path,)
        # as the host's lists have it, a part may be spelled with any case of the extension
        names = tuple(f"{start}{i:05}-of-{count}{end}" for i in range(1, int(count) + 1))
    folder = Path(path).parent
    files = tuple(str(folder / name) for name in names)
    missing = [os.path.basename(file) for file in files if not os.path.isfile(file)]
    if missing:
        raise CheckpointError(
            f"{path}: {len(missing)} of the model's {len(files)} files are missing: {', '.join(missing[:3])}"
            f"{' and more' if len(missing) > 3 else ''}. All of them are needed in the folder {folder}; download the rest."
        )
    return files


def files_there(path: str) -> tuple[str, ...]:
    """What a load of `path` depends on: the file, and of a model in several files all that are there."""
    try:
        return tuple(dict.fromkeys((str(path), *files_of(path))))
    except CheckpointError:
        # the load says what is wrong
        return (str(path),)


def read_header(path: str) -> Header:
    """The header of a model in one or several files, by the path of any of them or of the index.

    Raises:
        CheckpointError: as `checkpoint.read_header`, a file is missing, or the files contradict each other or the index.
    """
    return header_from(str(path), *read_all(path))


def read_all(path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """All tensors of a model in one or several files by their full names, and the metadata.

    Raises:
        CheckpointError: as `read_header`, except for what the tensors are.
    """
    tensors: dict[str, TensorInfo] = {}
    metadata: dict[str, str] = {}
    places: dict[str, str] = {}
    for file in files_of(path):
        found, more = read_tensors(file)
        twice = next((name for name in found if name in tensors), None)
        if twice is not None:
            raise CheckpointError(
                f"{path}: {twice!r} is in {os.path.basename(places[twice])} and in {os.path.basename(file)}. Each tensor is "
                "needed once; the parts are of different models or versions: download them again."
            )
        tensors.update(found)
        places.update(dict.fromkeys(found, file))
        metadata.update(more)
    if str(path).lower().endswith(INDEX):
        absent = [name for name in _weight_map(path) if name not in tensors]
        if absent:
            raise CheckpointError(
                f"{path}: {len(absent)} tensors of the index are in none of its files, such as {absent[0]!r}. The files that "
                "belong to this index are needed; download them again."
            )
    return tensors, metadata


def _weight_map(path: str) -> dict[str, str]:
    try:
        if os.path.getsize(path) > _MAX_INDEX_BYTES:
            raise ValueError(f"it has {os.path.getsize(path)} bytes")
        content = json.loads(Path(path).read_text(encoding="utf-8"))
        names = content["weight_map"]
        # names of files beside the index, never paths
        good = isinstance(names, dict) and names and all(
            isinstance(n, str) and n.lower().endswith((".safetensors", ".sft")) and not re.search(r"[/\\:\0]", n)
            for n in names.values()
        )  # fmt: skip
        if not good:
            raise ValueError("its weight_map is not a table of tensor names and safetensors files")
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: not an index of a model in several files: {error}. A table weight_map of tensor names and file names "
            "is needed; download the index again, or choose the first of the files instead."
        ) from error
    return names
