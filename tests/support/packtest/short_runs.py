"""A small model with INT8 Linears of the host, and calls of a model on the short way or past it."""

import contextlib
import dataclasses

import torch
from native_int8.nodes.int8 import host_backend, short_way
from native_int8.nodes.int8.fusion import registry as fusion

K, N = 256, 48


class Pair(torch.nn.Module):
    """Two INT8 Linears of the host and a float one, in a row."""

    def __init__(self, operations):
        super().__init__()
        self.first = operations.Linear(K, N, dtype=torch.float32)
        self.middle = torch.nn.Linear(N, K)
        self.second = operations.Linear(K, N, bias=False, dtype=torch.float32)

    def forward(self, x):
        return self.second(torch.nn.functional.gelu(self.middle(self.first(x))))


def int8_state(comfy, layer, seed, group=256):
    """The state of one rotated INT8 Linear [N, K] by the name `layer`."""
    from comfy.quant_ops import QuantizedTensor

    generator = torch.Generator().manual_seed(seed)
    weight = QuantizedTensor.from_float(
        torch.randn((N, K), generator=generator), "TensorWiseINT8Layout", per_channel=True, convrot=True,
        convrot_groupsize=group,
    )  # fmt: skip
    marker = f'{{"format": "int8_tensorwise", "convrot": true, "convrot_groupsize": {group}}}'
    return {
        f"{layer}.weight": weight._qdata,
        f"{layer}.weight_scale": weight._params.scale,
        f"{layer}.comfy_quant": torch.tensor(list(marker.encode()), dtype=torch.uint8),
    }


def build_pair(comfy, seed=1):
    """A new `Pair` whose weights depend on `seed`."""
    host_backend.register()
    made = Pair(comfy.ops.mixed_precision_ops({}, torch.float32))
    state = int8_state(comfy, "first", seed) | int8_state(comfy, "second", seed + 1, 64)
    made.load_state_dict(state | {"first.bias": torch.randn(N).bfloat16()}, strict=False)
    return made


def call(model, *inputs, short=True):
    """The output, and what the short way says it did."""
    from comfy_kitchen.registry import registry

    runs = []
    with (
        registry.use_backend("native_int8"),
        short_way.inside(model, runs.append) if short else contextlib.nullcontext(),
    ):
        y = model(*inputs)
    return y, runs[0] if runs else None


def fused_call(model, *arguments, fused=True):
    """The same on the short way, with the blocks that are known fused or not."""
    from comfy_kitchen.registry import registry

    runs = []
    with (
        registry.use_backend("native_int8"),
        short_way.inside(model, runs.append),
        fusion.inside(model) if fused else contextlib.nullcontext(),
    ):
        y = model(*arguments)
    return y, runs[0]


def instance_attributes(model):
    """Name of each module -> names of what is set on the module itself."""
    return {name: set(vars(module)) for name, module in model.named_modules()}


def half_scale(layer):
    """Give an INT8 Linear float16 scales, which the short way does not take."""
    weight = layer.weight
    params = dataclasses.replace(weight._params, scale=weight._params.scale.half())
    layer.weight = torch.nn.Parameter(type(weight)(weight._qdata, short_way.LAYOUT, params), requires_grad=False)
