"""How good INT8 is on real weights and real activations: the measuring, and the table of tests/quality/README.md.

    NATIVE_INT8_REAL_DATA=... COMFYUI_PATH=... PYTHONPATH=tests/support python -m packtest.real_quality

The pack itself plans, quantises and multiplies; the models are ComfyUI's classes in float32 on a CPU.
"""

import contextlib
from dataclasses import dataclass

import torch

from . import ROOT, load_pack
from .real_weights import WHEELS, RealModel, read

DATA = ROOT / "tests" / "quality" / "data" / "real_linears.safetensors"
START, END = "<!-- from tests/support/packtest/real_quality.py -->", "<!-- end of the table -->"

# name -> (rotation, scale search); per tensor is what the gates must not let through
WAYS = {
    "plain": (False, False),
    "rotated": (True, False),
    "plain, scale search": (False, True),
    "rotated, scale search": (True, True),
}
PER_TENSOR = "one scale per activation tensor"


@dataclass(frozen=True)
class Measured:
    """A model in INT8: cosine of its last hidden states to the float model's, and SQNR in dB of each layer on its own."""

    cosine: float
    layers: dict[str, float]

    @property
    def worst(self) -> tuple[float, str]:
        """(SQNR in dB, layer)."""
        return min((db, layer) for layer, db in self.layers.items())


class Bench:
    """A real model in float, its activations, and ways to run it in INT8."""

    def __init__(self, model: RealModel):
        import comfy.ops

        self.model = model
        self.float = model.build(comfy.ops.disable_weight_init)
        self.float.load_state_dict(model.state)
        self.inputs: dict[str, torch.Tensor] = {}
        handles = [
            part.register_forward_pre_hook(lambda _, args, name=name: self.inputs.__setitem__(name, args[0].clone()))
            for name, part in self.float.named_modules()
            if isinstance(part, torch.nn.Linear)
        ]
        self.hidden = model.run(self.float)
        for handle in handles:
            handle.remove()

    def outputs(self, names) -> dict[str, torch.Tensor]:
        """What the float layers make of their inputs."""
        return {name: self.float.get_submodule(name)(self.inputs[name]) for name in names}

    def native(self, rotation: bool, mse: bool) -> tuple[dict[str, torch.Tensor], list]:
        """(state dict in the host's INT8 format, decisions), by the pack's own plan and conversion."""
        from native_int8.nodes.int8 import formats, loader, policy
        from native_int8.nodes.int8.checkpoint import header_of

        header = header_of(self.model.state, None)
        state = {name: self.model.state[header.key(name)] for name in header.tensors}
        specs = formats.detect(header, state.__getitem__)
        decisions = policy.plan(specs, rotation=rotation)
        options = loader.LoadOptions(rotation=rotation, mse=mse, device="cpu")
        native = loader.convert(specs, decisions, dict(state), options, lambda done, total: None, True)
        # the plan's names are without the prefix that the detector found
        return {header.prefix + name: value for name, value in native.items()}, decisions

    def measure(self, rotation: bool, mse: bool = False) -> Measured:
        """The model with the pack's INT8 Linears, on the pack's kernels."""
        import comfy.ops
        from comfy_kitchen.registry import registry
        from native_int8.nodes.int8 import host_backend, quality

        state, decisions = self.native(rotation, mse)
        module = self.model.build(comfy.ops.mixed_precision_ops({}, torch.float32))
        module.load_state_dict(state)
        names = [d.layer for d in decisions if d.is_int8]
        host_backend.register()
        with registry.use_backend(host_backend.NAME):
            hidden = self.model.run(module)
            expected = self.outputs(names)
            layers = {
                name: quality.sqnr_db(module.get_submodule(name)(self.inputs[name]), expected[name]) for name in names
            }
        return Measured(quality.cosine(hidden, self.hidden), layers)

    def measure_per_tensor(self) -> Measured:
        """The same weights by rows, but one scale for all rows of an activation, as many INT8 paths do."""
        from native_int8.nodes.int8 import quality

        state, decisions = self.native(False, False)
        names = [d.layer for d in decisions if d.is_int8]
        weights = {name: state[f"{name}.weight"].float() * state[f"{name}.weight_scale"] for name in names}
        originals = {name: self.float.get_submodule(name).weight for name in names}

        def per_tensor(_, args):
            scale = args[0].abs().max() / 127
            return ((args[0] / scale).round() * scale, *args[1:])

        expected = self.outputs(names)
        with contextlib.ExitStack() as stack:
            for name in names:
                part = self.float.get_submodule(name)
                part.weight = torch.nn.Parameter(weights[name], requires_grad=False)
                stack.callback(setattr, part, "weight", originals[name])
                stack.callback(part.register_forward_pre_hook(per_tensor).remove)
            hidden = self.model.run(self.float)
            layers = {name: quality.sqnr_db(self.outputs([name])[name], expected[name]) for name in names}
        return Measured(quality.cosine(hidden, self.hidden), layers)


