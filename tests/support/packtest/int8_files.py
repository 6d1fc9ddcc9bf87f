"""Files in the format of each maker, written from the formats' facts, with the weights that the maker means.

A maker is a function (layer name, float weight [N, K]) -> `Written`. Nothing here uses the pack's own code.

    PYTHONPATH=tests/support python -m packtest.int8_files      writes the table of formats into README.md
"""

import json
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from packtest import ROOT
from packtest.checkpoints import dequantised, floats, marker, metadata_twin, regular_matrix

LAYERS = ("blocks.0.attn.q", "blocks.1.ff.w2")
NATIVE = {"format": "int8_tensorwise"}


@dataclass(frozen=True)
class Written:
    """A layer in a file: its tensors, the weight they mean (float64), one step of each row, and marker fields."""

    tensors: dict[str, torch.Tensor]
    expected: torch.Tensor
    step: torch.Tensor
    fields: dict | None = None


@dataclass(frozen=True)
class Maker:
    """One way to store a layer.

    result: "adopted", "converted" or "kept in float".
    twin: the marker fields go to the file's metadata.
    branches: the file holds a conditional and an unconditional model.
    """

    family: str
    how: str
    result: str
    write: Callable[[str, torch.Tensor], Written]
    shape: tuple[int, ...] = (24, 64)
    twin: bool = False
    branches: bool = False
    file_tensors: dict = field(default_factory=dict)
    metadata: dict = field(default_factory=dict)

    def file(self, layers=LAYERS, prefix: str = "") -> tuple[dict, dict, dict[str, Written]]:
        """(tensors, metadata, layer -> Written of the model that is loaded by default)."""
        tensors, fields, written = dict(self.file_tensors), {}, {}
        for i, word in enumerate(("conditional.", "unconditional.") if self.branches else ("",)):
            for j, layer in enumerate(layers):
                one = self.write(layer, floats(*self.shape, seed=10 * i + j))
                tensors.update({word + key: value for key, value in one.tensors.items()})
                tensors[f"{word}{layer}.bias"] = floats(self.shape[0], seed=j)
                written.setdefault(layer, one)
                fields[prefix + word + layer] = one.fields
            tensors[f"{word}norm.scale"] = floats(8)
        tensors = {prefix + key: value for key, value in tensors.items()}
        return tensors, {**self.metadata, **(metadata_twin(fields) if self.twin else {})}, written


def rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes int8 of the shape of `weight`, and float32 [N, 1]: absmax / 127 of each row; one code is -128."""
    flat = weight.double().flatten(1)
    scale = (flat.abs().amax(1, keepdim=True) / 127).float()
    codes = (flat / scale.double()).round().clamp(-128, 127).to(torch.int8)
    codes[0, 0] = -128
    return codes.reshape(weight.shape), scale


def tensor_scale(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """codes int8 [N, K] and one float32 scale []."""
    scale = (weight.double().abs().max() / 127).float()
    return (weight.double() / scale.double()).round().to(torch.int8), scale


def turn(weight: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """W M^T by groups of columns, float64."""
    return (weight.double().reshape(-1, len(matrix)) @ matrix.double().t()).reshape(weight.shape)


def sylvester_matrix(size: int) -> torch.Tensor:
    """float64 [size, size], orthonormal: Kronecker powers of [[1, 1], [1, -1]]."""
    matrix, base = torch.ones(1, 1, dtype=torch.float64), torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.kron(matrix, base)
    return matrix / size**0.5


def by_rows(
    fields=None, group=0, names=(".weight", ".weight_scale"), scale_shape=None, raw=None, extra=None, per_tensor=False
):
    """A writer of codes with a scale per row or tensor, rotated by ConvRot's matrix when `group` is set."""

    def write(name: str, weight: torch.Tensor) -> Written:
        turned = turn(weight, regular_matrix(group)) if group else weight
        codes, scale = tensor_scale(turned) if per_tensor else rows(turned)
        column = scale.expand(len(codes), 1) if per_tensor else scale
        expected = dequantised(codes, column, group)
        stored = scale.reshape(scale_shape) if scale_shape else scale
        tensors = {
            name + names[0]: codes,
            name + names[1]: stored,
            **{name + k: v.clone() for k, v in (extra or {}).items()},
        }
        content = raw if raw is not None else fields
        if content is not None:
            tensors[f"{name}.comfy_quant"] = marker(content)
        return Written(tensors, expected, column.double(), fields)

    return write


