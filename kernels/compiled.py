"""What this process does with a jit function: compile it for a GPU, or interpret it on the CPU."""

from __future__ import annotations

import os

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def interpreted() -> bool:
    """True when Triton was told to interpret kernels in Python (tests on a machine without a GPU).

    Triton reads the variable when `@triton.jit` runs, so it must be set before a *_triton.py file is imported.
    """
    return os.environ.get(INTERPRET_VARIABLE, "0").lower() in ("1", "true", "on", "yes")
