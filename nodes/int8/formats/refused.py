"""Relatives of INT8 that are recognised and not read, each with what to use instead."""

from .spec import BLOCKS, FP8_FORMATS, NATIVE, LayerSpec, Stored

_HOST = "use ComfyUI's own loader for this file, or the model's int8, fp8 or bf16 file here"
_OTHER = "use the model's int8, fp8 or bf16 file"
_ELSEWHERE = "use the loader of the tool that made it, or the model's int8, fp8 or bf16 file here"

READ = (NATIVE, BLOCKS, *FP8_FORMATS)
# names that a marker gives
NAMES = {
    "convrot_w4a4": _HOST,
    "asym_w4a8_int8": _HOST,
    "w6a8_int8": _OTHER,
    "nvfp4": _HOST,
    "mxfp8": _HOST,
    "svdquant_w4a4": _ELSEWHERE,
}
# tensors that give a format away when no marker does: (suffix beside the weight, name of the format, what to use)
SIGNS = (
    (".weight_s_rel", "asym_w4a8_int8 (4-bit weights)", _HOST),
    (".weight_s_channel", "asym_w4a8_int8 (4-bit weights)", _HOST),
    (".weight_scale_2", "nvfp4 (4-bit weights)", _HOST),
    (".weight.absmax", "bitsandbytes 4-bit (nf4 or fp4)", _ELSEWHERE),
    (".weight.quant_map", "bitsandbytes 4-bit (nf4 or fp4)", _ELSEWHERE),
    (".nbits", "SDNQ hqqsvd", _ELSEWHERE),
    (".wscales", "SVDQuant (4-bit weights)", _ELSEWHERE),
    (".qzeros", "GPTQ or AWQ (4-bit weights)", _ELSEWHERE),
)


def refuse(stored: Stored) -> LayerSpec | None:
    """Stop at a layer of a format that is not read; None for all others."""
    name = stored.format
    if name is not None and name not in READ:
        raise stored.stop(
            f"the marker names the format {name!r}",
            f"{NATIVE}, {BLOCKS}, {' or '.join(FP8_FORMATS)} is needed",
            NAMES.get(name, _OTHER) if isinstance(name, str) else _OTHER,
            ".comfy_quant",
        )
    for suffix, kind, todo in SIGNS:
        if stored.part(suffix) is not None and stored.weight.dtype in ("I8", "U8", "I32"):
            raise stored.stop(
                f"the tensor {suffix[1:]!r} beside it says that it is {kind}", "8-bit or float weights are needed", todo
            )
    return None
