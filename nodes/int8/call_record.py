"""What really ran: how one MODEL's INT8 Linears went, counted and in words."""

import logging
import threading
from collections import Counter

from . import short_way

log = logging.getLogger("native_int8.call_record")


class CallRecord:
    """How often each implementation ran for one MODEL and its clones, and which calls were declined and why.

    ways, reasons: which way Linears took, and why not the shortest; see short_way.py.
    spared, not_shared: Linears that took the quantised rows of another, and why others of a known class could not; see
    shared_rows.py.
    fused, unfused: blocks that ran fused by architecture, and why others did not; see fusion/registry.py.
    graphed, ungraphed: forwards by a CUDA graph and how, and why others were not; see cuda_graphs.py.
    """

    def __init__(self):
        self.calls: Counter[str] = Counter()
        self.declined: Counter[str] = Counter()
        self.ways: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.not_shared: Counter[str] = Counter()
        self.fused: Counter[str] = Counter()
        self.unfused: Counter[str] = Counter()
        self.graphed: Counter[str] = Counter()
        self.ungraphed: Counter[str] = Counter()
        self.spared = 0
        self._runs = 0
        self._lock = threading.Lock()

    def add_call(self, implementation: str) -> None:
        """Count one linear that ran on `implementation`."""
        with self._lock:
            self.calls[implementation] += 1

    def add_declined(self, reason: str) -> None:
        """Count one linear that went to another backend of the host, and log the first of each reason."""
        with self._lock:
            self.declined[reason] += 1
            first = self.declined[reason] == 1
        if first:
            log.warning("A linear runs on the host's own INT8 backend: %s.", reason)

    def add_run(self, run: short_way.Run) -> None:
        """Add what one call of the MODEL did on the short way; the first is logged in words."""
        with self._lock:
            new = run.reasons.keys() - self.reasons.keys()
            self.calls.update(run.calls)
            self.ways.update(run.ways)
            self.reasons.update(run.reasons)
            self.not_shared.update(run.shared.not_shared)
            self.fused.update(run.fused)
            self.unfused.update(run.unfused)
            self.graphed.update(run.graphed)
            self.ungraphed.update(run.ungraphed)
            self.spared += run.shared.spared
            self._runs += 1
            first = self._runs == 1
        for reason in new:
            log.debug("A linear does not take the shortest way: %s.", reason)
        if first:
            log.info("First run: %s", self.sentence())

    def ways_taken(self) -> dict[str, dict[str, int]]:
        """Return {"ways": {"resident" | "fetched" | "general": Linears}, "reasons": {why not "resident": Linears}}."""
        with self._lock:
            return {"ways": dict(self.ways), "reasons": dict(self.reasons)}

    def rows_shared(self) -> dict[str, int | dict[str, int]]:
        """Return {"quantised": inputs quantised, "spared": Linears that needed not, "not_shared": {why: Linears}}."""
        with self._lock:
            quantised = sum(self.calls.values()) - self.spared
            return {"quantised": quantised, "spared": self.spared, "not_shared": dict(self.not_shared)}

    def blocks_fused(self) -> dict[str, dict[str, int]]:
        """Return {"fused": {architecture: blocks}, "unfused": {why: blocks}}."""
        with self._lock:
            return {"fused": dict(self.fused), "unfused": dict(self.unfused)}

    def by_graph(self) -> dict[str, dict[str, int]]:
        """Return {"graphed": {"replayed" | "recorded" | "first of its kind": forwards}, "ungraphed": {why: forwards}}."""
        with self._lock:
            return {"graphed": dict(self.graphed), "ungraphed": dict(self.ungraphed)}

    def snapshot(self) -> dict[str, dict[str, int]]:
        """Return both counters as plain dictionaries: {"calls": {...}, "declined": {...}}."""
        with self._lock:
            return {"calls": dict(self.calls), "declined": dict(self.declined)}

    def sentence(self) -> str:
        """The counters in words: implementations, declined calls, ways with their reasons, and shared rows."""
        counts = self.snapshot() | self.ways_taken()
        shared = self.rows_shared()
        parts = [f"INT8 Linears run: {_listed(counts['calls']) or 'none'}"]
        if counts["declined"]:
            parts.append(f"left to the host's own backend: {_listed(counts['declined'])}")
        if counts["ways"]:
            parts.append(f"way: {_listed(counts['ways'])}")
        if counts["reasons"]:
            parts.append(f"not resident because: {_listed(counts['reasons'])}")
        parts.append(
            f"{shared['spared']} of {shared['quantised'] + shared['spared']} quantisations spared, since Linears of one "
            "attention or feed-forward read the same rows"
            if shared["spared"]
            else "no rows shared between Linears"
        )
        if shared["not_shared"]:
            parts.append(f"each for itself: {_listed(shared['not_shared'])}")
        blocks = self.blocks_fused()
        if blocks["fused"]:
            parts.append(f"blocks fused: {_listed(blocks['fused'])}")
        if blocks["unfused"]:
            parts.append(f"not fused: {_listed(blocks['unfused'])}")
        graphs = self.by_graph()
        if graphs["graphed"]:
            parts.append(f"CUDA graphs: {_listed(graphs['graphed'])}")
        if graphs["ungraphed"]:
            parts.append(f"without CUDA graph: {_listed(graphs['ungraphed'])}")
        return "; ".join(parts) + "."

    def reset(self) -> None:
        """Set all counters to nothing."""
        with self._lock:
            for counter in (
                self.calls, self.declined, self.ways, self.reasons, self.not_shared, self.fused, self.unfused,
                self.graphed, self.ungraphed,
            ):  # fmt: skip
                counter.clear()
            self.spared = 0


def _listed(counter: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counter.items()))
