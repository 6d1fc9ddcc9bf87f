"""Run a float MODEL and its INT8 twin one after the other and compare them; the work of INT8 Quality Report.

The float MODEL samples first. Some rows of what each Linear reads and writes go to the CPU on the way, together with the
points of the trajectory. Then only the INT8 MODEL is needed: its Linears get these rows, inside its own forward, so that
they run exactly as they do when it samples.
"""

import contextlib
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator

import torch

from ...kernels.dispatch import Int8Error
from . import quality, trajectory
from .quality import LayerQuality, QualityResult, StepQuality

log = logging.getLogger("native_int8.compare")

# CPU memory for activations; each captured forward gets its share
_CAPTURE_BYTES = 256 << 20
_LEAST_ROWS, _MOST_ROWS = 4, 64
_CAPTURED_STEPS = 3


class WrongModels(Int8Error, ValueError):
    """The two MODELs cannot be compared."""


class _Captured:
    """Rows of inputs and outputs by layer, taken while `active`."""

    def __init__(self, rows: int):
        self.rows, self.active = rows, False
        self.inputs: dict[str, list[torch.Tensor]] = defaultdict(list)
        self.outputs: dict[str, list[torch.Tensor]] = defaultdict(list)

    def hook(self, layer: str):
        """A forward hook for the float Linear `layer`."""

        def take(_, args, output):
            if self.active:
                for kept, tensor in ((self.inputs, args[0]), (self.outputs, output)):
                    flat = tensor.detach().reshape(-1, tensor.shape[-1])
                    picked = torch.linspace(0, len(flat) - 1, min(self.rows, len(flat)), device=flat.device).long()
                    kept[layer].append(flat[picked].cpu())

        return take


def linears(model) -> dict[str, torch.nn.Module]:
    """Name -> Linear of a MODEL's diffusion model."""
    inner = inner_of(model)
    return {name: module for name, module in inner.named_modules() if hasattr(module, "in_features")}


def int8_linears(model) -> dict[str, torch.nn.Module]:
    """Name -> Linear that holds the host's INT8 weight."""
    from comfy.quant_ops import QuantizedTensor

    found = {}
    for name, module in linears(model).items():
        weight = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and weight._qdata.dtype == torch.int8 and weight._qdata.dim() == 2:
            found[name] = module
    return found


def rotation_group(module: torch.nn.Module) -> int:
    """Columns per rotation of an INT8 Linear; 0 for none."""
    params = module.weight._params
    return int(params.convrot_groupsize) if getattr(params, "convrot", False) else 0


def compare(
    float_model,
    int8_model,
    positive: list,
    negative: list | None,
    latent: dict,
    *,
    seed: int,
    steps: int,
    cfg: float,
    progress: Callable[[int, int], None],
) -> QualityResult:
    """Compare layers and steps along one trajectory of `steps` Euler steps; three forwards a step in all.

    Args:
        progress: called with (forwards done, forwards in all) after each; may raise to stop.
    Raises:
        WrongModels: the first MODEL is INT8, the second is not, or they are not of one class.
    """
    targets = _checked(float_model, int8_model)
    total, done = 3 * steps - 1, 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    captured = _Captured(_rows_each(targets, cfg))
    track, final = _float_run(
        float_model, targets, captured, positive, negative, latent, seed, steps, cfg, count
    )  # fmt: skip
    layers, rows, final8 = _int8_run(
        int8_model, targets, captured, track, positive, negative, latent, seed, steps, cfg, count
    )  # fmt: skip
    unseen = [name for name in targets if name not in captured.inputs]
    notes = []
    if unseen:
        notes.append(
            f"{len(unseen)} INT8 layers saw no input in these steps, for instance {unseen[0]}; they are not in the list."
        )
    return QualityResult(tuple(layers), tuple(rows), quality.cosine(_flat(final8), _flat(final)), notes=tuple(notes))


