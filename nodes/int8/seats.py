"""Seats: instance attributes that shadow a class's methods while at least one thread runs the model.

The instance dictionary is written directly, which costs about 0.3 us for an attribute. What another pack put there first
stays, and stays when the last thread leaves. The class's own method may stand there too, bound: ComfyUI leaves it when it
takes away what a pack's object patch had put in its place. Nobody misses that. A seat that does what the class's method does,
and more only where this pack needs it (`as_class`), replaces nothing either.
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

_lock = threading.Lock()
_AS_CLASS = "native_int8_as_class"


class Seat(NamedTuple):
    """One attribute: the dictionary of the instance, the name, and what stands there during a run."""

    attributes: dict
    name: str
    value: object


def is_replaced(attributes: dict, name: str) -> bool:
    """Whether an instance, given by its dictionary, has something else under `name` than its class's own method."""
    if name not in attributes:
        return False
    method = attributes[name]
    if getattr(method, _AS_CLASS, False):
        return False
    owner = getattr(method, "__self__", None)
    own = getattr(owner, "__dict__", None) is attributes and method.__func__ is getattr(type(owner), name, None)
    return not own


def as_class(function: Callable) -> Callable:
    """Mark a seat that may stand for the class's own method, and return it."""
    setattr(function, _AS_CLASS, True)
    return function


class Seats:
    """The seats of one model.

    groups: seats that mean something only together. Of a group, those before the first that another pack holds are taken.
    """

    def __init__(self, groups: Iterable[tuple[Seat, ...]]):
        self.groups = list(groups)
        self.users = 0

    def enter(self, reasons: Counter[str]) -> None:
        """Take the seats for one more thread; `reasons` counts the groups that another pack is in the way of."""
        with _lock:
            self.users += 1
            for group in self.groups:
                for attributes, name, value in group:
                    if attributes.setdefault(name, value) is value:
                        continue
                    if is_replaced(attributes, name):
                        reasons[f"another pack replaced {name}"] += 1
                        break
                    attributes[name] = value

    def leave(self) -> None:
        """Give the seats back when no other thread needs them."""
        with _lock:
            self.users -= 1
            if self.users:
                return
            for group in self.groups:
                for attributes, name, value in group:
                    if attributes.get(name) is value:
                        del attributes[name]


class PerModel:
    """What `make` made of a diffusion model, made once and forgotten with the model; `made` must not keep the model alive."""

    def __init__(self, make: Callable[[torch.nn.Module], object]):
        self._make = make
        self._made: weakref.WeakKeyDictionary[torch.nn.Module, object] = weakref.WeakKeyDictionary()

    def __call__(self, diffusion_model: torch.nn.Module):
        """Return it for `diffusion_model`; a compiled model has the real one inside."""
        diffusion_model = getattr(diffusion_model, "_orig_mod", diffusion_model)
        found = self._made.get(diffusion_model)
        if found is None:
            found = self._made[diffusion_model] = self._make(diffusion_model)
        return found

    def forget(self, diffusion_model: torch.nn.Module) -> None:
        """Make it anew the next time."""
        self._made.pop(diffusion_model, None)