def twin_only(group: int):
    """Marker fields for the metadata, none as a tensor."""

    def write(name: str, weight: torch.Tensor) -> Written:
        fields = {**NATIVE, "convrot": True, "convrot_groupsize": group}
        one = by_rows(None, group)(name, weight)
        return Written(one.tensors, one.expected, one.step, fields)

    return write


def mixed_groups(name: str, weight: torch.Tensor) -> Written:
    """Layer by layer another group size, as Comfy-Org's script writes."""
    group = 256 if name.endswith("q") else 16
    return by_rows({**NATIVE, "convrot": True, "convrot_groupsize": group}, group)(name, weight)


def in_blocks(size: int, names=(".weight", ".weight_scale"), fields=None):
    """convert_to_quant: one scale for each square of `size` x `size`."""

    def write(name: str, weight: torch.Tensor) -> Written:
        n, k = weight.shape
        squares = weight.double().reshape(n // size, size, k // size, size)
        scale = (squares.abs().amax((1, 3)) / 127).float()
        wide = scale.double()[:, None, :, None]
        codes = (squares / wide).round()
        tensors = {name + names[0]: codes.reshape(n, k).to(torch.int8), name + names[1]: scale}
        tensors[f"{name}.input_scale"] = torch.tensor(1.0)
        if fields is not None:
            tensors[f"{name}.comfy_quant"] = marker(fields)
        return Written(tensors, (codes * wide).reshape(n, k), scale.double().amax(1).repeat_interleave(size)[:, None])

    return write


def sylvester(group: int):
    """convert_to_quant with a group that is no power of 4."""

    def write(name: str, weight: torch.Tensor) -> Written:
        matrix = sylvester_matrix(group)
        codes, scale = rows(turn(weight, matrix))
        fields = {**NATIVE, "convrot": True, "convrot_groupsize": group}
        tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.comfy_quant": marker(fields)}
        return Written(tensors, turn(dequantised(codes, scale), matrix.t()), scale.double())

    return write


def toolkit(sigma: bool, factor: float = 1.0):
    """QuaRot: (W) H^T with H stored; HadaNorm: (W diag(sigma)) H^T with both stored."""

    def write(name: str, weight: torch.Tensor) -> Written:
        matrix = sylvester_matrix(128).float() * factor
        columns = weight.abs().amax(0).clamp(min=1e-3).pow(-0.5)
        codes, scale = rows(turn(weight * columns if sigma else weight, matrix))
        expected = turn(dequantised(codes, scale), matrix.t()) / factor**2
        tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale, f"{name}.quarot_hadamard": matrix}
        if sigma:
            tensors[f"{name}.hadanorm_sigma"] = columns
            expected = expected / columns.double()
        return Written(tensors, expected, scale.double())

    return write


def smooth(name: str, weight: torch.Tensor) -> Written:
    """SmoothQuant, alpha 0.5: y = (x / s) (W diag(s))^T, so the codes hold W diag(s)."""
    if not name.endswith("q"):
        # a protected layer of the same file
        return Written({f"{name}.weight": weight.to(torch.bfloat16)}, weight.to(torch.bfloat16).double(), torch.ones(1))
    activation = 1 + 20 * torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(3))
    vector = activation.sqrt() / weight.abs().amax(0).sqrt()
    codes, scale = rows(weight * vector)
    expected = dequantised(codes, scale) / vector.double()
    return Written(
        {f"{name}.wq": codes, f"{name}.ws": scale.reshape(-1), f"{name}.smooth": vector}, expected, scale.double()
    )


def sdnq(transposed=False, zero=False, rank=0, group=0, unsigned=False, matrix=None):
    """W M^T = q * scale + zero_point + svd_up svd_down; all transposed when its INT8 product is on."""

    def write(name: str, weight: torch.Tensor) -> Written:
        n, k = weight.shape
        up, down = floats(n, max(rank, 1), seed=5), floats(max(rank, 1), k, seed=6)
        low_rank = up.double() @ down.double() if rank else 0
        turned = weight.double() if matrix is None else turn(weight, matrix)
        values = (turned - low_rank).reshape(n, -1, group or k)
        if zero:
            low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
            scale = ((high - low) / 255).float()
            offset = (low if unsigned else low + 128 * scale.double()).float()
        else:
            scale, offset = (values.abs().amax(-1, keepdim=True) / 127).float(), torch.zeros(())
        codes = ((values - offset.double()) / scale.double()).round()
        codes = codes.clamp(0, 255).to(torch.uint8) if unsigned else codes.clamp(-128, 127).to(torch.int8)
        expected = (codes.double() * scale.double() + offset.double()).reshape(n, k) + low_rank
        expected = expected if matrix is None else turn(expected, matrix.t())
        flat = (lambda t: t) if group else (lambda t: t.reshape(n, -1))
        tensors = {".weight": flat(codes), ".scale": flat(scale)}
        if zero:
            tensors[".zero_point"] = flat(offset)
        if rank:
            tensors.update({".svd_up": up, ".svd_down": down})
        if transposed:
            tensors = {key: value.t().contiguous() for key, value in tensors.items()}
        return Written({name + key: value for key, value in tensors.items()}, expected, scale.double().amax(1))

    return write


