"""Result files -> the bars with pass or FAIL, tables, and a plot.

    python tests/bench/summary.py FILES [--plot results/h200.png] [--write]

Any set of files that this bench writes, told apart by what is in them: run.py (native and sm80), random_shapes.py,
sanitize.sh and ideogram4_forward.py. What no file covers is listed as not run. --write puts the text into this folder's
README.md, and exits with 1 when a bar fails. Only --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from pages import replace_section, table

LARGE_M = 2048
SHARED_LIMIT = 99 * 1024
# two medians closer than this are the same speed
NOISE = 1.02
HOST_LIMIT_US = 60.0
FORWARD_LIMIT_MS = 76.0
CONTESTANTS = (
    "bf16", "fp16_acc", "fp8_dynamic", "int_mm_eager", "fake_int8", "kitchen_cuda", "kitchen_cuda_rot", "kitchen_triton",
    "kitchen_triton_rot", "ours", "ours_rot",
)  # fmt: skip


def geometric_mean(values: list[float]) -> float:
    product = 1.0
    for value in values:
        product *= value ** (1 / len(values))
    return product


def name_of(row: dict) -> str:
    return f"{row['m']}x{row['k']}x{row['n']}" + ("+b" if row["bias"] else "")


def us(row: dict, name: str) -> float | None:
    """Median microseconds of a contestant in a row, None when it did not run."""
    values = row.get("us", {}).get(name)
    return values[0] if values else None


class Ratios:
    """time of `slow` over time of `fast` per shape; above 1 means that `fast` wins."""

    def __init__(self, rows: list[dict], slow: str, fast: str):
        self.of = [(us(row, slow) / us(row, fast), row) for row in rows if us(row, slow) and us(row, fast)]

    @property
    def mean(self) -> float:
        return geometric_mean([ratio for ratio, _ in self.of])

    def worst(self, count: int = 3) -> list[tuple[float, dict]]:
        return sorted(self.of, key=lambda pair: pair[0])[:count]

    def below(self, limit: float) -> int:
        return sum(ratio < limit for ratio, _ in self.of)


class Bars:
    """Rows of the table of bars."""

    def __init__(self):
        self.rows: list[list[str]] = []
        self.failed = 0

    def add(self, number: str, text: str, measured: str, passed: bool | None) -> None:
        """passed None: not run."""
        self.failed += passed is False
        self.rows.append(
            [number, text, measured.replace("|", "/"), {True: "pass", False: "**FAIL**", None: "not run"}[passed]]
        )

    def ratios(self, number: str, text: str, ratios: Ratios, mean: float | None, each: float | None) -> None:
        """A bar on the geometric mean and one on every shape."""
        if not ratios.of:
            self.add(number, text, "", None)
            return
        if mean is not None:
            value = ratios.mean
            self.add(
                number, f"{text}: geometric mean >= {mean}", f"{value:.3f} over {len(ratios.of)} shapes", value >= mean
            )
        if each is not None:
            worst = ", ".join(f"{ratio:.2f} at {name_of(row)}" for ratio, row in ratios.worst())
            below = ratios.below(each)
            self.add(
                number, f"{text}: every shape >= {each}", f"{below} of {len(ratios.of)} below; worst {worst}", not below
            )


def load(paths: list[str]) -> dict[str, dict]:
    """Kind -> content. Kinds: linear:PATH, kitchen_triton:PATH, random:PATH, sanitize:PATH, forward."""
    found: dict[str, dict] = {}
    for path in paths:
        content = json.loads(Path(path).read_text())
        label = content.get("path") or content.get("machine", {}).get("path", "native")
        if "cases" in content:
            tuned = any("kitchen_triton" in row.get("us", {}) for row in content["cases"])
            kind = f"{'kitchen_triton' if tuned else 'linear'}:{label}"
        elif "comparisons" in content:
            kind = f"random:{label}"
        elif "forward_ms" in content:
            kind = "forward"
        elif content.keys() & {"memcheck", "racecheck", "state"}:
            kind = f"sanitize:{label}"
        else:
            raise SystemExit(f"summary.py: {path} is no result of this bench. Give only files that its programs wrote.")
        if kind in found:
            raise SystemExit(f"summary.py: {path} is a second {kind} result. Give one file of each kind.")
        found[kind] = content
    return found


def large(content: dict | None, planned: bool) -> list[dict]:
    """Timed rows of M >= 2048; `planned` only those of layers that the pack makes INT8."""
    rows = content["cases"] if content else []
    return [row for row in rows if row["m"] >= LARGE_M and "us" in row and (row["planned"] or not planned)]


def judge(found: dict[str, dict]) -> Bars:
    """Every bar that a GPU run can settle."""
    bars = Bars()
    native, ampere = found.get("linear:native"), found.get("linear:sm80")
    for content, label in ((native, "native"), (ampere, "sm80")):
        if content:
            wrong = [name_of(row) for row in content["cases"] if row["wrong"]]
            right = f"{len(content['cases']) - len(wrong)} of {len(content['cases'])} shapes right"
            bars.add("0", f"{label}: output bit for bit", ", ".join([right, *wrong[:3]]), not wrong)
    for planned, which in ((False, "all shapes"), (True, "layers that become INT8")):
        rows = large(native, planned)
        bars.ratios("1", f"native, {which}: over bf16", Ratios(rows, "bf16", "ours"), 1.5, 1.25)
        bars.ratios("1", f"native, {which}: over kitchen CUDA", Ratios(rows, "kitchen_cuda", "ours"), 1.5, 1.35)
        rotated = Ratios(rows, "ours_rot", "ours")
        if rotated.of:
            over = [(ratio, row) for ratio, row in rotated.of if ratio > 1.04]
            worst = ", ".join(f"{ratio:.3f} at {name_of(row)}" for ratio, row in sorted(over, key=lambda p: -p[0])[:3])
            bars.add(
                "1",
                f"native, {which}: ConvRot 256 costs <= 4 %, geometric mean",
                f"{rotated.mean - 1:+.1%}",
                rotated.mean <= 1.04,
            )
            bars.add(
                "1", f"native, {which}: ConvRot 256 costs <= 4 %, every shape", f"{len(over)} above; {worst}", not over
            )
        against = Ratios(rows, "kitchen_cuda_rot", "ours_rot")
        bars.ratios("1", f"native, {which}: ConvRot over kitchen CUDA ConvRot", against, 1.5, None)
    for planned, which in ((False, "all shapes"), (True, "layers that become INT8")):
        rows = large(ampere, planned)
        bars.ratios("2", f"sm80, {which}: over kitchen CUDA", Ratios(rows, "kitchen_cuda", "ours"), 1.08, 1.0)
    if ampere:
        most = max(row["shared_bytes"] for row in ampere["cases"])
        bars.add("2", "sm80: shared memory <= 99 KB", f"{most / 1024:.0f} KB", most <= SHARED_LIMIT)
    copy = Ratios(large(native, False), "copy", "ours_quantise")
    bars.ratios("3", "row quantisation, share of the copy's speed", copy, None, 0.8)
    checks(found, bars)
    never_slower(native, bars)
    host(found, native, bars)
    return bars


def checks(found: dict[str, dict], bars: Bars) -> None:
    """Bar 5: sanitizer and random shapes."""
    for label in ("native", "sm80"):
        content = found.get(f"sanitize:{label}", {})
        for tool in ("memcheck", "racecheck"):
            text = content.get(tool) or content.get("state", "")
            passed = None if not text or "cannot run" in text or "not installed" in text else text.startswith("clean")
            bars.add("5", f"{label}: compute-sanitizer {tool}", text, passed)
        content = found.get(f"random:{label}")
        if content is None:
            bars.add("5", f"{label}: 2,000 random shapes", "", None)
            continue
        text = (
            f"{content['done']} of {content['asked']} done, {len(content['wrong'])} differences, seed {content['seed']}"
        )
        passed = not content["wrong"] and content["done"] >= 2000
        bars.add("5", f"{label}: 2,000 random shapes", text, passed)


def never_slower(native: dict | None, bars: Bars) -> None:
    """Bar 6, over the layers that become INT8; the others run in bf16 by construction."""
    rows = [row for row in native["cases"] if row["planned"] and "us" in row] if native else []
    ratios = Ratios(rows, "bf16", "ours")
    if not ratios.of:
        bars.add("6", "never slower than bf16", "", None)
        return
    slower = ratios.below(1 / NOISE)
    worst = ", ".join(f"{ratio:.2f} at {name_of(row)}" for ratio, row in ratios.worst())
    text = f"{slower} of {len(ratios.of)} slower (M from {min(row['m'] for row in rows)}); worst {worst}"
    bars.add("6", "layers that become INT8: never slower than bf16", text, not slower)


def host(found: dict[str, dict], native: dict | None, bars: Bars) -> None:
    """Bar 7: host time of the short way, and the forward."""
    median = {}
    for name in ("bf16", "ours", "ours_prepared"):
        values = sorted(row["us"][name][3] for row in (native or {"cases": []})["cases"] if us(row, name))
        median[name] = values[len(values) // 2] if values else None
    if median["bf16"] is not None and median["ours_prepared"] is not None:
        more = median["ours_prepared"] - median["bf16"]
        text = (
            f"{more:+.0f} us: F.linear {median['bf16']:.0f}, int8_linear {median['ours']:.0f}, "
            f"PreparedLinear {median['ours_prepared']:.0f}"
        )
        bars.add(
            "7", f"host time of the kernel call beyond F.linear <= {HOST_LIMIT_US:.0f} us", text, more <= HOST_LIMIT_US
        )
    else:
        bars.add("7", "host time of the kernel call beyond F.linear", "", None)
    forward = found.get("forward")
    if forward is None:
        bars.add("7", f"Ideogram 4 forward at 768 px <= {FORWARD_LIMIT_MS:.0f} ms", "", None)
        return
    for pixels, ms in forward["forward_ms"].items():
        text = f"ours {ms['ours']:.1f} ms, bf16 {ms['bf16']:.1f}, the host's own INT8 {ms['host']:.1f}"
        passed = ms["ours"] <= FORWARD_LIMIT_MS if pixels == "768" else ms["ours"] < min(ms["bf16"], ms["host"])
        limit = f"<= {FORWARD_LIMIT_MS:.0f} ms" if pixels == "768" else "faster than both others"
        bars.add("7", f"Ideogram 4 forward at {pixels} px {limit}", text, passed)


def with_tuned(content: dict, tuned: dict | None) -> list[dict]:
    """Rows of a run, with the Triton backend's times of its own run added where the shape is the same."""
    extra = {name_of(row): row for row in tuned["cases"]} if tuned else {}
    rows = []
    for row in content["cases"]:
        other = extra.get(name_of(row), {}).get("us", {})
        rows.append(
            row
            | {"us": row.get("us", {}) | {name: t for name, t in other.items() if name.startswith("kitchen_triton")}}
        )
    return rows


