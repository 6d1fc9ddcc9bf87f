"""Launching a kernel: on the GPU that holds the tensors, and cheaply from the second time on.

Triton's own launch binds, specialises and looks up every argument each time, which costs more host time than a small
matmul takes on the GPU. A `Launcher` remembers the compiled kernel under a key of what Triton specialises on and
starts it directly. It also keeps the guard: a variant whose registers spilled is reported once, by name.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import torch

log = logging.getLogger("native_int8.launch")
_NOTHING = contextlib.nullcontext()


def on_device(device: torch.device):
    """A context in which Triton launches on `device`. Free when it is current already or is no CUDA device."""
    if device.type != "cuda" or device.index is None or device.index == torch.cuda.current_device():
        return _NOTHING
    return torch.cuda.device(device)


class Launcher:
    """Starts one jit function; `compiled` maps keys to compiled kernels."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled: dict[tuple, object] = {}

    def __call__(
        self,
        programs: int,
        key: tuple,
        aligned: bool,
        arguments: tuple,
        options: dict,
        on_first: Callable[[object], None] | None = None,
    ) -> None:
        """Launch `programs` programs on the current device.

        Args:
            key: everything that selects machine code apart from pointer alignment: device, dtypes, sizes, strides and
                constants. M may be left out, since kernels do not specialise on it.
            aligned: whether all pointers are multiples of 16; others take Triton's own way each time.
            arguments: all arguments in the order of the kernel's signature, constants included.
            options: num_warps, num_stages, ...
            on_first: called with the compiled kernel when it was started for the first time.
        """
        compiled = self.compiled.get(key) if aligned else None
        if compiled is not None:
            compiled[(programs, 1, 1)](*arguments)
            return
        compiled = self.kernel[(programs, 1, 1)](*arguments, **options)
        # the interpreter returns nothing
        if compiled is None or not aligned:
            return
        self.compiled[key] = compiled
        if on_first is not None:
            on_first(compiled)


def is_aligned(*pointers: int) -> bool:
    """True when every address is a multiple of 16 bytes."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return together & 15 == 0
