"""Fused blocks: which classes of the host have one, and how a running MODEL gets them.

While a MODEL runs, each block that is known here has a seat, an instance attribute `forward` as the Linears have theirs
(short_way.py says why there and not elsewhere). The seat runs the fused block where everything it relies on holds, and
the class's own forward otherwise; both are counted, the latter with the reason. The Linears inside keep their own seats:
a fused block hands them rows that are quantised already (shared_rows.Given), and whatever a Linear then does, such as
fetching an offloaded weight or adding a LoRA, is its usual way.

A new architecture is a file here with a class that has `of`, `name` and `forward` as gated.py has them, and a line in
BLOCKS.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys

import torch

from ....kernels.dispatch import Int8Error
from .. import short_way, traced
from ..seats import PerModel, Seat, Seats
from . import flux, ideogram4, krea2, lumina, qwen_image, rope, wan

SWITCH = "NATIVE_INT8_FUSION"
COMPILED_SWITCH = "NATIVE_INT8_COMPILED_FUSION"
FORWARD = "forward"
HOST = "comfy."

# class of the host -> what makes a fused block of a module, or returns why there is none
BLOCKS = {
    "ldm.flux.layers.DoubleStreamBlock": flux.Double.of,
    "ldm.flux.layers.SingleStreamBlock": flux.Single.of,
    "ldm.ideogram4.model.Ideogram4TransformerBlock": ideogram4.Block.of,
    "ldm.krea2.model.SingleStreamBlock": krea2.Block.of,
    "ldm.lumina.model.JointTransformerBlock": lumina.Block.of,
    "ldm.qwen_image.model.QwenImageTransformerBlock": qwen_image.Block.of,
    "ldm.wan.model.VaceWanAttentionBlock": wan.VaceBlock.of,
    "ldm.wan.model.WanAttentionBlock": wan.Block.of,
}
# class of the host -> (name of a method, what makes its seat, what its seat has to know of the values in tensors)
MODELS = {
    "ldm.ideogram4.model.Ideogram4Transformer2DModel": (
        "_run_conditional",
        ideogram4.without_full_mask,
        ideogram4.facts,
    )
}

log = logging.getLogger("native_int8.fusion")


def is_enabled() -> bool:
    """Whether blocks may run fused; NATIVE_INT8_FUSION=0 forbids it."""
    return os.environ.get(SWITCH, "1") != "0"


def is_traced() -> bool:
    """Whether torch.compile gets fused blocks to trace; the host's with NATIVE_INT8_COMPILED_FUSION=0."""
    return os.environ.get(COMPILED_SWITCH, "1") != "0"


@contextlib.contextmanager
def inside(diffusion_model: torch.nn.Module):
    """Let the known blocks of `diffusion_model` run fused in this thread; entered inside short_way.inside."""
    run = short_way.current_run()
    if run is None:
        yield
        return
    seats = seats_of(diffusion_model)
    seats.enter_run(run)
    traced.fused = is_traced()
    if traced.fused and "torch._dynamo" in sys.modules:
        for block in seats.blocks:
            if _is_traceable(block):
                block.watched.remember()
    try:
        with rope.inside() if seats.blocks else contextlib.nullcontext():
            yield
    finally:
        seats.leave()


def facts(diffusion_model: torch.nn.Module, kwargs: dict) -> dict[str, bool]:
    """What the seats of a call with `kwargs` would ask of the values in tensors, for `Run.facts`; waits for the GPU."""
    found = MODELS.get(_name_of(type(diffusion_model)))
    return {} if found is None else found[2](kwargs)


def compile_kernels(diffusion_model: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> int:
    """Compile what the fused blocks of `diffusion_model` need on `device` beside its Linears; returns how many kernels."""
    if not (is_enabled() and short_way.is_enabled()):
        return 0
    needed = {}
    for block in seats_of(diffusion_model).blocks:
        kernels = block.kernels(device)
        if kernels is not None and (kernels, dtype) not in _compiled:
            needed[kernels, dtype] = block
    _compiled.update(needed)
    return sum(block.warm_up(*key) for key, block in needed.items())


_compiled: set[tuple] = set()


class _Seats(Seats):
    """The seats of one model's blocks; there while at least one thread runs the model."""

    def __init__(self, diffusion_model: torch.nn.Module):
        super().__init__([])
        self.blocks: list = []
        self.unknown: dict[str, int] = {}
        for module in diffusion_model.modules():
            name = _name_of(type(module))
            if name in BLOCKS:
                block = BLOCKS[name](module)
                if isinstance(block, str):
                    self.unknown[block] = self.unknown.get(block, 0) + 1
                else:
                    self.blocks.append(block)
                    self._add(module, FORWARD, _block_seat(module, block))
            elif name in MODELS:
                method, make, _ = MODELS[name]
                seat = make(module, getattr(type(module), method))
                if seat is not None:
                    self._add(module, method, seat)
        if not self.groups and not self.unknown:
            self.unknown[f"no fusion for the class {type(diffusion_model).__name__}"] = 1

    def _add(self, module: torch.nn.Module, name: str, seat) -> None:
        self.groups.append((Seat(module.__dict__, name, seat),))

    def enter_run(self, run: short_way.Run) -> None:
        """`enter`, counted in the thread's run."""
        run.unfused.update(self.unknown)
        self.enter(run.unfused)


seats_of = PerModel(_Seats)


def _is_traceable(block) -> bool:
    return getattr(block, "traceable", False)


def _traced(block, of_class, module: torch.nn.Module, args: tuple, kwargs: dict):
    """A block inside a graph of torch.compile: fused, or as its class has it."""
    found = block.forward(traced.run, *args, **kwargs)
    traced.run.shared.given = None
    return of_class(module, *args, **kwargs) if isinstance(found, str) else found


def _name_of(module_class: type) -> str | None:
    name = f"{module_class.__module__}.{module_class.__qualname__}"
    return name.removeprefix(HOST) if name.startswith(HOST) else None


def _block_seat(module: torch.nn.Module, block):
    of_class = type(module).forward
    traceable = _is_traceable(block)

    @functools.wraps(of_class)
    def forward(*args, **kwargs):
        if traceable and traced.fused and torch.compiler.is_compiling():
            return _traced(block, of_class, module, args, kwargs)
        run = short_way.current_run()
        if run is None:
            return of_class(module, *args, **kwargs)
        try:
            found = block.forward(run, *args, **kwargs)
        except Int8Error as error:
            found = f"the kernel cannot run it: {error}"
        finally:
            run.shared.given = None
        if not isinstance(found, str):
            run.fused[block.name] += 1
            return found
        if found not in run.unfused:
            log.debug("A block of %s runs unfused: %s.", block.name, found)
        run.unfused[found] += 1
        return of_class(module, *args, **kwargs)

    return forward
