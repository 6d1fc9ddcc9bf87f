"""How each weight of a file is stored: which tensor holds the codes, which the scale, and what they mean.

One file per family; a format is a function in `detect.DETECTORS`, asked in order. Adding one is adding a function and a
line. The dtype of a weight is believed before its marker: an I8 weight is INT8 whatever a marker says.

spec         `LayerSpec`, and the words of files (tensorwise, convrot, comfy_quant), which are spelled nowhere else
native       codes by rows or tensor, of all makers: adopted as they are
converted    codes that mean something else: dequantised and quantised again
floats       fp8, fp16, bf16, fp32: quantised while loading
gguf         Q8_0
refused      relatives that are not read, and what to use instead
markers, branches, hints, dequantise
"""

from .branches import BRANCHES, choose_branch
from .dequantise import dequantise
from .detect import DETECTORS, detect, sentences
from .gguf import is_gguf, read_gguf
from .hints import name_notes, rotation_notes
from .spec import (
    DEFAULT_GROUP,
    FILE_MARKERS,
    INPUT_SCALE_SUFFIXES,
    MARKER,
    METADATA,
    NATIVE,
    SCALE_SUFFIXES,
    SCALED_FP8,
    LayerSpec,
)

__all__ = [
    "BRANCHES",
    "DEFAULT_GROUP",
    "DETECTORS",
    "FILE_MARKERS",
    "INPUT_SCALE_SUFFIXES",
    "MARKER",
    "METADATA",
    "NATIVE",
    "SCALED_FP8",
    "SCALE_SUFFIXES",
    "LayerSpec",
    "choose_branch",
    "dequantise",
    "detect",
    "is_gguf",
    "name_notes",
    "read_gguf",
    "rotation_notes",
    "sentences",
]