def hadamard_settings(version: str, group: int) -> dict[str, str]:
    """SDNQ's settings as metadata."""
    settings = {"sdnq_version": version, "weights_dtype": "int8", "use_hadamard": True, "hadamard_group_size": group}
    return {"quantization_config": json.dumps(settings)}


def bitsandbytes(name: str, weight: torch.Tensor) -> Written:
    """SCB is the rows' absmax."""
    codes, scale = rows(weight)
    absmax = scale.reshape(-1) * 127
    tensors = {
        f"{name}.weight": codes,
        f"{name}.SCB": absmax,
        f"{name}.weight_format": torch.zeros((), dtype=torch.uint8),
    }
    return Written(tensors, dequantised(codes, absmax / 127), scale.double())


def convolution(group: int):
    """HSWQ: INT8 [O, I, kh, kw], scale [O, 1, 1, 1], rotated along I."""

    def write(name: str, weight: torch.Tensor) -> Written:
        o, i, h, w = weight.shape
        last = weight.permute(0, 2, 3, 1).reshape(-1, i)
        matrix = regular_matrix(group)
        codes, scale = rows(turn(last, matrix).reshape(o, h, w, i).permute(0, 3, 1, 2).contiguous())
        fields = {**NATIVE, "convrot": True, "convrot_groupsize": group}
        values = (codes.double() * scale.double()[:, :, None, None]).permute(0, 2, 3, 1).reshape(-1, i)
        expected = turn(values, matrix.t()).reshape(o, h, w, i).permute(0, 3, 1, 2)
        tensors = {f"{name}.weight": codes, f"{name}.weight_scale": scale[:, :, None, None]}
        tensors[f"{name}.comfy_quant"] = marker(fields)
        return Written(tensors, expected, scale.double()[:, :, None, None], fields)

    return write