def times_table(content: dict, tuned: dict | None) -> str:
    """Microseconds of the large Linears of Ideogram 4, and every contestant's geometric mean over all large ones."""
    rows = with_tuned(content, tuned)
    shown = [
        r for r in rows if r["m"] >= LARGE_M and r["planned"] and any(u.startswith("ideogram4 ") for u in r["users"])
    ]
    names = [name for name in CONTESTANTS if any(us(row, name) for row in rows)]

    def cells(row: dict) -> list[str]:
        values = [us(row, name) for name in names]
        fastest = min((value for value in values if value), default=None)
        return ["" if v is None else f"**{v:.0f}**" if v == fastest else f"{v:.0f}" for v in values]

    body = [[name_of(row), *cells(row)] for row in shown]
    planned = [row for row in rows if row["m"] >= LARGE_M and row["planned"]]
    means = [Ratios(planned, "bf16", name) for name in names]
    body.append(["speed over bf16, all models", *[f"{r.mean:.2f} ({len(r.of)})" if r.of else "" for r in means]])
    return table(["M x K x N", *names], body)


def left_out(content: dict) -> str:
    """Who did not run, why, and on how many shapes."""
    reasons: dict[tuple[str, str], int] = {}
    for row in content["cases"]:
        for name, reason in row.get("left_out", {}).items():
            key = (name, reason.split(": K = ")[0])
            reasons[key] = reasons.get(key, 0) + 1
    return "\n".join(f"- {name}: {reason} ({count} shapes)" for (name, reason), count in sorted(reasons.items()))


