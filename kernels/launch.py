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


class Starter:
    """Starts one compiled kernel on one device without Triton's per-launch Python.

    A pointer may be given as a tensor or as its address, which spares the driver's look-up of the pointer.
    """

    __slots__ = ("_compiled", "_function", "_hooks", "_metadata", "_run", "_stream_of", "device_index")

    def __init__(self, compiled, device_index: int):
        """compiled: what Triton returned from a launch on this device, so that its handles exist."""
        from triton.runtime import driver

        try:
            from triton import knobs

            self._hooks = knobs.runtime
        except ImportError:
            # older Tritons keep hooks elsewhere, so they take Triton's own launch
            self._hooks = None
        self._compiled = compiled
        self._run = compiled.run
        self._function = compiled.function
        self._metadata = compiled.packed_metadata
        self._stream_of = driver.active.get_current_stream
        self.device_index = device_index

    def __call__(self, programs: int, arguments: tuple) -> None:
        """Launch on the current stream of the device, which must be the current one."""
        hooks = self._hooks
        # a profiler that set hooks gets Triton's own launch, which calls them
        if hooks is None or _is_set(hooks.launch_enter_hook) or _is_set(hooks.launch_exit_hook):
            self._compiled[(programs, 1, 1)](*arguments)
            return
        stream = self._stream_of(self.device_index)
        self._run(programs, 1, 1, stream, self._function, self._metadata, None, None, None, *arguments)


def _is_set(hook) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))


class Launcher:
    """Starts one jit function; `compiled` maps keys to compiled kernels, `starters` to what starts them."""

    def __init__(self, kernel):
        self.kernel = kernel
        self.compiled: dict[tuple, object] = {}
        self.starters: dict[tuple, Starter] = {}

    def __call__(
        self,
        programs: int,
        key: tuple,
        aligned: bool,
        arguments: tuple,
        options: dict,
        on_first: Callable[[object], None] | None = None,
    ) -> Starter | None:
        """Launch `programs` programs on the current device.

        Args:
            key: the device's index, then everything that selects machine code apart from pointer alignment: dtypes,
                sizes, strides and constants. M may be left out, since kernels do not specialise on it.
            aligned: whether all pointers are multiples of 16; others take Triton's own way each time.
            arguments: all arguments in the order of the kernel's signature, constants included.
            options: num_warps, num_stages, ...
            on_first: called with the compiled kernel when it was started for the first time.
        Returns:
            what starts the same kernel again, for arguments under the same key; None when Triton's own way is needed.
        """
        starter = self.starters.get(key) if aligned else None
        if starter is not None:
            starter(programs, arguments)
            return starter
        compiled = self.kernel[(programs, 1, 1)](*arguments, **options)
        # the interpreter returns nothing
        if compiled is None or not aligned:
            return None
        self.compiled[key] = compiled
        starter = self.starters[key] = Starter(compiled, key[0])
        if on_first is not None:
            on_first(compiled)
        return starter


def is_aligned(*pointers: int) -> bool:
    """True when every address is a multiple of 16 bytes."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return together & 15 == 0
