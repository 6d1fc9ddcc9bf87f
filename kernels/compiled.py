"""What this process does with a jit function: compile it for a GPU, or interpret it on the CPU."""

from __future__ import annotations

import functools
import os
import re

INTERPRET_VARIABLE = "TRITON_INTERPRET"
ARCHITECTURE_VARIABLE = "TRITON_OVERRIDE_ARCH"


def interpreted() -> bool:
    """True when Triton was told to interpret kernels in Python (tests on a machine without a GPU).

    Triton reads the variable when `@triton.jit` runs, so it must be set before a *_triton.py file is imported.
    """
    return os.environ.get(INTERPRET_VARIABLE, "0").lower() in ("1", "true", "on", "yes")


@functools.lru_cache(maxsize=1)
def override_sm() -> int | None:
    """Architecture that Triton was told to compile for instead of the GPU's, as in 80; None when it was not."""
    found = re.fullmatch(r"sm_?(\d+)a?", os.environ.get(ARCHITECTURE_VARIABLE, ""))
    return int(found.group(1)) if found else None