def text(found: dict[str, dict], bars: Bars, plot: str | None) -> str:
    """The results as Markdown."""
    parts = []
    for kind, content in found.items():
        if "machine" in content:
            m = content["machine"]
            versions = (
                f"torch {m['torch']}, Triton {m['triton']}, comfy_kitchen {m['comfy_kitchen']}, driver {m['driver']}"
            )
            health = f"; bf16 TFLOPS before and after {content['bf16_tflops']}" if "bf16_tflops" in content else ""
            commit = (
                f", commit {content['commit']}, {content.get('date', '')}".rstrip(", ") if "commit" in content else ""
            )
            parts.append(f"- {kind}: {m['gpu']}, {versions}{commit}{health}")
    parts = [*(["\n".join(parts)] if parts else []), table(["bar", "what", "measured", ""], bars.rows, left=4)]
    for label in ("native", "sm80"):
        content = found.get(f"linear:{label}")
        if content:
            parts.append(f"Path {label}: median microseconds on the GPU, input quantisation included.")
            parts.append(times_table(content, found.get(f"kitchen_triton:{label}")))
            missing = left_out(content)
            if missing:
                parts.append(f"Not run there:\n\n{missing}")
    if plot:
        parts.append(f"![Speed over bf16 of every contestant on every large shape]({plot})")
    return "\n\n".join(parts)


