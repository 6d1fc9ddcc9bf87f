"""Which implementation of an op runs, and why the others do not.

An op has a few implementations ("triton", "torch"). Each answers one question from static facts, before
any kernel runs: `declines(device, facts)` is None, or one sentence for a person. The first that does not
decline is chosen; the sentences of the others are kept in the `Choice`, so that logs, nodes and the audit
can show them. Nothing here looks at M, the number of rows: it changes from call to call and only picks a
tile (tiles.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from .capability import Device

INPUT_ACTS = (None, "gelu_tanh", "swiglu")
ROTATION_GROUPS = (4, 16, 64, 256, 1024)


class Int8Error(Exception):
    """Base of every error that kernels/ raises on purpose."""


class UnsupportedInput(Int8Error, ValueError):
    """An argument has a shape, dtype or value that the op does not define."""


class NoImplementation(Int8Error, RuntimeError):
    """No implementation can run the op on this device; the message lists each reason."""


@dataclass(frozen=True)
class LinearFacts:
    """What is known about one Linear for as long as it lives.

    in_features: K. out_features: N. rotation_group: 0 or the group size of the grouped Hadamard rotation.
    input_act: None, "gelu_tanh" or "swiglu", applied to the input before it is quantised.
    """

    in_features: int
    out_features: int
    rotation_group: int = 0
    input_act: str | None = None


@dataclass(frozen=True)
class Implementation:
    """One way to run an op. `declines` returns None when it can, else one sentence."""

    name: str
    declines: Callable[[Device, LinearFacts | None], str | None]


@dataclass(frozen=True)
class Choice:
    """The outcome of `choose`: the implementation's name and why each other one was passed over."""

    implementation: str
    declined: tuple[tuple[str, str], ...] = ()

    def sentence(self) -> str:
        """One line for a log or a node, for example "triton" or "torch (triton: needs ...)"."""
        if not self.declined:
            return self.implementation
        return f"{self.implementation} ({'; '.join(f'{name}: {reason}' for name, reason in self.declined)})"


def check_facts(facts: LinearFacts) -> None:
    """Raise UnsupportedInput when the rotation group or the activation is not one that the ops define."""
    group = facts.rotation_group
    if group and (group not in ROTATION_GROUPS or facts.in_features % group):
        raise UnsupportedInput(
            f"int8_linear: rotation group {group} does not fit in_features {facts.in_features}. "
            f"Needed: one of {ROTATION_GROUPS} that divides in_features, or 0 for none. "
            "Load the layer without rotation or quantise it again with a group that divides it."
        )
    if facts.input_act not in INPUT_ACTS:
        raise UnsupportedInput(
            f"int8_linear: input_act is {facts.input_act!r}. Needed: one of {INPUT_ACTS}. "
            "Apply the activation before the call."
        )


def _torch_declines(device: Device, facts: LinearFacts | None) -> str | None:
    return None


def _triton_declines(device: Device, facts: LinearFacts | None) -> str | None:
    from .compiled import interpreted

    if device.triton is None:
        return f"Triton is not usable: {device.triton_missing}"
    if device.type == "cpu" and interpreted():
        return None
    if device.type != "cuda" or device.hip:
        return f"needs an NVIDIA GPU; this is {device.name}"
    if device.compute_capability is None or device.compute_capability < (8, 0):
        return f"needs compute capability 8.0 or newer (RTX 30 series); {device.name} is {device.sm}"
    return None


TRITON = Implementation("triton", _triton_declines)
TORCH = Implementation("torch", _torch_declines)


def implementations() -> tuple[Implementation, ...]:
    """Every implementation there is, fastest first."""
    return (TRITON, TORCH)


def preference(device: Device) -> tuple[Implementation, ...]:
    """Implementations in the order in which they are tried. On a CPU Triton only exists as an interpreter,
    which is there for tests, so torch comes first."""
    return (TRITON, TORCH) if device.type == "cuda" else (TORCH, TRITON)


@functools.lru_cache(maxsize=4096)
def choose_for(device: Device, facts: LinearFacts, implementation: str | None = None) -> Choice:
    """Choose for one Linear on one device; cached, so that a layer pays a dictionary lookup per call.

    Raises NoImplementation when all decline, or when the one asked for by name does.
    """
    check_facts(facts)
    declined: list[tuple[str, str]] = []
    for candidate in preference(device):
        if implementation is not None and candidate.name != implementation:
            continue
        reason = candidate.declines(device, facts)
        if reason is None:
            return Choice(candidate.name, tuple(declined))
        declined.append((candidate.name, reason))
    reasons = "; ".join(f"{name}: {reason}" for name, reason in declined) or f"there is no {implementation!r}"
    raise NoImplementation(
        f"int8_linear cannot run on {device.name} ({device.sm}): {reasons}. "
        "Needed: one of triton, torch. Load the model without INT8 or use another device."
    )


def choose(
    device: Device,
    *,
    in_features: int,
    out_features: int,
    rotation_group: int = 0,
    input_act: str | None = None,
    implementation: str | None = None,
) -> Choice:
    """Which implementation a Linear of this shape uses on `device`, with the reasons of those passed over.

    Args:
        device: from capability.detect or capability.device_from.
        in_features, out_features: K and N of the weight [N, K].
        rotation_group: 0, 4, 16, 64, 256 or 1024.
        input_act: None, "gelu_tanh" or "swiglu".
        implementation: a name, to ask for exactly that one.
    Raises:
        UnsupportedInput: a rotation group that does not divide in_features, or an unknown activation.
        NoImplementation: nothing can run it, or the named one cannot.
    """
    return choose_for(device, LinearFacts(in_features, out_features, rotation_group, input_act), implementation)
