"""What one call of a MODEL did, counted while it runs."""

from __future__ import annotations

from collections import Counter

from . import shared_rows


class Run:
    """What one call of one MODEL on one thread did; merged into the MODEL's record when it ends.

    calls: implementation -> Linears run from a seat. ways: way -> Linears. reasons: why Linears were not "resident".
    shared: the quantised rows that Linears share, and how many did. fused: architecture -> blocks that ran fused;
    unfused: why others did not -> blocks (fusion/registry.py). graphed: how calls of the model came by a CUDA graph;
    ungraphed: why others did not (cuda_graphs.py). facts: what is known of the values in tensors, by name.
    """

    __slots__ = ("calls", "facts", "fused", "graphed", "reasons", "shared", "unfused", "ungraphed", "ways")

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()
        self.unfused: Counter[str] = Counter()
        self.graphed: Counter[str] = Counter()
        self.ungraphed: Counter[str] = Counter()
        self.facts: dict[str, bool] = {}
        self.shared = shared_rows.SharedRows()

    def add(self, other: Run) -> None:
        """Add what Linears and blocks did in another run."""
        for name in ("calls", "ways", "reasons", "fused", "unfused"):
            getattr(self, name).update(getattr(other, name))
        self.shared.spared += other.shared.spared