def draw(found: dict[str, dict], path: str) -> None:
    """Speed over bf16 on every shape of M >= 2048 whose layer becomes INT8, smallest problem first; one panel a path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [(label, found[f"linear:{label}"]) for label in ("native", "sm80") if f"linear:{label}" in found]
    figure, axes = pyplot.subplots(len(shown), 1, figsize=(11, 4.2 * len(shown)), squeeze=False)
    names = {
        "ours": ("native_int8", "C3", "o"), "ours_rot": ("native_int8, ConvRot", "C1", "."),
        "kitchen_cuda": ("comfy_kitchen CUDA", "C0", "^"), "fp8_dynamic": ("fp8, row scales", "C2", "s"),
        "fp16_acc": ("fp16 accumulation", "C7", "+"), "int_mm_eager": ("torch._int_mm, eager", "C4", "x"),
        "fake_int8": ("fake INT8", "C5", "v"),
    }  # fmt: skip
    for axis, (label, content) in zip(axes[:, 0], shown, strict=True):
        rows = sorted(large(content, True), key=lambda row: row["m"] * row["k"] * row["n"])
        for name, (title, colour, marker) in names.items():
            points = [(at, us(row, "bf16") / us(row, name)) for at, row in enumerate(rows) if us(row, name)]
            if points:
                axis.plot(*zip(*points, strict=True), marker, color=colour, label=title, markersize=4, linestyle="none")
        axis.axhline(1, color="black", linewidth=0.8)
        axis.set_ylabel("times the speed of bf16")
        axis.set_xlabel("Linears of M >= 2048, by size")
        axis.set_title(f"{content['machine']['gpu']}, path {label}", fontsize=10)
        axis.grid(axis="y", linewidth=0.3)
        axis.legend(fontsize=8, ncol=4)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", help="result files")
    parser.add_argument("--plot", help="write a PNG here")
    parser.add_argument("--write", action="store_true", help="put the text into README.md beside this file")
    arguments = parser.parse_args()
    found = load(arguments.files)
    bars = judge(found)
    plot = None
    if arguments.plot and any(kind.startswith("linear:") for kind in found):
        draw(found, arguments.plot)
        plot = f"results/{Path(arguments.plot).name}"
    result = text(found, bars, plot)
    if arguments.write:
        replace_section(Path(__file__).with_name("README.md"), "results", result)
    else:
        print(result)
    return 1 if bars.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
