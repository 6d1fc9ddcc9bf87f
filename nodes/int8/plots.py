"""Panels -> one picture for a node's IMAGE output: by matplotlib where the host has it, else a plainer one by Pillow.

Both draw the same panels: `Bars` (lying, grouped), `Lines` and `Pictures`. Nothing global of matplotlib is touched: no
pyplot, no backend, no style.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

log = logging.getLogger("native_int8.plots")

WIDTH = 1000
DOTS_PER_INCH = 100
COLOURS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52")
_TITLE, _MARGIN, _ROW, _LINES_HEIGHT, _TICKS = 34, 16, 15, 300, 24


@dataclass(frozen=True)
class Bars:
    """Lying bars, one group for each label; NaN leaves a bar out.

    series: name -> one value for each label.
    """

    title: str
    labels: tuple[str, ...]
    series: Mapping[str, tuple[float, ...]]
    unit: str

    @property
    def height(self) -> int:
        """Pixels."""
        return _TITLE + len(self.labels) * (_ROW * len(self.series) + 9) + _TICKS + 2 * _MARGIN


@dataclass(frozen=True)
class Lines:
    """Curves over 1, 2, 3, ...; `log` makes the vertical axis logarithmic, without values that are not above 0."""

    title: str
    series: Mapping[str, tuple[float, ...]]
    x_label: str
    y_label: str
    log: bool = False

    @property
    def height(self) -> int:
        """Pixels."""
        return _LINES_HEIGHT


@dataclass(frozen=True)
class Pictures:
    """Pictures side by side under their names: [height, width, 3] floats in 0..1."""

    title: str
    pictures: Mapping[str, torch.Tensor]

    @property
    def height(self) -> int:
        """Pixels."""
        cell = WIDTH // max(len(self.pictures), 1) - 2 * _MARGIN
        return _TITLE + _TICKS + max(cell * p.shape[0] // p.shape[1] for p in self.pictures.values()) + 2 * _MARGIN


Panel = Bars | Lines | Pictures


def draw(panels: Sequence[Panel]) -> torch.Tensor:
    """[1, height, 1000, 3] float32 in 0..1 on the CPU, the panels below each other."""
    try:
        return draw_matplotlib(panels)
    except ImportError as error:
        log.info("matplotlib is not there (%s); the plot is drawn by Pillow", error)
        return draw_pillow(panels)


def draw_matplotlib(panels: Sequence[Panel]) -> torch.Tensor:
    """`draw` by matplotlib.

    Raises:
        ImportError: it is not installed, or broken.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [panel.height for panel in panels]
    figure = Figure((WIDTH / DOTS_PER_INCH, sum(heights) / DOTS_PER_INCH), DOTS_PER_INCH, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    parts = figure.subfigures(len(panels), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, panel in zip(parts, panels, strict=True):
        part.suptitle(panel.title, fontsize=11)
        if isinstance(panel, Pictures):
            for axes, (name, picture) in zip(
                part.subplots(1, len(panel.pictures), squeeze=False)[0], panel.pictures.items(), strict=True
            ):
                axes.imshow(_pixels(picture).numpy())
                axes.set_title(name, fontsize=9)
                axes.set_axis_off()
        elif isinstance(panel, Lines):
            _plot_lines(part.subplots(), panel)
        else:
            _plot_bars(part.subplots(), panel)
    canvas.draw()
    return _from_bytes(canvas.buffer_rgba().tobytes(), 4)


def _plot_lines(axes, panel: Lines) -> None:
    for colour, (name, values) in zip(COLOURS, panel.series.items(), strict=False):
        shown = [value if value > 0 or not panel.log else math.nan for value in values]
        axes.plot(range(1, len(values) + 1), shown, color=colour, label=name, marker="o", markersize=3)
    if panel.log:
        axes.set_yscale("log")
    axes.set_xlabel(panel.x_label, fontsize=9)
    axes.set_ylabel(panel.y_label, fontsize=9)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.3)
    if len(panel.series) > 1:
        axes.legend(fontsize=8)


def _plot_bars(axes, panel: Bars) -> None:
    thick = 0.8 / len(panel.series)
    for i, (colour, (name, values)) in enumerate(zip(COLOURS, panel.series.items(), strict=False)):
        places = [row + (i - (len(panel.series) - 1) / 2) * thick for row in range(len(panel.labels))]
        bars = axes.barh(places, values, thick, color=colour, label=name)
        axes.bar_label(bars, [_number(value) for value in values], fontsize=7, padding=2)
    axes.set_yticks(range(len(panel.labels)), panel.labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08)
    axes.set_xlabel(panel.unit, fontsize=9)
    axes.tick_params(axis="x", labelsize=8)
    if len(panel.series) > 1:
        axes.legend(fontsize=8)


def draw_pillow(panels: Sequence[Panel]) -> torch.Tensor:
    """`draw` by Pillow, which ComfyUI always has."""
    from PIL import Image, ImageDraw

    sheet = Image.new("RGB", (WIDTH, sum(panel.height for panel in panels)), "white")
    pen, top = ImageDraw.Draw(sheet), 0
    for panel in panels:
        pen.text((_MARGIN, top + 8), panel.title, fill="black")
        inside = (_MARGIN, top + _TITLE, WIDTH - _MARGIN, top + panel.height - _MARGIN)
        if isinstance(panel, Pictures):
            _paste_pictures(sheet, pen, inside, panel)
        elif isinstance(panel, Lines):
            _draw_lines(pen, inside, panel)
        else:
            _draw_bars(pen, inside, panel)
        top += panel.height
    return _from_bytes(sheet.tobytes(), 3)


def _paste_pictures(sheet, pen, inside: tuple[int, int, int, int], panel: Pictures) -> None:
    from PIL import Image

    left, top, _, _ = inside
    cell = WIDTH // len(panel.pictures) - 2 * _MARGIN
    for i, (name, picture) in enumerate(panel.pictures.items()):
        x = left + i * (cell + 2 * _MARGIN)
        pen.text((x, top), name, fill="black")
        size = (cell, cell * picture.shape[0] // picture.shape[1])
        sheet.paste(Image.fromarray(_pixels(picture).numpy()).resize(size), (x, top + _TICKS))


def _draw_lines(pen, inside: tuple[int, int, int, int], panel: Lines) -> None:
    left, top, right, bottom = inside
    left, top, bottom = left + 70, top + 18, bottom - _TICKS
    scaled = {
        name: [_height(value, panel.log) for value in values] for name, values in panel.series.items()
    }  # fmt: skip
    known = [value for values in scaled.values() for value in values if not math.isnan(value)] or [0.0]
    low, high = min(known), max(known)
    high = high if high > low else low + 1
    longest = max(len(values) for values in scaled.values())
    pen.rectangle((left, top, right, bottom), outline="#bbb")
    for end, y in ((low, bottom), (high, top)):
        pen.text((_MARGIN, y - 6), _number(10**end if panel.log else end), fill="black")
    pen.text((left, bottom + 8), f"{panel.x_label}, 1 to {longest}; upwards: {panel.y_label}", fill="black")
    for i, (name, values) in enumerate(scaled.items()):
        points = [
            (left + (right - left) * n / max(longest - 1, 1), bottom - (bottom - top) * (value - low) / (high - low))
            for n, value in enumerate(values)
            if not math.isnan(value)
        ]
        pen.line(points, fill=COLOURS[i % len(COLOURS)], width=2)
        pen.text((left + 8 + 260 * i, top - 16), name, fill=COLOURS[i % len(COLOURS)])


def _draw_bars(pen, inside: tuple[int, int, int, int], panel: Bars) -> None:
    left, top, right, _ = inside
    start = left + min(max(6 * max((len(label) for label in panel.labels), default=0), 60), 520)
    finite = [value for values in panel.series.values() for value in values if not math.isnan(value)]
    largest = max(finite, default=1.0) or 1.0
    y = top
    for row, label in enumerate(panel.labels):
        pen.text((left, y), label, fill="black")
        for i, values in enumerate(panel.series.values()):
            if not math.isnan(values[row]):
                end = start + max((right - start - 70) * values[row] / largest, 0)
                pen.rectangle((start, y + 1, end, y + _ROW - 3), fill=COLOURS[i % len(COLOURS)])
                pen.text((end + 4, y), _number(values[row]), fill="black")
            y += _ROW
        y += 9
    for i, name in enumerate(panel.series):
        pen.text((start + 170 * i, y), f"{name} ({panel.unit})", fill=COLOURS[i % len(COLOURS)])


def _height(value: float, log: bool) -> float:
    if not log:
        return value
    return math.log10(value) if value > 0 else math.nan


def _number(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def _pixels(picture: torch.Tensor) -> torch.Tensor:
    return picture.float().clamp(0, 1).mul(255).round().to(torch.uint8).cpu()


def _from_bytes(pixels: bytes, channels: int) -> torch.Tensor:
    """[1, height, WIDTH, 3] from rows of 8-bit pixels; an alpha channel is dropped."""
    values = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(1, -1, WIDTH, channels)
    return values[..., :3].float() / 255
