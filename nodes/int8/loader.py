"""File or state dict -> MODEL whose block Linears are INT8.

The state dict is turned into the host's native INT8 format, one layer at a time, and given to the host's own loader.
Everything after that (LoRA, offload, saving, compile) is the host's. The tensors of a file come from a memory map, so a
float weight takes memory only while its layer is quantised.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...kernels.capability import detect as detect_device
from . import cache, formats, host_backend, policy, quantize, shards, transfer
from .checkpoint import CheckpointError, Header, header_of, part_names
from .policy import Decision
from .report import REPORT_KEY, LoadReport

log = logging.getLogger("native_int8.loader")

# metadata of a model, and of the files saved from it, whose row scales were searched
SCALE_SEARCH = "native_int8_scale_search"
_EXTENSIONS = (".safetensors", ".sft")


@dataclass(frozen=True)
class LoadOptions:
    """How to load. All fields are plain values, so the host can load the same MODEL again.

    rotation: rotate the weights that are quantised here (ConvRot); "auto" is the same as True. A file that is INT8
        already keeps what it has.
    protect, force: patterns of layers to keep in float, or to quantise against the rule; see `policy.plan`.
    device: where weights are quantised, for instance "cpu"; None for the device that runs the model.
    branch: which model of a file that holds two: "auto" (the conditional one), "conditional" or "unconditional".
    mse: search the scales of quantised rows for the least squared error; takes about ten times as long.
    cache: keep the result of a conversion as a native file and load that the next time; see `cache`.
    """

    rotation: bool | str = True
    protect: str = ""
    force: str = ""
    device: str | None = None
    branch: str = "auto"
    mse: bool = False
    cache: bool = False


def load_model(path: str, options: LoadOptions | None = None, disable_dynamic: bool = False):
    """Load a diffusion transformer as an INT8 MODEL that runs on our kernels.

    Args:
        path: a safetensors file: INT8 of any maker in `formats`, bf16, fp16, fp32, fp8 with or without scales; or GGUF.
        disable_dynamic: the host asks for a ModelPatcher without dynamic VRAM.
    Returns:
        ModelPatcher; its report is under `get_attachment(REPORT_KEY)`.
    Raises:
        CheckpointError: the file is damaged, of another kind, or in a format that is not read.
    """
    options = options or LoadOptions()
    if formats.is_gguf(path):
        header, state = formats.read_gguf(path)
    else:
        header = shards.read_header(path)
        if not path.lower().endswith((*_EXTENSIONS, shards.INDEX)):
            raise CheckpointError(
                f"{path}: a safetensors file under another extension. {' or '.join(_EXTENSIONS)} is needed; rename it."
            )
        # the host's memory map also feeds its dynamic VRAM straight from the file
        state = open_all(path)
    state = {name: state[header.key(name)] for name in header.tensors}
    model, report = _build(header, state, options, None, disable_dynamic, share=True)
    model.cached_patcher_init = (load_model, (path, options))
    host_backend.attach(model)
    model.set_attachments(REPORT_KEY, report)
    return model


def load_state_dict(
    sd: dict[str, torch.Tensor],
    metadata: dict[str, str] | None = None,
    options: LoadOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
    disable_dynamic: bool = False,
):
    """Build an INT8 MODEL from tensors, which stay as they are.

    Args:
        sd: checkpoint key -> tensor on any device, under any of the known prefixes.
        metadata: of the file the tensors came from.
        progress: called with (layers done, layers in all); None for the host's progress bar.
    Returns:
        (ModelPatcher, LoadReport). Neither `cached_patcher_init` nor our kernels are set: the caller knows the source.
    Raises:
        CheckpointError: as `load_model`.
    """
    header = header_of(sd, metadata)
    state = {name: sd[header.key(name)] for name in header.tensors}
    return _build(header, state, options or LoadOptions(), progress, disable_dynamic, share=False)


def describe(model) -> LoadReport:
    """The report of a MODEL that is INT8 already: of its own load, else from its modules."""
    from comfy.quant_ops import QuantizedTensor

    report = model.get_attachment(REPORT_KEY)
    if report is not None:
        return report
    specs = {}
    for layer, module in model.model.diffusion_model.named_modules():
        weight = getattr(module, "weight", None)
        if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
            continue
        shape = tuple(weight.shape)
        if isinstance(weight, QuantizedTensor) and weight._qdata.dtype == torch.int8:
            params = weight._params
            group = params.convrot_groupsize if getattr(params, "convrot", False) else 0
            specs[layer] = formats.LayerSpec(
                "int8",
                formats.NATIVE,
                "I8",
                shape,
                f"{layer}.weight",
                rotation_group=group,
                per_row=params.scale.numel() > 1,
            )
        else:
            specs[layer] = formats.LayerSpec("float", "bf16", str(weight.dtype), shape, f"{layer}.weight")
    return LoadReport(tuple(policy.plan(specs)), "a MODEL that was INT8 already", detect_device(model.load_device).sm)


def _open(path: str) -> dict[str, torch.Tensor]:
    import comfy.utils

    try:
        return comfy.utils.load_torch_file(path)
    except (RuntimeError, ValueError, OSError) as error:
        raise CheckpointError(
            f"{path}: incomplete or not a safetensors file: {error}. A whole safetensors file is needed; download it again."
        ) from error


def open_all(path: str) -> dict[str, torch.Tensor]:
    """Key -> tensor of the memory map, of a model in one or several files."""
    state: dict[str, torch.Tensor] = {}
    for file in shards.files_of(path):
        state.update(_open(file))
    return state


@torch.no_grad()
def _build(header: Header, state: dict, options: LoadOptions, progress, disable_dynamic: bool, share: bool):
    """Plan, convert and load.

    state: name without prefix -> tensor; used up.
    share: the host may keep the tensors themselves (they belong to a memory map); else it gets copies.
    """
    import comfy.sd

    start = time.perf_counter()
    check_host()
    if options.rotation not in (True, False, "auto"):
        raise ValueError(f"rotation is {options.rotation!r}; True, False or 'auto' is needed.")
    header, state, notes = _one_branch(header, state, options.branch)
    doubts: Counter = Counter()
    specs = formats.detect(header, state.__getitem__, doubts)
    layout, state = _host_layout(header, state, specs)
    if layout is not header:
        header, specs = layout, formats.detect(layout, state.__getitem__)
    notes += [*formats.sentences(doubts), *formats.name_notes(header, specs)]
    notes += formats.rotation_notes(specs, state.__getitem__)
    decisions = policy.plan(specs, rotation=bool(options.rotation), protect=options.protect, force=options.force)
    metadata = {k: v for k, v in header.metadata.items() if k != formats.METADATA}
    if options.mse and any(d.is_int8 and d.action != "adopt" for d in decisions):
        metadata[SCALE_SEARCH] = "least squared error"
    native = None
    if options.cache and share and any(d.is_int8 and d.action != "adopt" for d in decisions):
        source = dict(state)
        native, more = cache.fetch(
            header,
            options,
            lambda sink: convert(specs, decisions, source, options, progress, True, sink),
            _open,
            metadata,
        )
        notes += more
    if native is None:
        native = convert(specs, decisions, state, options, progress, share)
    model = comfy.sd.load_diffusion_model_state_dict(native, metadata=metadata, disable_dynamic=disable_dynamic)
    if model is None:
        raise _unknown_model(header)
    notes += [*_verify(model, decisions), *_rest_notes(header)]
    device = detect_device(model.load_device).sm
    seconds = time.perf_counter() - start
    report = LoadReport(tuple(decisions), source_line(decisions), device, tuple(notes), seconds, metadata)
    log.info("%s: %s; %s (%.1f s)", os.path.basename(header.path), report.source_line, report.summary(), report.seconds)
    for reason, count in report.kept_reasons().items():
        log.info("kept in float: %d layers: %s", count, reason)
    for note in notes:
        log.warning("%s", note)
    return model, report


def check_host() -> None:
    """Raises: RuntimeError when this ComfyUI is older than the native INT8 format."""
    from comfy.quant_ops import QUANT_ALGOS

    if formats.NATIVE not in QUANT_ALGOS:
        raise RuntimeError(
            f"This ComfyUI does not know the format {formats.NATIVE} (it knows {', '.join(QUANT_ALGOS)}). ComfyUI 0.30.0 "
            "or newer with its comfy-kitchen is needed; update ComfyUI and install its requirements.txt."
        )


def _one_branch(header: Header, state: dict, branch: str) -> tuple[Header, dict, list[str]]:
    """Of a file with a conditional and an unconditional model, the one to load, and notes."""
    chosen, notes = formats.choose_branch(header, branch)
    word = chosen.prefix.removeprefix(header.prefix)
    return chosen, {name: state[word + name] for name in chosen.tensors}, notes


def as_float(state: dict, specs: dict) -> dict:
    """What the host's detector looks at: names and shapes as in a float file, whatever the layout of the codes."""
    view = dict(state)
    for layer, spec in specs.items():
        stored = view[spec.weight]
        if spec.weight != f"{layer}.weight" or tuple(stored.shape) != spec.shape:
            del view[spec.weight]
            view[f"{layer}.weight"] = torch.empty(spec.shape, dtype=torch.bfloat16, device="meta")
    return view


