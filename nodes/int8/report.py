"""What a load did, kept with the MODEL: every layer's decision, and one line for the node."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from .policy import Decision

# under this name the report is attached to the MODEL
REPORT_KEY = "native_int8_report"


@dataclass(frozen=True)
class LoadReport:
    """The decisions for all stored weights of a model and what a user should know of the load.

    source_line: what the file was and what was done with it.
    device_line: the architecture that the model will run on, for instance "sm_86" or "cpu".
    notes: sentences for the user; empty when all is well.
    metadata: of the file, without what describes its quantisation.
    """

    decisions: tuple[Decision, ...]
    source_line: str
    device_line: str
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def int8_layers(self) -> int:
        """Linears (and other weights) that are INT8 in the model."""
        return sum(d.is_int8 for d in self.decisions)

    @property
    def kept_layers(self) -> int:
        """Weights of two or more dimensions that are float in the model."""
        return len(self.decisions) - self.int8_layers

    @property
    def block_coverage(self) -> float:
        """The share of the weights (numbers, not layers) in repeated blocks that is INT8, 0 to 1."""
        inside = [(d.shape[0] * d.shape[1], d.is_int8) for d in self.decisions if d.in_block]
        total = sum(count for count, _ in inside)
        return sum(count for count, is_int8 in inside if is_int8) / total if total else 0.0

    def rotation_groups(self) -> dict[int, int]:
        """Group size (0 for none) -> number of INT8 layers."""
        return dict(sorted(Counter(d.rotation_group for d in self.decisions if d.is_int8).items(), reverse=True))

    def kept_reasons(self) -> dict[str, int]:
        """Reason -> number of layers that stay float for it, most frequent first."""
        return dict(Counter(d.reason for d in self.decisions if not d.is_int8).most_common())

    def summary(self) -> str:
        """One line: "204 layers INT8, 34 kept, kernel native_int8 on sm_86"."""
        line = f"{self.int8_layers} layers INT8, {self.kept_layers} kept, kernel native_int8 on {self.device_line}"
        return f"{line} ({len(self.notes)} notes in the log)" if self.notes else line

    def table(self) -> str:
        """Each layer on a line: name, N x K, action, rotation group and reason."""
        rows = [
            (d.layer, " x ".join(map(str, d.shape)), d.action, str(d.rotation_group or ""), d.reason)
            for d in self.decisions
        ]
        rows.insert(0, ("layer", "N x K", "action", "group", "reason"))
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        return "\n".join(
            "  ".join((*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4])) for row in rows
        )

    def with_notes(self, notes) -> "LoadReport":
        """A copy with further notes."""
        return replace(self, notes=(*self.notes, *notes))
