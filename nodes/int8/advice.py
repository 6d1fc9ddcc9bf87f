"""The text of the capability check: this card, which path each layer takes, what to expect, what is missing.

Pure functions from a `Device` and its `Surroundings` to text, so that a test can ask about any card.
"""

from collections.abc import Sequence

from ...kernels.capability import CONSUMER, DATA_CENTRE, PROFESSIONAL, Device
from ...kernels.dispatch import Int8Error, choose
from .attention import Attention
from .attention import lines as attention_lines
from .deployment import outlook
from .surroundings import Surroundings, missing

GIB = 1024**3

# One Linear of each kind that a diffusion transformer has: label, K, N, rotation group, input activation.
LAYER_KINDS = (
    ("Attention and feed-forward Linears", 4608, 13824, 0, None),
    ("The same with ConvRot rotation", 4608, 13824, 256, None),
    ("Feed-forward output after SwiGLU", 12288, 4608, 0, "swiglu"),
)
FLOAT_LAYERS = (
    "Embedders, time, modulation, final layers: stay in the file's float type, because they are small, "
    "run on one row, or set the quality of the whole picture."
)

_MARKETS = {CONSUMER: "consumer", PROFESSIONAL: "professional", DATA_CENTRE: "data-centre", None: "market unknown"}


def headline(device: Device) -> str:
    """One line: name, architecture, market, and whether it is consumer Ampere."""
    kind = [device.sm]
    if device.type == "cuda":
        kind += [device.family.capitalize() if device.family else "unknown family", _MARKETS[device.market]]
    verdict = "consumer Ampere" if device.is_consumer_ampere else "not consumer Ampere"
    return f"{device.name} ({', '.join(kind)}): {verdict}"


def layer_paths(device: Device) -> list[tuple[str, str]]:
    """For each kind of layer its label and one sentence with the path that it takes and why."""
    paths = []
    for label, in_features, out_features, rotation_group, input_act in LAYER_KINDS:
        try:
            choice = choose(
                device,
                in_features=in_features,
                out_features=out_features,
                rotation_group=rotation_group,
                input_act=input_act,
            )
        except Int8Error as error:
            paths.append((label, f"no INT8: {error}"))
            continue
        reasons = "".join(f"; not {name}: {reason}" for name, reason in choice.declined)
        paths.append((label, _path(choice.implementation, device) + reasons))
    return paths


def _path(implementation: str, device: Device) -> str:
    if implementation == "triton":
        return "fused INT8 kernel (Triton)"
    if implementation == "torch" and device.type == "cuda":
        return "torch._int_mm with scales and bias as separate passes"
    return "plain torch, right but not fast" if implementation == "torch" else implementation


def report(
    device: Device,
    around: Surroundings,
    measured: Sequence[str] = (),
    others: Sequence[tuple[str, Device]] = (),
    attention: Attention | None = None,
) -> str:
    """The whole report as plain text of about 30 short lines.

    Args:
        measured: lines of `card_speed.measure`, if it ran.
        others: name and facts of the machine's GPUs that do not run this graph, such as ("cuda:1", Device).
        attention: what ComfyUI chose; None when it was not asked.
    """
    expected = outlook(device)
    lacking = missing(device, around)
    lines = [headline(device), expected.verdict]
    if measured:
        lines += ["", "Measured now", *measured]
    lines += ["", "Missing" if lacking else "Missing: nothing"]
    for entry in lacking:
        lines += [f"- {entry.what}: {entry.why}", f"    {entry.command}"]
    paths = layer_paths(device)
    if len({path for _, path in paths}) == 1:
        paths = [("Attention and feed-forward Linears, with or without ConvRot", paths[0][1])]
    lines += ["", "Path of each kind of layer", *(f"- {label}: {path}" for label, path in paths), f"- {FLOAT_LAYERS}"]
    lines += ["", "What to expect", f"- {expected.why}"]
    lines += [f"- {claim.text} [{claim.evidence}: {claim.source}]" for claim in expected.claims]
    if device.is_mig_slice:
        lines.append("- This is a MIG slice: times grow as its share of the card shrinks, ratios stay.")
    chosen = attention_lines(device, around, attention or Attention())
    if chosen:
        lines += ["", "Attention", *(f"- {line}" for line in chosen)]
    if others:
        lines += ["", "Other GPUs of this machine"]
        lines += [f"- {name}: {headline(other)}. {outlook(other).verdict}" for name, other in others]
    lines += ["", "Machine", *(f"- {line}" for line in _machine(device, around))]
    return "\n".join(lines)


def _machine(device: Device, around: Surroundings) -> list[str]:
    hardware = []
    if device.memory_bytes is not None:
        hardware.append(f"{device.memory_bytes / GIB:.1f} GiB")
    if device.multiprocessors is not None:
        hardware.append(f"{device.multiprocessors} multiprocessors")
    if device.shared_memory_per_block_bytes is not None:
        hardware.append(f"{device.shared_memory_per_block_bytes // 1024} KB shared memory a block")
    hardware.append(f"int8 tensor cores: {'yes' if device.int8_tensor_cores else 'no'}")
    runtime = f"ROCm {device.hip}" if device.hip else f"CUDA {device.cuda or 'none'}"
    lines = [
        ", ".join(hardware),
        f"driver {device.driver or 'none'}, torch {device.torch or 'unknown'}, {runtime}, {device.platform}",
        f"Triton {device.triton}" if device.triton else device.triton_missing or "Triton: none",
    ]
    if around.kitchen is not None:
        states = ", ".join(f"{name} {state}" for name, state in around.backends)
        lines.append(f"comfy-kitchen {around.kitchen}; its backends: {states or 'none'}")
    return lines
