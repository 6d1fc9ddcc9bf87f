"""LoRAs beside the INT8 product: y = int8_linear(x) + (x A^T) B^T, for the low-rank patches on INT8 Linears.

Added to the weight, a small LoRA vanishes in the rounding to INT8, and every change of it costs a reload. Beside it
nothing is rounded to INT8: all LoRAs of a layer are one stack of rank-1 terms with the strengths folded in, so six cost
little more than one, and a strength changes by making the stacks again.

This module knows which patches are low-rank (`terms_of`), makes the stacks (`BranchSet`) and hangs them on the Linears
while a MODEL runs (`inside`). That they are not added to the weights as well is the matter of lora_patcher.py. The patches
in `model.patches` stay what they are; all here is made from them.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import threading
import types
import weakref
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

import torch

from ...kernels.low_rank import LowRank
from . import direct_linears, short_way
from .seats import is_replaced

# ranks are padded to multiples of these, so that a compiled model sees the same shapes when LoRAs come and go
SMALL_RANK, RANK_STEP = 32, 64

log = logging.getLogger("native_int8.lora")
_lock = threading.Lock()
_loaded: weakref.WeakKeyDictionary[torch.nn.Module, Loaded] = weakref.WeakKeyDictionary()


class Term(NamedTuple):
    """One LoRA on one layer: factor * up [n, r] @ down [r, k], at row `row` and column `column` of the weight."""

    up: torch.Tensor
    down: torch.Tensor
    mid: torch.Tensor | None
    factor: float
    row: int
    column: int

    @property
    def rank(self) -> int:
        """Rows of `down` that the term adds to the stack."""
        return self.up.shape[1]


class Loaded:
    """What lies in a model's weights: patches loaded under `uuid`, of which `rest` was baked in and `branch` was not."""

    __slots__ = ("branch", "device", "rest", "uuid")

    def __init__(self, uuid: UUID, rest, branch: BranchSet, device: torch.device):
        self.uuid, self.rest, self.branch, self.device = uuid, rest, weakref.ref(branch), device


class BranchSet:
    """The stacks of one MODEL: made at the first run, dropped when the MODEL leaves its device.

    Args:
        uuid: `patches_uuid` of the MODEL.
        modules: INT8 Linear -> its terms; Linears without any are left out.
    """

    def __init__(self, uuid: UUID, modules: dict[torch.nn.Module, list[Term]]):
        self.uuid = uuid
        self.modules = {module: terms for module, terms in modules.items() if terms}
        self.warned = False
        self._made: tuple | None = None
        self._lock = threading.Lock()

    def stacks(self, device: torch.device, dtype: torch.dtype) -> list[tuple[torch.nn.Module, LowRank]]:
        """The stack of each Linear on `device` in `dtype`."""
        with self._lock:
            if self._made is None or self._made[0] != (device, dtype):
                # usable by a caller outside inference mode, too
                with torch.inference_mode(False), torch.no_grad():
                    made = [(m, stack(terms, *_shape(m), device, dtype)) for m, terms in self.modules.items()]
                self._made = (device, dtype), made
            return self._made[1]

    def is_made_of(self, modules: dict[torch.nn.Module, list[Term]]) -> bool:
        """Whether `modules` means the same stacks, with the very same tensors."""
        wanted = {module: terms for module, terms in modules.items() if terms}
        return _identity(self.modules) == _identity(wanted)

    def drop(self) -> None:
        """Forget the stacks; the next run makes them again."""
        with self._lock:
            self._made = None

    def missing_bytes(self, dtype: torch.dtype) -> int:
        """What the stacks will take on the device; 0 when they are there."""
        if self._made is not None:
            return 0
        return sum(padded_rank(terms) * sum(_shape(m)) for m, terms in self.modules.items()) * dtype.itemsize