def linear_sqnr_db(x: torch.Tensor, weight: torch.Tensor, bias, rotation: bool, mse: bool = False) -> float:
    """SQNR in dB of one Linear in INT8, through the pack's own quantisation and kernel, in float32."""
    from native_int8.kernels import int8_linear, quantize_rows
    from native_int8.nodes.int8 import policy, quality
    from native_int8.nodes.int8.scale_search import quantize_rows_mse

    group = policy.rotation_group(x.shape[1]) if rotation else 0
    codes, scale = (quantize_rows_mse if mse else quantize_rows)(weight, rotation_group=group)
    y = int8_linear(x, codes, scale, bias, rotation_group=group)
    return quality.sqnr_db(y, torch.nn.functional.linear(x, weight, bias))


def linear_sqnr_db_per_tensor(x: torch.Tensor, weight: torch.Tensor, bias) -> float:
    """The same with one scale for all rows of x, without rotation."""
    from native_int8.kernels import quantize_rows
    from native_int8.nodes.int8 import quality

    codes, scale = quantize_rows(weight)
    step = x.abs().max() / 127
    y = torch.nn.functional.linear((x / step).round() * step, codes.float() * scale, bias)
    return quality.sqnr_db(y, torch.nn.functional.linear(x, weight, bias))


def table(found: dict[str, dict[str, Measured]]) -> str:
    """Model by way: end cosine, worst and median layer."""
    lines = [
        "| model | way | end cosine | worst layer, dB | median layer, dB | worst layer |",
        "|---|---|---|---|---|---|",
    ]
    for name, ways in found.items():
        for way, measured in ways.items():
            worst, layer = measured.worst
            ordered = sorted(measured.layers.values())
            lines.append(
                f"| {name}, {len(ordered)} layers | {way} | {measured.cosine:.5f} | {worst:.1f} | "
                f"{ordered[len(ordered) // 2]:.1f} | `{layer}` |"
            )
    return "\n".join(lines)


def with_table(readme: str, text: str, start: str = START, end: str = END) -> str:
    """The README's text with the table between two marks replaced."""
    before, _, rest = readme.partition(start)
    _, _, after = rest.partition(end)
    return f"{before}{start}\n{text}\n{end}{after}"


def main() -> None:
    from .host import import_comfy

    load_pack()
    import_comfy("comfy.ops", "comfy.quant_ops", "comfy.text_encoders.bert", "comfy.text_encoders.llama")
    found = {}
    with torch.inference_mode():
        for name in WHEELS:
            bench = Bench(read(name))
            found[name] = {way: bench.measure(*options) for way, options in WAYS.items()}
            found[name][PER_TENSOR] = bench.measure_per_tensor()
    path = ROOT / "tests" / "quality" / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8"), table(found)), encoding="utf-8")


if __name__ == "__main__":
    main()
