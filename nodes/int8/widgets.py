"""Inputs that several nodes have: which layers become INT8, how they are quantised, and the size of a picture."""

from comfy_api.latest import io

from .speeds import FUSED, SPEEDS


def layers() -> list[io.Input]:
    """`protect` and `force`."""
    return [
        io.String.Input(
            "protect",
            default="",
            optional=True,
            advanced=True,
            tooltip="Layers to keep in float: parts of names or patterns with *, separated by commas, for instance "
            "*.feed_forward.w2. Better quality, more memory and time.",
        ),
        io.String.Input(
            "force",
            default="",
            optional=True,
            advanced=True,
            tooltip="Layers to quantise although their name or place would keep them in float: parts of names or "
            "patterns with *, separated by commas. Less memory, at a risk to quality.",
        ),
    ]


def scale_search() -> io.Input:
    """`scale_search`."""
    return io.Boolean.Input(
        "scale_search",
        default=False,
        optional=True,
        advanced=True,
        tooltip="Try ten smaller scales for each row of a weight and keep the one of least squared error. Measured: 1 to 3 % "
        "less squared error of the weights (0.1 dB), for about ten times the time of quantising on a CPU; no cost when "
        "sampling. Layers that are INT8 in the file already stay as they are.",
    )


def int8_speed() -> io.Input:
    """`int8_speed`."""
    return io.Combo.Input(
        "int8_speed",
        options=list(SPEEDS),
        default=FUSED,
        optional=True,
        advanced=True,
        tooltip="How much of each step runs on this pack's kernels. fused: INT8 Linears, and in models known for it the norms, "
        "modulations and activations around them in single passes, rounded as without; blocks that another pack patches "
        "run unfused. linear only: INT8 Linears alone. off: INT8 weights on ComfyUI's own kernels. Memory is the same. "
        "fused + CUDA graph: steps of one size are recorded and replayed without waiting for Python, for short steps on a "
        "fast card; takes more GPU memory (the node says how much) and all weights on the GPU, else it runs as fused.",
    )


def picture_size(effect: str) -> list[io.Input]:
    """`width` and `height` in pixels; `effect` is a sentence on what they change."""
    limits = {"default": 1024, "min": 64, "max": 16384, "step": 8}
    return [
        io.Int.Input("width", **limits, tooltip=f"Width of the picture in pixels. {effect}"),
        io.Int.Input("height", **limits, tooltip="Height of the picture in pixels."),
    ]
