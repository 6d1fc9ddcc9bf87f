"""Which attention ComfyUI chose, and what would be faster on this card; attention itself stays ComfyUI's choice.

`look` reads this process; `lines` is pure, so a test can ask it about any card.
"""

import importlib
import importlib.util
import sys
from dataclasses import dataclass

from ...kernels.capability import Device
from .deployment import MODELLED, PUBLISHED, Claim
from .surroundings import Surroundings, pip_install

# names of the host's functions
PYTORCH, SAGE, FLASH, XFORMERS = "attention_pytorch", "attention_sage", "attention_flash", "attention_xformers"
# newer hosts have it
INT8 = "attention_comfy_kitchen_int8"
_NAMES = {
    PYTORCH: "PyTorch's own",
    SAGE: "SageAttention",
    FLASH: "FlashAttention",
    XFORMERS: "xformers",
    INT8: "comfy-kitchen's INT8 attention",
    "attention_sub_quad": "sub-quadratic",
    "attention_split": "split",
    "attention_basic": "basic",
}
_PACKAGES = {"sageattention": "sageattention", "flash_attn": "flash-attn", "xformers": "xformers"}
KITCHEN = "comfy-kitchen int8_attention"
OPTION = "--use-ck-attention"

_CHART = "SageAttention's chart for an RTX 3090, head size 128"
_TO_SAGE = Claim("attention at 126 to 136 TOPS where FlashAttention 2 does 62 to 71", PUBLISHED, _CHART)
_TO_PYTORCH = Claim("FlashAttention 2, which PyTorch contains, at 62 to 71 TOPS; xformers 43 to 47", PUBLISHED, _CHART)
_LESS_MEMORY = Claim("fewer passes over the scores", MODELLED, "how the functions work")
_INT8_STEP = Claim(
    "an Ideogram 4 step at 1024 px 1.25x faster with INT8 attention", MODELLED, "RTX 3090, 1.15 s to 0.92 s"
)
_SAGE_QUALITY = "it rounds q and k to INT8, which changes pictures a little"
_INT8_QUALITY = "it rounds q, k and v to INT8, which changes pictures a little"
_SAGE_HEADS = "Heads of 256, as Ideogram 4's, fall back to PyTorch with a line in the log each time."


@dataclass(frozen=True)
class Attention:
    """What this process has.

    Attributes:
        chosen: name of the host's function; None when the host was not asked.
        installed: packages by the names of pip, and KITCHEN where its kernel can run on this GPU.
        offered: attention functions that the host has registered for nodes, such as "sage".
        option: of the host's command line, for KITCHEN; None where the host has none.
    """

    chosen: str | None = None
    installed: tuple[str, ...] = ()
    offered: tuple[str, ...] = ()
    option: str | None = None


def look() -> Attention:
    """Read the facts of this process; ComfyUI must run in it."""
    module = importlib.import_module("comfy.ldm.modules.attention")
    installed = [pip for name, pip in _PACKAGES.items() if _is_installed(name)]
    # not imported for this: without it nothing here works, and that is told elsewhere
    available = getattr(sys.modules.get("comfy_kitchen"), "int8_attention_is_available", None)
    if available is not None and available():
        installed.append(KITCHEN)
    chosen = getattr(module, "optimized_attention", None)
    offered = tuple(getattr(module, "REGISTERED_ATTENTION_FUNCTIONS", ()))
    args = importlib.import_module("comfy.cli_args").args
    option = OPTION if hasattr(args, OPTION.removeprefix("--").replace("-", "_")) else None
    return Attention(getattr(chosen, "__name__", None), tuple(installed), offered, option)


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ValueError:
        # packs put empty modules of these names where there are none
        return False


def lines(device: Device, around: Surroundings, attention: Attention) -> list[str]:
    """What ComfyUI chose, what is installed, and what would be faster on `device`: one to four lines."""
    if attention.chosen is None:
        return []
    name = _NAMES.get(attention.chosen, attention.chosen)
    found = [f"ComfyUI uses {name}; installed besides: {', '.join(attention.installed) or 'nothing'}."]
    if device.type != "cuda" or device.hip is not None:
        return found
    advice = _to_pytorch(attention)
    if advice is None:
        advice = _to_sage(device, around, attention)
    if advice is not None:
        found.append(advice)
    if attention.chosen == SAGE:
        found.append(f"SageAttention: {_SAGE_QUALITY}. {_SAGE_HEADS}")
    elif attention.chosen == FLASH:
        found.append(
            "PyTorch's own attention contains FlashAttention 2: without this option it is as fast, and takes masks."
        )
    elif attention.chosen == INT8:
        found.append(f"INT8 attention: {_INT8_QUALITY}.")
    elif KITCHEN in attention.installed and device.is_consumer_ampere:
        found += _to_kitchen(attention)
    return found


def _to_kitchen(attention: Attention) -> list[str]:
    # a host that offers it has it among its attention functions
    if not any("int8" in name for name in attention.offered):
        return [f"{KITCHEN} is there, but this ComfyUI has no option for it: {_said(_INT8_STEP)}."]
    if attention.option is None:
        return []
    return [f"{KITCHEN}: start ComfyUI with {attention.option}: {_said(_INT8_STEP)}; {_INT8_QUALITY}."]


def _to_pytorch(attention: Attention) -> str | None:
    if attention.chosen in (PYTORCH, SAGE, FLASH, INT8) or attention.chosen not in _NAMES:
        return None
    claim = _TO_PYTORCH if attention.chosen == XFORMERS else _LESS_MEMORY
    return f"Faster here: start ComfyUI with --use-pytorch-cross-attention: {_said(claim)}."


def _to_sage(device: Device, around: Surroundings, attention: Attention) -> str | None:
    # pip's version runs on Triton, and a measurement is at hand for these cards only
    if attention.chosen != PYTORCH or not device.is_consumer_ampere or device.triton is None:
        return None
    option = "start ComfyUI with --use-sage-attention"
    if "sageattention" not in attention.installed:
        option = f"{pip_install(around, 'sageattention')}, then {option}"
    return f"Faster here: {option}: {_said(_TO_SAGE)}; {_SAGE_QUALITY}. {_SAGE_HEADS}"


def _said(claim: Claim) -> str:
    return f"{claim.text} [{claim.evidence}: {claim.source}]"
