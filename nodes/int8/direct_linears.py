"""Feed-forwards of the host that multiply with their last Linear without calling it.

    linear_input_act(last, first(x), act)

The host then hands the activation to the kernel that quantises. Whatever hangs on the last Linear is passed over: the LoRA
beside its product, and whoever looks at what Linears are called with. And where a node chose another type to compute in than
that of the weight, the host makes the weight float there. So these feed-forwards have a seat, which calls the last Linear with
the activation, as the host did before it had that function, in these three cases; otherwise it does what the class does.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

from ...kernels.quantize_activation import activated_torch
from . import short_way
from .fusion.guards import why_unknown
from .seats import PerModel, Seat, Seats, as_class, is_replaced

HOST = "comfy."
FORWARD = "forward"
GELU, SWIGLU = "gelu_tanh", "swiglu"
# class of the host -> paths of its two Linears, the activation between them, fingerprints of its forward
TABLE = {
    "ldm.lightricks.model.FeedForward": ("net.0.proj", "net.2", GELU, frozenset({"630c221a23ee2747"})),
    "ldm.minimax.model.MLP": ("fc1", "fc2", SWIGLU, frozenset({"3993328d3ceb4df7"})),
    "ldm.wan.model.WanFeedForward": ("0", "2", GELU, frozenset({"d5a161fe77814873"})),
}

_thread = threading.local()
_is_compiling = torch.compiler.is_compiling


class Direct(NamedTuple):
    """One such feed-forward: `forward` of its class calls `first` and not `last`; `act` is GELU or SWIGLU."""

    owner: torch.nn.Module
    first: torch.nn.Module
    last: torch.nn.Module
    act: str
    forward: Callable

    def is_foreign(self) -> bool:
        """Whether another pack replaced the forward of the module or of its class since."""
        return type(self.owner).forward is not self.forward or is_replaced(self.owner.__dict__, FORWARD)


def direct_of(owner: torch.nn.Module) -> Direct | None:
    """What is known of `owner`; None for all other modules, and where the host's code is another."""
    kind = type(owner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    found = TABLE.get(name.removeprefix(HOST)) if name.startswith(HOST) else None
    if found is None or why_unknown(kind, {FORWARD: found[3]}) is not None:
        return None
    try:
        return Direct(owner, owner.get_submodule(found[0]), owner.get_submodule(found[1]), found[2], kind.forward)
    except AttributeError:
        return None


def acts_of(root: torch.nn.Module) -> dict[torch.nn.Module, str]:
    """Last Linear -> the activation that the host hands to its kernel, for the feed-forwards inside `root`."""
    found = (direct_of(module) for module in root.modules())
    return {direct.last: direct.act for direct in found if direct is not None}


def is_ready(owner: torch.nn.Module) -> bool:
    """Whether the last Linear of `owner` gets called where that is needed: it is known, and nobody replaced its forward."""
    found = direct_of(owner)
    return found is not None and not found.is_foreign()


class _Seats(Seats):
    """The seats of one model's feed-forwards; there while at least one thread needs them."""

    def __init__(self, diffusion_model: torch.nn.Module):
        self._found = [found for module in diffusion_model.modules() if (found := direct_of(module)) is not None]
        super().__init__((Seat(found.owner.__dict__, FORWARD, _seat(found)),) for found in self._found)

    def not_called(self) -> set[torch.nn.Module]:
        """Last Linears that are passed over all the same, since another pack replaced the forward around them."""
        return {found.last for found in self._found if found.is_foreign()}


seats_of = PerModel(_Seats)


@contextlib.contextmanager
def seated(diffusion_model: torch.nn.Module):
    """Let last Linears be called that must be. Yields those that another pack keeps from it."""
    seats = seats_of(diffusion_model)
    seats.enter(Counter())
    try:
        yield seats.not_called()
    finally:
        seats.leave()


@contextlib.contextmanager
def called(diffusion_model: torch.nn.Module):
    """Let all last Linears be called in this thread, so that they can be looked at."""
    with seated(diffusion_model):
        outer, _thread.called = getattr(_thread, "called", False), True
        try:
            yield
        finally:
            _thread.called = outer


def _seat(found: Direct):
    import comfy.model_management as host

    owner, first, last, act, known = found

    def forward(x):
        of_class = type(owner).forward
        # not from the dictionary: a compiler follows attributes
        must = getattr(last, short_way.BRANCH, None) is not None or _is_of_another_type(last, x)
        if not must and (_is_compiling() or not getattr(_thread, "called", False)):
            return of_class(owner, x)
        # there the host calls it itself; and another pack's forward is not ours to leave out
        if host.in_training or of_class is not known:
            return of_class(owner, x)
        hidden = first(x)
        gate, up = hidden.chunk(2, -1) if act == SWIGLU else (hidden, None)
        return last(activated_torch(gate, up))

    return as_class(forward)


def _is_of_another_type(linear: torch.nn.Module, x: torch.Tensor) -> bool:
    weight = linear.weight
    return getattr(weight, "_layout_cls", None) == short_way.LAYOUT and weight.dtype != x.dtype