def _host_layout(header: Header, state: dict, specs: dict) -> tuple[Header, dict]:
    """Check that the host knows the model; a diffusers file is turned to the host's names before it is quantised.

    Raises:
        CheckpointError: the host knows no such diffusion model.
    """
    from comfy import model_detection

    try:
        view = as_float(state, specs)
        if model_detection.model_config_from_unet(view, "", metadata=header.metadata) is not None:
            return header, state
        converted = None
        if all(spec.kind in ("float", "fp8_scaled") for spec in specs.values()):
            converted = model_detection.convert_diffusers_mmdit(dict(state), "")
        if converted and model_detection.model_config_from_unet(dict(converted), "") is not None:
            renamed = header_of(converted, header.metadata, header.path)
            return renamed, {name: converted[renamed.key(name)] for name in renamed.tensors}
    except (KeyError, IndexError, AttributeError) as error:
        # the host's detector reads keys that a model of this kind always has
        raise CheckpointError(
            f"{header.path}: part of a diffusion model: {error} was looked for and is not there. A file with the whole "
            "model is needed; if it is one of several parts, join them, else download it again."
        ) from error
    raise _unknown_model(header)


_LOOKS_LIKE = (
    ((".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".lokr_w1", ".hada_w1"), "a LoRA; load it with a LoRA loader"),
    (("control_model.", "controlnet_", "zero_convs."), "a ControlNet; load it with Load ControlNet Model"),
    (("decoder.conv_in.", "encoder.conv_in.", "decoder.up_blocks.", "post_quant_conv."), "a VAE; load it with Load VAE"),
    (("embed_tokens.", "text_model.", "encoder.block.", "lm_head.", "word_embeddings."), "a text encoder; use Load Text Encoder (Native INT8)"),
)  # fmt: skip


def _unknown_model(header: Header) -> CheckpointError:
    kind = next(
        (kind for marks, kind in _LOOKS_LIKE if any(mark in name for name in header.tensors for mark in marks)),
        "no model this ComfyUI knows, or a part of one; join the parts of a split file, or update ComfyUI if the model is new",
    )
    return CheckpointError(
        f"{header.path}: not recognised as a diffusion model: its parts are {', '.join(part_names(header.tensors))}. "
        f"A diffusion transformer is needed; this looks like {kind}."
    )


def convert(
    specs: dict, decisions: list[Decision], state: dict, options: LoadOptions, progress, share: bool, native=None
) -> dict[str, torch.Tensor]:
    """The native state dict, one layer at a time; `state` loses each tensor as it is used.

    native: takes the tensors as a dict does; None for a new dict.
    """
    import comfy.model_management
    import comfy.utils

    device = torch.device(options.device) if options.device else comfy.model_management.get_torch_device()
    work = [d for d in decisions if d.is_int8]
    _make_room(work, device)
    if progress is None:
        bar = comfy.utils.ProgressBar(max(len(work), 1))
        progress = bar.update_absolute
    native = {} if native is None else native
    mover = transfer.mover(device)
    for done, decision in enumerate(work):
        comfy.model_management.throw_exception_if_processing_interrupted()
        native.update(quantize.native_layer(decision, state.pop, device, share, options.mse, mover))
        progress(done + 1, len(work))
    for layer, spec in specs.items():
        if spec.weight in state:
            native[f"{layer}.weight"] = quantize.kept_layer(spec, state.pop, share)
        for name in spec.names():
            state.pop(name, None)
    for name in [name for name in state if name not in formats.FILE_MARKERS and not name.endswith(formats.MARKER)]:
        tensor = state.pop(name)
        value = quantize.kept(tensor)
        native[name] = value.clone() if value is tensor and not share else value
    return native


def _make_room(work: list[Decision], device: torch.device) -> None:
    """Ask the host for GPU memory for two layers in float32 with their rotation."""
    import comfy.model_management

    layers = [d for d in work if d.action != "adopt"]
    if device.type != "cpu" and layers:
        largest = max(d.shape[0] * d.shape[1] for d in layers)
        comfy.model_management.free_memory(4 * largest * 4, device)


def _verify(model, decisions: list[Decision]) -> list[str]:
    """Check that the host took every INT8 weight as INT8; codes read as floats would be noise without an error.

    Returns:
        notes on layers that the model lacks, and on Linears that the file lacks.
    Raises:
        CheckpointError: a module holds INT8 codes as plain numbers.
    """
    from comfy.quant_ops import QuantizedTensor

    modules = dict(model.model.diffusion_model.named_modules())
    int8 = [d for d in decisions if d.is_int8]
    unknown = []
    for decision in int8:
        module = modules.get(decision.layer)
        if module is None:
            unknown.append(decision.layer)
        elif not isinstance(getattr(module, "weight", None), QuantizedTensor):
            raise CheckpointError(
                f"{decision.layer}.weight: the model's {type(module).__name__} did not take it as INT8. A Linear of "
                "ComfyUI's mixed precision operations is needed; keep this layer in float with the input `protect`, "
                "or update ComfyUI."
            )
    # the host renames the layers of some models as it loads them, so names alone do not prove that one is missing
    taken = sum(isinstance(getattr(module, "weight", None), QuantizedTensor) for module in modules.values())
    notes = []
    if taken < len(int8):
        notes.append(f"{len(int8) - taken} INT8 layers of the file are not part of this model, such as {unknown[0]}.")
    empty = [name for name, m in modules.items() if hasattr(m, "in_features") and getattr(m, "weight", None) is None]
    if empty:
        notes.append(
            f"{len(empty)} Linears of the model have no weight in the file, such as {empty[0]}: a run that needs one fails."
        )
    return notes


def _rest_notes(header: Header) -> list[str]:
    if not header.rest:
        return []
    return [
        f"{len(header.rest)} tensors of the file are not part of the diffusion model and were left out: "
        f"{', '.join(part_names(header.rest))}."
    ]


def source_line(decisions: list[Decision]) -> str:
    """What the stored layers were and what was done with them, as one line."""
    kinds: dict[str, int] = {}
    for d in decisions:
        if d.is_int8:
            kinds[d.spec.format] = kinds.get(d.spec.format, 0) + 1
    what = ", ".join(f"{count} {name}" for name, count in kinds.items()) or "no layer for INT8"
    groups = Counter(d.rotation_group for d in decisions if d.is_int8 and d.rotation_group)
    rotated = f"{sum(groups.values())} rotated"
    if groups:
        rotated += f" (by {', '.join(f'{group}: {groups[group]}' for group in sorted(groups, reverse=True))})"
    words = {"adopt": "adopted", "convert": "converted", "quantise": "quantised while loading"}
    done = " and ".join(word for action, word in words.items() if any(d.action == action for d in decisions)) or "kept"
    return f"{what}, {done}, {rotated}"
