"""What the families of formats share: the description of a stored layer, names of keys, and clear refusals."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from ..checkpoint import CheckpointError, Header, TensorInfo

NATIVE = "int8_tensorwise"
BLOCKS = "int8_blockwise"
FP8_FORMATS = ("float8_e4m3fn", "float8_e5m2")
MARKER = ".comfy_quant"
METADATA = "_quantization_metadata"
# file-wide markers of older files; the dtypes of the weights say the same, and are right where these are not
SCALED_FP8 = "scaled_fp8"
FILE_MARKERS = (SCALED_FP8, "scaled_int8")
SCALE_SUFFIXES = (".weight_scale", ".scale_weight")
# scales whose names also occur in float models; they count beside whole-number weights only
INT8_SCALE_SUFFIXES = (".weight._scale", ".scale", ".ws", ".SCB")
# activation scales of calibration: rows are scaled when they are computed, so none of them is read
INPUT_SCALE_SUFFIXES = (".input_scale", ".scale_input", ".output_scale")
# other places of an INT8 weight than `<layer>.weight`
WEIGHT_SUFFIXES = (".weight", ".weight._data", ".wq", ".int8_weight")
DEFAULT_GROUP = 256


@dataclass(frozen=True)
class LayerSpec:
    """One stored weight.

    kind: "int8", "fp8_scaled", "gguf" (blocks of codes) or "float" (which covers fp8 without a scale).
    shape: of the weight as the model has it; [N, K] for a Linear, whatever the file's layout.
    weight, scale: names of the tensors that hold the codes or numbers and their scale.
    rotation_group: columns per rotated group, 0 when the rows are stored as they are.
    per_row: the scale holds one number for each of the N rows (else one for the tensor).
    extras: names of further tensors that belong to the layer and are used up with it.
    convert: why the codes cannot be used as they are; empty when they can.
    parts: (role, name) of tensors that `dequantise` needs beside weight and scale.
    transposed: the codes are stored as [K, N].
    scale_divisor: the scale is the stored number divided by this.
    sylvester: the rotation is by the Sylvester matrix, not by ConvRot's.
    """

    kind: str
    format: str
    dtype: str
    shape: tuple[int, ...]
    weight: str
    scale: str | None = None
    rotation_group: int = 0
    per_row: bool = False
    full_precision: bool = False
    extras: tuple[str, ...] = ()
    convert: str = ""
    parts: tuple[tuple[str, str], ...] = ()
    transposed: bool = False
    scale_divisor: float = 1.0
    sylvester: bool = False

    def names(self) -> tuple[str, ...]:
        """All tensors of the layer."""
        return (self.weight, *((self.scale,) if self.scale else ()), *self.extras)


@dataclass(frozen=True)
class Stored:
    """A layer as the detectors see it: `name` is the key of the weight, `notes` counts sentences for the user."""

    layer: str
    name: str
    weight: TensorInfo
    scale: str | None
    scale_info: TensorInfo | None
    marker: dict[str, Any] | None
    header: Header
    extras: tuple[str, ...] = ()
    notes: Counter = field(default_factory=Counter)

    def stop(self, got: str, needed: str, todo: str, suffix: str | None = None) -> CheckpointError:
        """An error that names the file and the tensor (the weight, or the layer's `suffix`)."""
        name = self.name if suffix is None else self.layer + suffix
        return CheckpointError(f"{self.header.path}: {self.header.key(name)}: {got}. {needed}; {todo}.")

    def option(self, *names: str) -> Any:
        """A marker field, at the top or inside `params`; None when absent."""
        marker = self.marker or {}
        params = marker.get("params")
        for place in (marker, params if isinstance(params, dict) else {}):
            for name in names:
                if name in place:
                    return place[name]
        return None

    @property
    def format(self) -> Any:
        """The format that the marker names; None when it names none."""
        return (self.marker or {}).get("format")

    def part(self, suffix: str) -> TensorInfo | None:
        """The layer's further tensor of this suffix."""
        return self.header.tensors.get(self.layer + suffix)

    def beside(self) -> str:
        """The layer's other tensors, for messages."""
        names = [n for n in self.header.tensors if n.startswith(self.layer + ".") and n != self.name]
        return ", ".join(names[:6]) or "nothing"

    def scale_suffix(self) -> str:
        """The suffix under which the scale was found."""
        return self.scale.removeprefix(self.layer) if self.scale else SCALE_SUFFIXES[0]
