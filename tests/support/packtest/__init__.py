"""Support for tests and benches: load the pack by path under one name, as ComfyUI does."""

import importlib.util
import os
import sys
from pathlib import Path

NAME = "native_int8"
ROOT = Path(__file__).resolve().parents[3]


def load_pack():
    """Load the pack under NAME, whatever its folder is called, and return the module.

    Without a CUDA device Triton's interpreter is switched on, unless TRITON_INTERPRET is set already.
    """
    if NAME in sys.modules:
        return sys.modules[NAME]
    import torch

    if not torch.cuda.is_available():
        # read when @triton.jit runs, so it must be set before a kernel file is imported
        os.environ.setdefault("TRITON_INTERPRET", "1")
    spec = importlib.util.spec_from_file_location(NAME, ROOT / "__init__.py", submodule_search_locations=[str(ROOT)])
    pack = importlib.util.module_from_spec(spec)
    sys.modules[NAME] = pack
    spec.loader.exec_module(pack)
    return pack