def _float_run(model, targets, captured, positive, negative, latent, seed, steps, cfg, count):
    """([(x, denoised) on the CPU for each step], final latent) of the float MODEL; fills `captured`."""
    chosen = {round(i * (steps - 1) / max(_CAPTURED_STEPS - 1, 1)) for i in range(_CAPTURED_STEPS)}
    track: list[tuple[torch.Tensor, torch.Tensor]] = []

    def loop(denoise, x, sigmas):
        for i in range(len(sigmas) - 1):
            captured.active = i in chosen
            denoised = denoise(x, sigmas[i])
            captured.active = False
            track.append((x.cpu(), denoised.cpu()))
            x = trajectory.euler(x, denoised, sigmas[i], sigmas[i + 1])
            count()
        return x

    modules = linears(model)
    with hooks(modules[name].register_forward_hook(captured.hook(name)) for name in targets):
        final = trajectory.run(model, loop, positive, negative, latent, seed=seed, steps=steps, cfg=cfg)
    return track, final


def _int8_run(model, targets, captured, track, positive, negative, latent, seed, steps, cfg, count):
    """(layers, steps, final latent) of the INT8 MODEL."""
    layers: list[LayerQuality] = []
    rows: list[StepQuality] = []

    def measure_layers(_, args) -> None:
        # once, in the first forward: there the weights are where they are when sampling, and our wrapper is active
        handle.remove()
        for name in list(captured.inputs):
            x = torch.cat(captured.inputs[name]).to(args[0].device, args[0].dtype)
            y = torch.cat(captured.outputs[name])
            shape = (y.shape[1], x.shape[1])
            y8 = targets[name](x).cpu()
            layers.append(quality.compare_layer(name, shape, rotation_group(targets[name]), y, y8))
            captured.inputs[name], captured.outputs[name] = [], []

    def loop(denoise, x, sigmas):
        for i in range(len(sigmas) - 1):
            float_x, float_x0 = track[i]
            path = own = denoise(x, sigmas[i])
            count()
            if i:
                own = denoise(float_x.to(x.device), sigmas[i])
                count()
            errors = (quality.relative_error(x0.cpu(), float_x0) for x0 in (own, path))
            rows.append(StepQuality(float(sigmas[i]), *errors))
            x = trajectory.euler(x, path, sigmas[i], sigmas[i + 1])
        return x

    handle = inner_of(model).register_forward_pre_hook(measure_layers)
    with hooks([handle]):
        final = trajectory.run(model, loop, positive, negative, latent, seed=seed, steps=steps, cfg=cfg)
    return layers, rows, final


def _checked(float_model, int8_model) -> dict[str, torch.nn.Module]:
    """The INT8 Linears that have a float twin, by name."""
    targets = int8_linears(int8_model)
    if not targets:
        raise WrongModels(
            "INT8 Quality Report: int8_model has no INT8 Linears. The MODEL of Load DiT (Native INT8) or INT8 Patch Model "
            "is needed there; connect it."
        )
    if int8_linears(float_model):
        raise WrongModels(
            "INT8 Quality Report: float_model has INT8 Linears. The same model in bf16, fp16, fp32 or fp8 is needed there; "
            "connect the MODEL of Load Diffusion Model."
        )
    twins = linears(float_model)
    shapes = {
        name: (module.out_features, module.in_features)
        for name, module in targets.items()
        if name in twins
        and (twins[name].out_features, twins[name].in_features) == (module.out_features, module.in_features)
    }
    if len(shapes) < len(targets):
        missing = next(name for name in targets if name not in shapes)
        raise WrongModels(
            f"INT8 Quality Report: {len(targets) - len(shapes)} of {len(targets)} INT8 layers have no float layer of their "
            f"name and shape, for instance {missing}. Both MODELs must be the same model; connect its float file."
        )
    return targets


def _rows_each(targets: dict[str, torch.nn.Module], cfg: float) -> int:
    """Rows that one captured forward may keep of each layer."""
    row_bytes = 4 * sum(module.in_features + module.out_features for module in targets.values())
    forwards = _CAPTURED_STEPS * (1 if cfg == 1 else 2)
    return max(_LEAST_ROWS, min(_MOST_ROWS, _CAPTURE_BYTES // (row_bytes * forwards)))


def inner_of(model) -> torch.nn.Module:
    """The diffusion model of a MODEL; a compiled one has the real one inside."""
    outer = model.get_model_object("diffusion_model")
    return getattr(outer, "_orig_mod", outer)


def _flat(latent) -> torch.Tensor:
    parts = latent.unbind() if getattr(latent, "is_nested", False) else [latent]
    return torch.cat([part.flatten() for part in parts])


@contextlib.contextmanager
def hooks(handles) -> Iterator[None]:
    """Remove the hooks at the end, however it comes."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
