"""Text encoder files -> a CLIP whose block Linears are INT8 and are multiplied in INT8.

ComfyUI loads INT8 text encoders but does not run them in INT8: it computes text in float32, builds the encoder with
`full_precision_mm` and tells its patcher to force the cast of every weight to the type of the input. A weight that stands
for bfloat16 then no longer fits and is expanded to float32 at every call. Three things on this CLIP alone change that: its
INT8 Linears are taken out of full precision, its patcher no longer forces the cast, and its encoders enter our backend
while they run (APPLY_MODEL wrappers are never called for text). Nothing of the host's classes is touched.
"""

import logging
import os
import re
import time
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch

from ...kernels.capability import detect as detect_device
from . import formats, host_backend, loader, policy, shards
from .checkpoint import CheckpointError, Header, TensorInfo, dtype_name, part_names
from .policy import Decision
from .report import REPORT_KEY, LoadReport

log = logging.getLogger("native_int8.text_encoder")

ENTRANCES = ("forward", "generate")
# the host renames these while it loads, of a head the weight alone
_RENAMED = {"model.language_model.": "model.", "model.visual.": "visual.", "lm_head.": "model.lm_head."}
_NOT_TEXT = re.compile(r"(^|\.)(visual|vision\w*|audio\w*|multi_modal_projector)\.")
_CLIP_TEXT = ("text_model.", "transformer.resblocks.")


def load_text_encoder(
    paths: Sequence[str],
    clip_type: str = "stable_diffusion",
    device: str = "default",
    embedding_directory=None,
    model_options: dict | None = None,
    disable_dynamic: bool = False,
):
    """Load a text encoder, or the two of a model that has two, as a CLIP that runs INT8 on our kernels.

    Args:
        paths: one or two safetensors files: INT8 of the makers in `formats`, bf16, fp16, fp32, or fp8.
        clip_type: which model the text is for, in lower case as the stock CLIPLoader names it.
        device: "default", or "cpu" to quantise and run there.
        embedding_directory: folders of textual inversions.
        model_options: for the host, as `comfy.sd.load_clip` takes them.
        disable_dynamic: the host asks for a patcher without dynamic VRAM.
    Returns:
        comfy.sd.CLIP; its report is under `patcher.get_attachment(REPORT_KEY)`, its calls under
        `host_backend.record_of(clip.patcher)`.
    Raises:
        CheckpointError: a file is damaged, no text encoder, or in a format that is not read.
    """
    opened = [_open(str(path)) for path in paths]
    clip = _build(opened, clip_type, device, embedding_directory, model_options, disable_dynamic, share=True)
    clip.patcher.cached_patcher_init = (
        _load_patcher,
        (tuple(paths), clip_type, device, embedding_directory, model_options),
    )
    return clip


def load_state_dicts(
    states: Sequence[dict[str, torch.Tensor]],
    clip_type: str = "stable_diffusion",
    device: str = "default",
    model_options: dict | None = None,
):
    """Build a CLIP as `load_text_encoder` does, from tensors on any device, which stay as they are.

    Args:
        states: one or two of key -> tensor.
    """
    opened = []
    for state in states:
        tensors = {n: TensorInfo(dtype_name(t.dtype), tuple(t.shape), 0, 0) for n, t in state.items()}
        opened.append((Header("the state dict", tensors), dict(state)))
    return _build(opened, clip_type, device, None, model_options, False, share=False)


def _build(
    opened: list, clip_type: str, device: str, embedding_directory, model_options, disable_dynamic: bool, share: bool
):
    import comfy.sd

    start = time.perf_counter()
    loader.check_host()
    options = loader.LoadOptions(device="cpu" if device == "cpu" else None)
    states, decisions, notes = [], [], []
    for header, state in opened:
        native, of_file, more = _native(header, state, options, share, alone=len(opened) == 1)
        states.append(native)
        decisions += of_file
        notes += more
    # so that every encoder is built with the operations that know INT8; the host passes this on to some of them only
    of_host = {"quantization_metadata": {"mixed_ops": True}} if any(d.is_int8 for d in decisions) else {}
    if device == "cpu":
        of_host["load_device"] = of_host["offload_device"] = torch.device("cpu")
    clip = comfy.sd.load_text_encoder_state_dicts(
        states,
        embedding_directory=embedding_directory,
        clip_type=getattr(comfy.sd.CLIPType, clip_type.upper(), comfy.sd.CLIPType.STABLE_DIFFUSION),
        model_options={**(model_options or {}), **of_host},
        disable_dynamic=disable_dynamic,
    )
    notes += _verify(clip, decisions)
    attach(clip)
    sm = detect_device(clip.patcher.load_device).sm
    seconds = time.perf_counter() - start
    report = LoadReport(tuple(decisions), loader.source_line(decisions), sm, tuple(notes), seconds)
    clip.patcher.set_attachments(REPORT_KEY, report)
    names = " and ".join(os.path.basename(header.path) for header, _ in opened)
    log.info("%s: %s; %s (%.1f s)", names, report.source_line, report.summary(), seconds)
    for reason, count in report.kept_reasons().items():
        log.info("kept in float: %d layers: %s", count, reason)
    for note in notes:
        log.warning("%s", note)
    return clip


def attach(clip) -> None:
    """Let the INT8 Linears of `clip` (a comfy.sd.CLIP) be multiplied in INT8, on our kernels."""
    from comfy.sd1_clip import SDClipModel

    use = host_backend.enable(clip.patcher)
    clip.patcher.force_cast_weights = False
    for module in clip.cond_stage_model.modules():
        # a load before this left the forced cast on the modules
        if getattr(module, "comfy_force_cast_weights", False):
            module.comfy_force_cast_weights = False
        if _is_int8(module) and hasattr(module, "_full_precision_mm"):
            module._full_precision_mm = module._full_precision_mm_config
        if isinstance(module, SDClipModel):
            for name in ENTRANCES:
                _enter_at(module, name, use)