_ROTATED = {"convrot": True, "convrot_groupsize": 256, "per_row": True}
_FP8_MARK = {"scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}
_ONE = torch.tensor(1.0)
_CORE, _FAST, _CTQ, _HSWQ = "ComfyUI `int8_tensorwise`", "INT8-Fast", "convert_to_quant", "HSWQ"
_WIDE, _SQUARE = (24, 256), (64, 64)

MAKERS = {
    "native": Maker(_CORE, "scale per row", "adopted", by_rows(NATIVE), (24, 40)),
    "native-tensor": Maker(_CORE, "scale per tensor", "adopted", by_rows(NATIVE, per_tensor=True), (24, 40)),
    "native-mixed": Maker(_CORE, "ConvRot, several group sizes in one file", "adopted", mixed_groups, _WIDE),
    "native-twin": Maker(_CORE, "markers in the metadata only", "adopted", twin_only(64), twin=True),
    "fast-no-marker": Maker(_FAST, "no marker", "adopted", by_rows(None, scale_shape=(1,), per_tensor=True)),
    "fast-quarot": Maker(_FAST, "`quarot`", "adopted", by_rows({"quarot": True}, 256), _WIDE),
    "fast-convrot": Maker(_FAST, "`convrot`", "adopted", by_rows({"convrot": True}, 256), _WIDE),
    "fast-per-row": Maker(_FAST, "`per_row`", "adopted", by_rows(_ROTATED, 256), _WIDE),
    "fast-plain": Maker(_FAST, "not rotated", "adopted", by_rows({"convrot": False, "per_row": True})),
    "blocks-128": Maker(_CTQ, "blocks of 128 or 64", "converted", in_blocks(128, fields={"format": "int8_blockwise", "group_size": 128}), (256, 512)),
    "blocks-64": Maker(_CTQ, "blocks of 128 or 64", "converted", in_blocks(64, fields={"format": "int8_blockwise", "params": {"group_size": 64}}), (128, 256)),
    "blocks-legacy": Maker(_CTQ, "blocks without marker", "converted", in_blocks(64, (".weight", ".scale_weight")), (128, 256), file_tensors={"scaled_int8": torch.zeros(2)}),
    "blocks-label": Maker(_CTQ, "rows labelled as blocks", "adopted", by_rows({"format": "int8_blockwise", "group_size": 128})),
    "sylvester": Maker(_CTQ, "rotated by 128 or 512 (Sylvester)", "converted", sylvester(128), _WIDE),
    "toolkit-quarot": Maker("INT8-Toolkit", "QuaRot", "converted", toolkit(False), _WIDE),
    "toolkit-signs": Maker("INT8-Toolkit", "QuaRot", "converted", toolkit(False, 128**0.5), _WIDE),
    "toolkit-hadanorm": Maker("INT8-Toolkit", "HadaNorm", "converted", toolkit(True), _WIDE),
    "hswq": Maker(_HSWQ, "Linears, marker and metadata", "adopted", by_rows({**NATIVE, "convrot": True, "convrot_groupsize": 4}, 4), (24, 40), twin=True),
    "hswq-string": Maker(_HSWQ, "marker as a string", "adopted", by_rows(NATIVE, raw=b'"int8_tensorwise"')),
    "hswq-twice": Maker(_HSWQ, "marker encoded twice", "adopted", by_rows(NATIVE, raw=b'"{\\"format\\": \\"int8_tensorwise\\"}"')),
    "hswq-conv": Maker(_HSWQ, "convolutions", "kept in float", convolution(16), (8, 32, 3, 3)),
    "modelopt": Maker("ModelOpt", "its static `input_scale` is not used", "adopted", by_rows(extra={".input_scale": torch.tensor(0.37)})),
    "lightx2v": Maker("LightX2V", "no marker", "adopted", by_rows()),
    "lightx2v-fp8": Maker("LightX2V", "marked as `scaled_fp8`", "adopted", by_rows(names=(".weight", ".scale_weight"), per_tensor=True), file_tensors=_FP8_MARK),
    "quanto": Maker("quanto, mmgp", "`_data`, `_scale`", "adopted", by_rows(names=(".weight._data", ".weight._scale"), extra={".input_scale": _ONE, ".output_scale": _ONE})),
    "alias": Maker("others", "`int8_weight` with `scale`", "adopted", by_rows(names=(".int8_weight", ".scale"))),
    "sdnq": Maker("SDNQ int8", "rows", "adopted", sdnq()),
    "sdnq-transposed": Maker("SDNQ int8", "stored transposed", "adopted", sdnq(transposed=True)),
    "sdnq-square": Maker("SDNQ int8", "stored transposed", "adopted", sdnq(transposed=True), _SQUARE),
    "sdnq-zero": Maker("SDNQ int8", "`zero_point`", "converted", sdnq(zero=True)),
    "sdnq-svd": Maker("SDNQ int8", "`svd_up`, `svd_down`", "converted", sdnq(rank=4)),
    "sdnq-all": Maker("SDNQ int8", "`svd_up`, `svd_down`", "converted", sdnq(transposed=True, zero=True, rank=4), _SQUARE),
    "sdnq-groups": Maker("SDNQ int8", "groups of columns", "converted", sdnq(group=16)),
    "sdnq-uint8": Maker("SDNQ uint8", "`zero_point`, rows or groups", "converted", sdnq(zero=True, group=32, unsigned=True)),
    "sdnq-hadamard": Maker("SDNQ int8", "`use_hadamard` with groups of 4, 16, 64, 256 or 1024 (from 0.2.1)", "adopted", sdnq(matrix=regular_matrix(256)), _WIDE, metadata=hadamard_settings("0.2.4", 256)),
    "sdnq-hadamard-narrow": Maker("SDNQ int8", "`use_hadamard` with groups of 4, 16, 64, 256 or 1024 (from 0.2.1)", "adopted", sdnq(transposed=True, matrix=regular_matrix(64)), (24, 192), metadata=hadamard_settings("0.2.1", 256)),
    "sdnq-hadamard-svd": Maker("SDNQ int8", "`use_hadamard` with other groups or further parts", "converted", sdnq(zero=True, rank=4, group=32, matrix=regular_matrix(64)), metadata=hadamard_settings("0.2.4", 256)),
    "sdnq-hadamard-128": Maker("SDNQ int8", "`use_hadamard` with other groups or further parts", "converted", sdnq(matrix=sylvester_matrix(128)), _WIDE, metadata=hadamard_settings("0.2.0", 128)),
    "sdnq-hadamard-first": Maker("SDNQ int8", "`use_hadamard` with other groups or further parts", "converted", sdnq(matrix=sylvester_matrix(64)), metadata=hadamard_settings("0.1.9", 128)),
    "bitsandbytes": Maker("bitsandbytes INT8", "`SCB`", "adopted", bitsandbytes),
    "ideogram": Maker("Transformer Lab Ideogram 4", "`wq`, `ws`, either branch", "adopted", by_rows(names=(".wq", ".ws"), scale_shape=(-1,)), branches=True),
    "ideogram-smooth": Maker("Transformer Lab Ideogram 4", "`smooth`", "converted", smooth, branches=True),
}  # fmt: skip

# (family, how, tensors of a layer, words of the message)
_PACKED = torch.zeros(24, 32, dtype=torch.int8)
REFUSED = (
    ("W4A4", "`convrot_w4a4`", {".weight": _PACKED, ".weight_scale": _ONE, ".comfy_quant": marker({"format": "convrot_w4a4"})}, "convrot_w4a4"),
    ("W4A8", "`asym_w4a8_int8`", {".weight": _PACKED, ".weight_s_channel": torch.ones(24), ".comfy_quant": marker({"format": "asym_w4a8_int8"})}, "asym_w4a8_int8"),
    ("W4A8", "`asym_w4a8_int8`", {".weight": _PACKED, ".weight_s_rel": torch.ones(24, 4), ".weight_s_channel": torch.ones(24)}, "asym_w4a8_int8"),
    ("W6A8", "`w6a8_int8`", {".weight": _PACKED, ".weight_scale": _ONE, ".comfy_quant": marker({"format": "w6a8_int8"})}, "w6a8_int8"),
    ("NVFP4, MXFP8", "by marker or `weight_scale_2`", {".weight": _PACKED.view(torch.uint8), ".weight_scale": torch.ones(24, 4), ".weight_scale_2": _ONE}, "nvfp4"),
    ("bitsandbytes 4-bit", "`absmax`, `quant_map`", {".weight": _PACKED.view(torch.uint8), ".weight.absmax": torch.ones(12)}, "4-bit"),
    ("SDNQ hqqsvd", "`nbits`", {".weight": _PACKED.view(torch.uint8), ".scale": torch.ones(24, 1), ".nbits": _ONE}, "hqqsvd"),
    ("bitsandbytes INT8", "tile layouts of old versions", {".weight": _PACKED, ".SCB": torch.ones(24), ".weight_format": torch.tensor(2, dtype=torch.uint8)}, "layout 2"),
)  # fmt: skip

OTHERS = (
    ("GGUF", "Q8_0, with the `gguf` package installed; as float sources", "quantised"),
    (
        "SDNQ int8",
        "`use_hadamard` with groups of 4, 16, 64, 256 or 1024, of 0.2.0 (either matrix) or unknown version",
        "refused",
    ),
    ("GGUF", "K-quants and other types", "refused"),
    ("fp8", "scaled (`weight_scale`, `scale_weight`) or not", "quantised"),
    ("bf16, fp16, fp32, fp64", "any mix", "quantised"),
)


START, END = "<!-- formats: from tests/support/packtest/int8_files.py -->", "<!-- end of formats -->"


def with_table(readme: str) -> str:
    """The README's text with its table of formats as it should be."""
    before, _, rest = readme.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n{table()}\n{END}{after}"


def table() -> str:
    """The README's table of formats: family, variants, what the loader does."""
    lines: dict[tuple[str, str], list[str]] = {}
    refused = [(family, how, "refused") for family, how, _, _ in REFUSED]
    for family, how, result in (*((m.family, m.how, m.result) for m in MAKERS.values()), *OTHERS, *refused):
        variants = lines.setdefault((family, result), [])
        if how and how not in variants:
            variants.append(how)
    body = [f"| {family} | {'; '.join(hows)} | {result} |" for (family, result), hows in lines.items()]
    return "\n".join(["| format | variants | result |", "|---|---|---|", *body])


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8")), encoding="utf-8")
