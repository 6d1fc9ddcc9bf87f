"""CUDA graphs where there is no GPU: "recording" keeps the function, and "replaying" calls it again. And what is called."""

import torch
from native_int8.kernels import LowRank
from native_int8.nodes.int8 import cuda_graphs, short_way
from native_int8.nodes.int8.fusion import registry as fusion
from native_int8.nodes.int8.graph_recorder import Recording

from .short_runs import fused_call

HELD = 3 << 20


class PretendRecorder:
    """Does what `graph_recorder.Recorder` does, on any device; `failure` is raised in place of recording."""

    failure: BaseException | None = None
    # waiting for this one counts; nothing is on a GPU here
    device_type = "cuda"

    def __init__(self):
        self.recorded, self.freed = 0, 0

    @staticmethod
    def why_not(device):
        """Everything can be recorded."""
        return None

    def record(self, call, device):
        """Run `call`; each replay writes into the same output, as a graph does."""
        output = call()
        if self.failure is not None:
            raise self.failure
        self.recorded += 1
        return Recording(lambda: output.copy_(call()), output, HELD)

    def forget(self):
        """Nothing is shared."""

    def free(self):
        """Count."""
        self.freed += 1


class Called:
    """A diffusion model with graphs: `model(...)` calls it as the wrapper does; `run` says what the last call did."""

    def __init__(self, module, make_recorder=PretendRecorder):
        self.module, self.said = module, []
        self.recorders = []
        self.graphs = cuda_graphs.Graphs(
            self.said.append, lambda: self.recorders.append(make_recorder()) or self.recorders[-1]
        )

    def __call__(self, arguments):
        from comfy_kitchen.registry import registry

        runs = []
        args, kwargs = arguments
        with (
            registry.use_backend("native_int8"),
            short_way.inside(self.module, runs.append),
            fusion.inside(self.module),
            self.graphs.inside(self.module),
        ):
            y = self.module(*args, **kwargs)
        self.run = runs[0]
        return y

    @property
    def kept(self):
        return self.graphs.of(self.module).graphs

    def said_of(self, arguments):
        """Why a second call, too, has no graph."""
        for _ in range(2):
            self(arguments)
            assert not self.run.graphed
        (reason,) = self.run.ungraphed
        assert f"CUDA graph not used: {reason}." in self.said
        return reason


def plain(model, arguments):
    """What the model of a `Called` gives without graphs."""
    return (
        fused_call(model.module, *arguments[0], fused=True)[0] if not arguments[1] else _plain(model.module, arguments)
    )


def _plain(module, arguments):
    from comfy_kitchen.registry import registry

    args, kwargs = arguments
    with registry.use_backend("native_int8"), short_way.inside(module, lambda run: None), fusion.inside(module):
        return module(*args, **kwargs)


def nothing(*_, **__):
    """A patch that does nothing."""


def twice(module):
    """Put a `forward` of another pack on a module."""
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs)


class Simple(torch.nn.Module):
    """A model whose forward does one thing more."""

    def __init__(self, more=nothing):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(4), requires_grad=False)
        self.more = more

    def forward(self, x, transformer_options=None, scale=1.0):
        self.more(x, transformer_options)
        return x * self.weight * scale


def simple(scale=1.0, **options):
    """Arguments of a call of `Simple`."""
    return (torch.arange(4.0),), {"transformer_options": options, "scale": scale}


def lora(seed):
    """What hangs LoRAs on an Ideogram 4, as a MODEL with a LoRA does."""

    def hang(module):
        for layer in module.layers:
            qkv = layer.attention.qkv
            g = torch.Generator().manual_seed(seed)
            down, up = torch.randn((32, 128), generator=g) * 0.1, torch.randn((384, 32), generator=g) * 0.1
            setattr(qkv, short_way.BRANCH, LowRank(down.bfloat16(), up.bfloat16()))

    return hang