def _identity(modules: dict[torch.nn.Module, list[Term]]) -> dict:
    # tensors are compared by identity: a comparison by value is a tensor
    return {m: [(id(t.up), id(t.down), id(t.mid), *t[3:]) for t in terms] for m, terms in modules.items()}


def _shape(module: torch.nn.Module) -> tuple[int, int]:
    return module.out_features, module.in_features


def padded_rank(terms: list[Term]) -> int:
    """Rank of the stack of `terms`, padding included."""
    rank = sum(term.rank for term in terms)
    return SMALL_RANK if rank <= SMALL_RANK else -(-rank // RANK_STEP) * RANK_STEP


def stack(terms: list[Term], n: int, k: int, device: torch.device, dtype: torch.dtype) -> LowRank:
    """All terms on one weight [n, k] as one product; factors are multiplied in fp32 and rounded once."""
    rank = padded_rank(terms)
    down = torch.zeros((rank, k), device=device, dtype=dtype)
    up = torch.zeros((n, rank), device=device, dtype=dtype)
    start = 0
    for term in terms:
        below = term.down.to(device).float().flatten(1)
        if term.mid is not None:
            # the host's meaning of a 1x1 middle: down^T mid^T, transposed
            below = (below.t() @ term.mid.to(device).float().transpose(0, 1).flatten(1)).t()
        above = term.up.to(device).float().flatten(1) * term.factor
        # powers of two keep both factors in the range of fp16 and change nothing else
        shift = _balance(above, below)
        rows, columns = slice(start, start + term.rank), slice(term.column, term.column + below.shape[1])
        down[rows, columns] = (below * shift).to(dtype)
        up[term.row : term.row + above.shape[0], rows] = (above / shift).to(dtype)
        start += term.rank
    return LowRank(down, up)


def _balance(above: torch.Tensor, below: torch.Tensor) -> torch.Tensor:
    """The power of two that gives `below` times it and `above` over it about the same largest value."""
    ratio = above.abs().amax() / below.abs().amax()
    return torch.where(ratio.isfinite() & (ratio > 0), torch.exp2((ratio.log2() / 2).round()), 1.0)


def terms_of(patches: list[tuple], module: torch.nn.Module) -> list[Term] | str:
    """The patches on an INT8 Linear's weight as low-rank terms, or one sentence that says why they are none.

    Args:
        patches: what the host keeps: (strength, patch, strength_model, offset, function) each.
    """
    from comfy.weight_adapter import LoRAAdapter

    terms = []
    for strength, patch, strength_model, offset, function in patches:
        if not isinstance(patch, LoRAAdapter):
            name = getattr(patch, "name", None) or (
                patch[0] if isinstance(patch, tuple) and len(patch) == 2 else "diff"
            )
            return f"a patch of kind {name} is not low-rank"
        if strength_model != 1.0 or function is not None:
            return "a patch scales the weight or goes through a function"
        found = _term(patch.weights, strength, offset, module)
        if isinstance(found, str):
            return found
        if strength != 0.0:
            terms.append(found)
    return terms


def _term(weights: tuple, strength: float, offset: tuple | None, module: torch.nn.Module) -> Term | str:
    up, down, alpha, mid, dora_scale, reshape = weights
    if dora_scale is not None:
        return "a DoRA changes with the weight it is added to"
    size, at = list(_shape(module)), [0, 0]
    if reshape is not None and list(reshape) != size:
        return "a LoRA changes the shape of the weight"
    if offset is not None:
        axis, start, length = offset
        if axis not in (0, 1):
            return f"a LoRA is for axis {axis} of the weight"
        at[axis], size[axis] = start, length
    rank = up.shape[1] if up.ndim >= 2 else 0
    if mid is not None and (
        mid.ndim != 4 or tuple(mid.shape[2:]) != (1, 1) or tuple(mid.shape[:2]) != (rank, down.shape[0])
    ):
        return "a LoRA has a middle part that is no 1x1 convolution"
    if mid is None and (down.ndim < 2 or down.shape[0] != rank):
        return "the two parts of a LoRA are of different rank"
    if [up.shape[0], up.numel() // max(up.shape[0], 1)] != [size[0], rank] or down[0].numel() != size[1]:
        return "a LoRA has another shape than the weight"
    factor = strength if alpha is None else strength * alpha / down.shape[0]
    return Term(up, down, mid, float(factor), *at)


def why_not_beside(base_model: torch.nn.Module, path: str, module: torch.nn.Module) -> str | None:
    """Why the output of the Linear at `path` cannot be added to, or None when it can."""
    if any(is_replaced(module.__dict__, name) for name in (short_way.UPPER, short_way.LOWER)):
        return "another pack replaced the Linear's methods"
    owner = base_model
    for name in path.split(".")[:-1]:
        owner = getattr(owner, name)
        if _takes_weights(type(owner)) and not direct_linears.is_ready(owner):
            return f"{type(owner).__name__} hands weights to the kernel without calling the Linear"
    return None


@functools.cache
def _direct_functions() -> frozenset[str]:
    """The host's functions that take a Linear and use its weight without calling it, such as linear_input_act."""
    import comfy.ops

    return frozenset(
        name
        for name, function in vars(comfy.ops).items()
        if inspect.isfunction(function) and next(iter(inspect.signature(function).parameters), None) == "linear"
    )


@functools.cache
def _takes_weights(kind: type) -> bool:
    functions = [
        value
        for parent in kind.__mro__
        if not parent.__module__.startswith("torch.")
        for value in vars(parent).values()
        if isinstance(value, types.FunctionType)
    ]
    return any(not _direct_functions().isdisjoint(function.__code__.co_names) for function in functions)


def loaded(base_model: torch.nn.Module) -> Loaded | None:
    """What our patcher loaded last into `base_model`, or None when another one did since."""
    found = _loaded.get(base_model)
    return found if found is not None and found.uuid == base_model.current_weight_patches_uuid else None


def set_loaded(base_model: torch.nn.Module, state: Loaded | None) -> None:
    """Say what lies in the weights of `base_model`; None for nothing of ours."""
    if state is None:
        _loaded.pop(base_model, None)
    else:
        _loaded[base_model] = state


@contextlib.contextmanager
def inside(base_model: torch.nn.Module) -> Iterator[None]:
    """Let the INT8 Linears of `base_model` add the stacks of the MODEL that is loaded."""
    state = loaded(base_model) if isinstance(base_model, torch.nn.Module) else None
    branch = None if state is None else state.branch()
    if branch is None or not branch.modules:
        yield
        return
    dtype = base_model.get_dtype_inference()
    stacks = branch.stacks(state.device, dtype)
    model = base_model.diffusion_model
    with short_way.seated(model), direct_linears.seated(model) as passed_over:
        lost = [module for module, _ in stacks if module in passed_over or not short_way.is_seated(module)]
        _warn_of_lost(lost, branch)
        with _lock:
            for module, low_rank in stacks:
                module.__dict__[short_way.BRANCH] = low_rank
                module.__dict__[_USERS] = module.__dict__.get(_USERS, 0) + 1
        try:
            yield
        finally:
            with _lock:
                for module, _ in stacks:
                    module.__dict__[_USERS] -= 1
                    if not module.__dict__[_USERS]:
                        del module.__dict__[_USERS], module.__dict__[short_way.BRANCH]


def _warn_of_lost(modules: list[torch.nn.Module], branch: BranchSet) -> None:
    if modules and not branch.warned:
        branch.warned = True
        log.warning(
            "%d Linears run without their LoRA: another pack replaced their method %s, or the forward of the feed-forward "
            "around them, after the MODEL was loaded. Put its node before the LoRA loader and run again, so that the LoRA is "
            "baked in.",
            len(modules),
            short_way.LOWER,
        )


_USERS = short_way.BRANCH + "_users"
