"""How far an INT8 MODEL is from the float MODEL it stands for: layer by layer, step by step, and in pictures.

One layer: both see the same input x, taken from the float model while it samples.
    SQNR in dB = 10 log10(sum y^2 / sum (y - y8)^2),  cosine = y . y8 / (|y| |y8|)
One step: both see the same point of the float model's trajectory ("own"), or each its own trajectory from the same noise
("path"); the error is |x0 - x0_8| / |x0| of the denoised latents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch

from . import plots

# layers shown by name
WORST = 12
DIFFERENCE_GAIN = 8
# of the standard SSIM: window, its standard deviation, and the two constants for values in 0..1
_WINDOW, _DEVIATION, _C1, _C2 = 11, 1.5, 0.01**2, 0.03**2


@dataclass(frozen=True)
class LayerQuality:
    """One INT8 Linear against its float twin on `rows` rows of real activations."""

    layer: str
    shape: tuple[int, int]
    rotation_group: int
    sqnr_db: float
    cosine: float
    rows: int


@dataclass(frozen=True)
class StepQuality:
    """One step: relative errors of the denoised latent, from the float model's point and along its own path."""

    sigma: float
    own: float
    path: float


@dataclass(frozen=True)
class PictureQuality:
    """Two pictures: PSNR in dB (infinite for equal ones) and SSIM, and the pictures [height, width, 3] themselves."""

    psnr_db: float
    ssim: float
    a: torch.Tensor
    b: torch.Tensor