def _enter_at(module: torch.nn.Module, name: str, use) -> None:
    """Run the method `name` of this one encoder on our backend.

    The host calls `forward` for conditioning and `generate` for text; both also run the vision part of a prompt with pictures.
    """
    of_class = getattr(type(module), name)
    # the encoder must not keep itself alive: the host frees models by their reference count
    this = weakref.ref(module)

    def entered(*args, **kwargs):
        encoder = this()
        with use.running(encoder):
            return of_class(encoder, *args, **kwargs)

    setattr(module, name, entered)


def _load_patcher(*args, disable_dynamic: bool = False):
    """The patcher of a fresh CLIP; what the host calls to build this one again."""
    return load_text_encoder(*args, disable_dynamic=disable_dynamic).patcher


def plan(specs: dict[str, formats.LayerSpec]) -> list[Decision]:
    """`policy.plan` with rotation, and what is particular to text encoders.

    Of what would be quantised, float stay: everything outside the repeated blocks (token tables may be larger than any
    projection), the parts for pictures and sound, and CLIP's own text models.
    """
    return [_for_text(decision) for decision in policy.plan(specs)]


def _for_text(decision: Decision) -> Decision:
    reason = None
    if decision.action == "quantise":
        if _NOT_TEXT.search(decision.layer):
            reason = "a part for pictures or sound: used for few prompts"
        elif decision.layer.startswith(_CLIP_TEXT):
            reason = "a CLIP text model: 77 tokens of a small model, which gains nothing"
        elif not decision.in_block:
            reason = "outside the repeated blocks"
    return decision if reason is None else replace(decision, action="keep", reason=reason, rotation_group=0)


def _native(
    header: Header, state: dict, options: loader.LoadOptions, share: bool, alone: bool
) -> tuple[dict, list[Decision], list[str]]:
    """One file -> (state dict in the host's native format, decisions, notes); `state` is used up."""
    import comfy.sd

    doubts: Counter = Counter()
    specs = formats.detect(header, state.__getitem__, doubts)
    if alone and comfy.sd.detect_te_model(loader.as_float(state, specs)) is None:
        raise CheckpointError(
            f"{header.path}: not recognised as a text encoder: its parts are {', '.join(part_names(header.tensors))}. A text "
            "encoder that this ComfyUI knows is needed; load a diffusion model with Load DiT (Native INT8), and update "
            "ComfyUI if the encoder is new."
        )
    decisions = plan(specs)
    notes = formats.sentences(doubts) + formats.name_notes(header, specs)
    notes += formats.rotation_notes(specs, state.__getitem__)
    native = loader.convert(specs, decisions, state, options, None, share)
    # so that the scale of a head goes with its weight
    native = {_renamed(name) if name.startswith("lm_head.") else name: tensor for name, tensor in native.items()}
    return native, decisions, notes


def _open(path: str) -> tuple[Header, dict[str, torch.Tensor]]:
    """The header, under full names as the host knows text encoders, and the tensors of the memory map."""
    if formats.is_gguf(path):
        raise CheckpointError(
            f"{path}: a GGUF file. A safetensors file is needed for a text encoder; get the bf16, fp8 or INT8 file of it, "
            "or load this one with a GGUF loader."
        )
    tensors, metadata = shards.read_all(path)
    state = loader.open_all(path)
    return Header(path, tensors, metadata), {name: state[name] for name in tensors}


def _renamed(name: str) -> str:
    """The name that the host gives to a tensor or a layer of the file."""
    old = next((old for old in _RENAMED if name.startswith(old)), "")
    return _RENAMED.get(old, "") + name.removeprefix(old)


def _is_int8(module: torch.nn.Module) -> bool:
    from comfy.quant_ops import QuantizedTensor

    weight = getattr(module, "weight", None)
    return isinstance(weight, QuantizedTensor) and weight._qdata.dtype == torch.int8


def _verify(clip, decisions: list[Decision]) -> list[str]:
    """Check that the host took every INT8 weight as INT8; codes read as floats would be noise without an error.

    Returns:
        notes on INT8 layers that the encoder lacks, and on those that are not multiplied in INT8.
    Raises:
        CheckpointError: a module holds INT8 codes as plain numbers.
    """
    modules: dict[str, list[torch.nn.Module]] = {}
    for name, module in clip.cond_stage_model.named_modules():
        modules.setdefault(name.rpartition(".transformer.")[2], []).append(module)
    absent = []
    for decision in decisions:
        if not decision.is_int8:
            continue
        found = modules.get(decision.layer) or modules.get(_renamed(decision.layer))
        if found is None:
            absent.append(decision.layer)
        elif not any(map(_is_int8, found)):
            raise CheckpointError(
                f"{decision.layer}.weight: the encoder's {type(found[0]).__name__} did not take it as INT8. A Linear of "
                "ComfyUI's mixed precision operations is needed; load this file with the stock Load CLIP, or update ComfyUI."
            )
    notes = []
    if absent:
        notes.append(f"{len(absent)} INT8 layers of the file are not part of this encoder, such as {absent[0]}.")
    marked = [d.layer for d in decisions if d.action == "adopt" and d.spec.full_precision]
    if marked:
        notes.append(
            f"{len(marked)} INT8 layers are marked for full precision in the file, such as {marked[0]}: they are expanded at "
            "every call, as their maker chose."
        )
    return notes
