"""INT8 codes by rows or by tensor: used as they are, whoever wrote them.

w = q * scale, q int8 [N, K], scale = absmax / 127 of the row or tensor, and where a marker says so the rows hold W H^T
(H: ConvRot's regular Hadamard matrix, by groups of columns). What differs between makers is where the scale is kept.

=====================  ==========================================================================
ComfyUI                `.weight_scale`, marker with `format`
INT8-Fast              `.weight_scale`, no marker or one without `format`; `quarot` also means ConvRot's matrix
ModelOpt, LightX2V     `.weight_scale` or `.scale_weight`, no marker, or a wrong one for fp8
quanto                 `.weight._data`, `.weight._scale`
SDNQ                   `.scale`, [1, N] beside codes that are stored as [K, N]
bitsandbytes           `.SCB`, the rows' absmax: scale = SCB / 127
Transformer Lab        `.wq`, `.ws`
=====================  ==========================================================================
"""

from ..checkpoint import FLOAT_DTYPES
from .spec import BLOCKS, DEFAULT_GROUP, FP8_FORMATS, INPUT_SCALE_SUFFIXES, NATIVE, LayerSpec, Stored

BIGGEST_GROUP = 1024


def int8(stored: Stored) -> LayerSpec | None:
    """INT8 rows (or a bank of experts, or a convolution's rows).

    Raises:
        CheckpointError: there is no scale, or a number of scales that fits no row, or a rotation that cannot be undone.
    """
    if stored.weight.dtype != "I8":
        return None
    check_scale_there(stored)
    if stored.format in FP8_FORMATS:
        stored.notes[f"an INT8 weight is marked as {stored.format}; the dtype is believed", stored.layer] += 1
    if stored.format == BLOCKS:
        stored.notes[
            "a weight with one scale per row is marked as block-wise; the scales are believed", stored.layer
        ] += 1
    shape, transposed = stored.weight.shape, is_transposed(stored)
    per_row = check_rows(stored, (shape[1], shape[0]) if transposed else shape)
    group, sylvester = rotation(stored)
    convolution = len(shape) == 4
    why = "a convolution" if convolution else "rotated by the Sylvester matrix" if sylvester else ""
    return LayerSpec(
        kind="int8",
        format=maker(stored),
        dtype="I8",
        shape=(shape[1], shape[0]) if transposed else shape,
        weight=stored.name,
        scale=stored.scale,
        rotation_group=group,
        per_row=per_row,
        full_precision=stored.option("full_precision_matrix_mult") is True,
        extras=stored.extras,
        convert=why,
        transposed=transposed,
        scale_divisor=127.0 if stored.scale_suffix() == ".SCB" else 1.0,
        sylvester=sylvester,
    )


def maker(stored: Stored) -> str:
    """What to call the format in messages."""
    if stored.format == NATIVE:
        return NATIVE
    if stored.marker is not None and stored.format is None:
        return "INT8-Fast"
    by_scale = {".weight._scale": "quanto", ".scale": "SDNQ", ".SCB": "bitsandbytes", ".ws": "Transformer Lab"}
    name = by_scale.get(stored.scale_suffix())
    if name:
        return name
    if stored.scale_suffix() == ".scale_weight":
        return "LightX2V or older scaled INT8"
    if any(stored.part(s) is not None for s in INPUT_SCALE_SUFFIXES):
        return "ModelOpt"
    return "INT8 without marker"


def check_scale_there(stored: Stored) -> None:
    """Raises: CheckpointError when the scale is missing or not a float."""
    if stored.scale_info is None:
        raise stored.stop(
            f"an INT8 weight {list(stored.weight.shape)} without a scale (beside it: {stored.beside()})",
            f"a scale `{stored.header.key(stored.layer)}.weight_scale` is needed",
            "use another file: without its scale an INT8 weight is noise",
        )
    if stored.scale_info.dtype not in FLOAT_DTYPES:
        raise stored.stop(
            f"the scale is {stored.scale_info.dtype}",
            "a float scale is needed",
            "use another file",
            stored.scale_suffix(),
        )


def is_transposed(stored: Stored) -> bool:
    """SDNQ keeps [K, N] for its product and then has its scale as [1, N]; no other maker does."""
    shape, scale = stored.weight.shape, stored.scale_info.shape
    return stored.scale_suffix() == ".scale" and len(shape) == 2 and scale == (1, shape[1]) and shape[1] > 1


def check_rows(stored: Stored, shape: tuple[int, ...]) -> bool:
    """True for one scale per row, False for one per tensor.

    Args:
        shape: of the weight as [N, K], [O, I, kh, kw], or [E, N, K] for a bank of experts.
    Raises:
        CheckpointError: another number of scales; the text has both counts.
    """
    scale = stored.scale_info
    if len(shape) == 3 and stored.marker is not None:
        # a bank of experts; the host checks it against its module
        return scale.count != 1
    if len(shape) not in (2, 4):
        raise stored.stop(
            f"an INT8 weight of {len(shape)} dimensions {list(shape)}",
            "a two-dimensional [out, in] weight is needed",
            "use the float file of this model",
        )
    rows, columns = shape[:2]
    if scale.count == 1:
        return False
    long_axes = [n for n in scale.shape if n != 1]
    if long_axes == [rows]:
        return True
    hint = "use another file"
    if long_axes == [columns]:
        hint = "the weight looks stored as [in, out]: use a file that stores [out, in]"
    elif len(long_axes) == 2:
        hint = "these look like scales of blocks that do not fit the weight: use another file of this model"
    raise stored.stop(
        f"{scale.count} scales {list(scale.shape)} for a weight of {rows} rows {list(shape)}",
        f"1 or {rows} scales are needed",
        hint,
        stored.scale_suffix(),
    )


def rotation(stored: Stored) -> tuple[int, bool]:
    """(columns per rotated group or 0, whether by the Sylvester matrix), as the marker says.

    A power of 4 means ConvRot's matrix; convert_to_quant takes the Sylvester matrix for the other powers of 2.
    """
    flag = stored.option("convrot", "quarot")
    if flag is None or flag is False:
        return 0, False
    group = stored.option("convrot_groupsize", "quarot_groupsize")
    group = DEFAULT_GROUP if group is None else group
    columns = stored.weight.shape[1] if len(stored.weight.shape) == 4 else stored.weight.shape[-1]
    if flag is not True or not isinstance(group, int) or isinstance(group, bool):
        raise stored.stop(
            f"the marker says convrot {flag!r} with group size {group!r}",
            "true or false and a whole number are needed",
            "ask the file's publisher",
            ".comfy_quant",
        )
    power_of_two = group >= 4 and group & (group - 1) == 0
    power_of_four = power_of_two and group.bit_length() % 2 == 1
    most = 4 * BIGGEST_GROUP
    if not power_of_two or columns % group or group > most:
        raise stored.stop(
            f"the rotation group {group} for {columns} columns",
            f"a power of 4, or of 2, up to {most} that divides the columns is needed",
            "use another file: no other rotation is ConvRot",
            ".comfy_quant",
        )
    return group, not power_of_four