@dataclass(frozen=True)
class QualityResult:
    """What was measured. `notes` are sentences on what was not, and why."""

    layers: tuple[LayerQuality, ...]
    steps: tuple[StepQuality, ...]
    cosine: float
    picture: PictureQuality | None = None
    notes: tuple[str, ...] = field(default=())

    def sorted_layers(self) -> list[LayerQuality]:
        """The worst first."""
        return sorted(self.layers, key=lambda layer: layer.sqnr_db)

    def with_picture(self, picture: PictureQuality | None) -> QualityResult:
        """The same with a comparison of pictures."""
        return replace(self, picture=picture)

    def summary(self, protect_below_db: float) -> str:
        """The one or two lines that say it all."""
        lines = [f"final latent: cosine {self.cosine:.5f} to the float MODEL's"]
        ordered = self.sorted_layers()
        if ordered:
            worst, middle = ordered[0].sqnr_db, ordered[len(ordered) // 2].sqnr_db
            below = sum(layer.sqnr_db < protect_below_db for layer in ordered)
            lines.append(
                f"{len(ordered)} INT8 layers: worst {worst:.1f} dB, median {middle:.1f} dB; {below} below {protect_below_db:g} dB"
            )
        return "\n".join(lines)

    def report(self, protect_below_db: float) -> str:
        """The text for a person: totals, worst layers, steps, picture, notes."""
        ordered = self.sorted_layers()
        lines = [self.summary(protect_below_db)]
        if ordered:
            lines += ["", f"{'SQNR dB':>8} {'cosine':>9} {'N x K':>14} {'group':>6}  worst layers"]
            lines += [
                f"{q.sqnr_db:>8.2f} {q.cosine:>9.6f} {q.shape[0]:>6} x {q.shape[1]:<5} {q.rotation_group or '-':>6}  {q.layer}"
                for q in ordered[:WORST]
            ]
        lines += ["", f"{'step':>5} {'sigma':>9} {'own error':>10} {'path error':>11}"]
        lines += [
            f"{i:>5} {step.sigma:>9.4f} {step.own:>10.5f} {step.path:>11.5f}" for i, step in enumerate(self.steps, 1)
        ]
        lines.append("own: from the float MODEL's point; path: along its own trajectory; both relative")
        if self.picture is not None:
            lines += ["", f"pictures A and B: PSNR {self.picture.psnr_db:.2f} dB, SSIM {self.picture.ssim:.5f}"]
        return "\n".join([*lines, *(("", *self.notes) if self.notes else ())])

    def plot(self) -> torch.Tensor:
        """The picture for a person, [1, height, width, 3] in 0..1."""
        ordered = self.sorted_layers()
        panels: list[plots.Panel] = []
        if ordered:
            values = tuple(_finite(layer.sqnr_db) for layer in ordered)
            names = tuple(layer.layer for layer in ordered[:WORST])
            panels += [
                plots.Lines("SQNR of every INT8 layer, sorted", {"SQNR": values}, "layer", "SQNR in dB"),
                plots.Bars("The worst layers", names, {"SQNR": values[:WORST]}, "dB, more is better"),
            ]
        errors = {
            "own: from the float MODEL's point": tuple(step.own for step in self.steps),
            "path: its own trajectory": tuple(step.path for step in self.steps),
        }
        panels.append(plots.Lines("Error of the denoised latent", errors, "step", "relative error", log=True))
        if self.picture is not None:
            a, b = self.picture.a, self.picture.b
            named = {"A": a, "B": b, f"difference x {DIFFERENCE_GAIN}": (a - b).abs() * DIFFERENCE_GAIN}
            title = f"PSNR {self.picture.psnr_db:.2f} dB, SSIM {self.picture.ssim:.5f}"
            panels.append(plots.Pictures(title, named))
        return plots.draw(panels)


def compare_layer(layer: str, shape: tuple[int, int], group: int, y: torch.Tensor, y8: torch.Tensor) -> LayerQuality:
    """`LayerQuality` of outputs y of the float Linear and y8 of the INT8 one, both [rows, N]."""
    return LayerQuality(layer, shape, group, sqnr_db(y8, y), cosine(y8, y), y.shape[0])


def sqnr_db(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to quantisation noise in dB; infinite for equal tensors, NaN where a number is not finite."""
    got, expected = got.double(), expected.double()
    noise = float((got - expected).square().sum())
    signal = float(expected.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf if math.isfinite(noise) else math.nan


def cosine(a: torch.Tensor, b: torch.Tensor) -> float:
    """Cosine of the angle between two tensors of the same number of elements; 0 when one of them is all zeros."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()).clamp(min=1e-300))


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    """|got - expected| / |expected|, Euclidean."""
    got, expected = got.double(), expected.double()
    return float((got - expected).norm() / expected.norm().clamp(min=1e-300))


def compare_pictures(a: torch.Tensor, b: torch.Tensor) -> PictureQuality:
    """PSNR and SSIM of the first pictures of two batches [B, height, width, channels] in 0..1.

    Raises:
        ValueError: they differ in size.
    """
    a, b = a[0, ..., :3].float().cpu(), b[0, ..., :3].float().cpu()
    if a.shape != b.shape:
        raise ValueError(
            f"INT8 Quality Report got pictures of {a.shape[1]} x {a.shape[0]} and {b.shape[1]} x {b.shape[0]} pixels. "
            "Both must have the same size; decode both from latents of one size, without scaling one of them."
        )
    return PictureQuality(psnr_db(a, b), ssim(a, b), a, b)


def compare_both(a: torch.Tensor | None, b: torch.Tensor | None) -> PictureQuality | None:
    """`compare_pictures` of two pictures, None when there are none.

    Raises:
        ValueError: there is only one, or they differ in size.
    """
    if a is None and b is None:
        return None
    if a is None or b is None:
        given, missing = ("image_a", "image_b") if b is None else ("image_b", "image_a")
        raise ValueError(
            f"INT8 Quality Report got {given} without {missing}. Both or neither are needed; connect {missing} or take "
            f"{given} off."
        )
    return compare_pictures(a, b)


def psnr_db(a: torch.Tensor, b: torch.Tensor) -> float:
    """Peak signal to noise in dB for values in 0..1: -10 log10 of the mean squared difference."""
    error = float((a.double() - b.double()).square().mean())
    return math.inf if error == 0 else -10 * math.log10(error)


def ssim(a: torch.Tensor, b: torch.Tensor) -> float:
    """Mean structural similarity of two pictures [height, width, channels] in 0..1.

    Wang et al. 2004: Gaussian windows of 11 x 11 with standard deviation 1.5, only whole windows, channels averaged. A
    picture smaller than the window is one window of its own size.
    """
    x, y = (picture.double().permute(2, 0, 1).unsqueeze(1) for picture in (a, b))
    rows, columns = (_gaussian(min(_WINDOW, side)) for side in x.shape[-2:])
    window = (rows[:, None] * columns[None, :])[None, None]

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.conv2d(values, window)

    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = mean(x * x) - mean_x**2, mean(y * y) - mean_y**2
    covariance = mean(x * y) - mean_x * mean_y
    top = (2 * mean_x * mean_y + _C1) * (2 * covariance + _C2)
    return float((top / ((mean_x**2 + mean_y**2 + _C1) * (var_x + var_y + _C2))).mean())


def _gaussian(size: int) -> torch.Tensor:
    offsets = torch.arange(size, dtype=torch.float64) - (size - 1) / 2
    values = torch.exp(-offsets.square() / (2 * _DEVIATION**2))
    return values / values.sum()


def protect_list(layers: Sequence[LayerQuality], below_db: float, names: Iterable[str] = ()) -> str:
    """Layers below `below_db`, the worst first, as the text that the loader's `protect` takes.

    Args:
        names: of all weights of the model. A layer whose name is a part of another's is written as a pattern that only
            it matches.
    """
    known = {*names, *(layer.layer for layer in layers)}
    worst = sorted((layer for layer in layers if not layer.sqnr_db >= below_db), key=lambda layer: layer.sqnr_db)
    return ", ".join(_only(layer.layer, known) for layer in worst)


def _only(layer: str, known: set[str]) -> str:
    if any(layer in name and name != layer for name in known):
        return f"[{layer[0]}]{layer[1:]}"
    return layer


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.nan
