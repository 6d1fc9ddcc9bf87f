"""What decides whether one call of a model equals another, so that its CUDA graph may be replayed, or why none may be.

A graph repeats the kernels of one call with the addresses and the Python values of then. So everything that such a call
reads is either copied into its buffers (the tensor arguments), or part of the signature (their shapes and all other
values), or part of what must still be as it was (weights, LoRAs, modules); what is none of these refuses the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch
from torch.nn.modules import module as torch_module
from torch.utils._python_dispatch import TorchDispatchMode

from . import short_way
from .seats import is_replaced

NAME = "native_int8"
OPTIONS = "transformer_options"
# what the sampler puts into transformer_options anew for each call; a model that reads one of these is refused
VOLATILE = frozenset({"cond_or_uncond", "sample_sigmas", "sigmas", "uuids"})
# looked at by `why_not_options`
_EXAMINED = frozenset({"callbacks", "optimized_attention_override", "patches", "patches_replace", "wrappers"})
_SIMPLE = (bool, complex, float, int, str, type(None), torch.device, torch.dtype)
_WAITS = frozenset(
    {"_local_scalar_dense", "_unique", "_unique2", "allclose", "argwhere", "bincount", "equal", "is_nonzero", "item",
     "masked_select", "nonzero", "nonzero_numpy", "unique_consecutive", "unique_dim"}
)  # fmt: skip
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    if hasattr(torch_module, name)
)


class Refused(Exception):
    """No graph, for the reason given as one sentence."""


def signature(value, tensors: list[torch.Tensor]) -> tuple:
    """The hashable meaning of an argument; tensors are appended to `tensors` and count by shape, strides, dtype and device.

    Raises Refused for what is neither a tensor nor made of plain Python values.
    """
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        tensors.append(value)
        return "tensor", value.dtype, value.device, value.shape, value.stride()
    if kind in _SIMPLE:
        # True and 1 are equal, but not to a model
        return kind, value
    if kind in (list, tuple, torch.Size):
        return (kind, *(signature(part, tensors) for part in value))
    if kind is dict:
        return (kind, *((key, signature(part, tensors)) for key, part in value.items()))
    raise Refused(f"the model is called with a {kind.__name__}")


def with_tensors(value, tensors: Iterator[torch.Tensor]):
    """`value` with its tensors replaced, in the order of `signature`."""
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return next(tensors)
    if kind in (list, tuple):
        return kind(with_tensors(part, tensors) for part in value)
    if kind is dict:
        return {key: with_tensors(part, tensors) for key, part in value.items()}
    return value


def options_signature(options: dict) -> tuple:
    """The meaning of transformer_options without what changes with every call. Raises Refused."""
    reason = why_not_options(options)
    if reason is not None:
        raise Refused(reason)
    tensors: list = []
    found = []
    for key, value in options.items():
        if key in VOLATILE or key in _EXAMINED:
            continue
        try:
            found.append((key, signature(value, tensors)))
        except Refused:
            tensors.append(value)
        if tensors:
            raise Refused(f"a node put {key} into the model's options")
    return tuple(found)


def why_not_options(options: dict) -> str | None:
    """Which patch of a node stands in the way, or None."""
    for what in ("wrappers", "callbacks"):
        for by_key in options.get(what, {}).values():
            foreign = next((key for key, found in by_key.items() if found and key != NAME), NAME)
            if foreign == "torch.compile":
                return "the MODEL is compiled with torch.compile"
            if foreign != NAME:
                return f"another node put {what} on the MODEL ({foreign})"
    for what in ("patches", "patches_replace"):
        named = [name for name, found in options.get(what, {}).items() if found]
        if named:
            return f"another node patches the model ({', '.join(map(str, named))})"
    if "optimized_attention_override" in options:
        return "another node replaced attention"
    return None


class WatchedOptions(dict):
    """transformer_options that note in `read` which values are looked at, also in copies of it."""

    def __init__(self, values, read: set):
        super().__init__(values)
        self.read = read

    def __getitem__(self, key):
        self.read.add(key)
        return super().__getitem__(key)

    def __contains__(self, key):
        self.read.add(key)
        return super().__contains__(key)

    def __iter__(self):
        # also what makes dict(options) and {**options} ask for each value
        self.read.update(super().keys())
        return super().__iter__()

    def get(self, key, default=None):
        """As of a dict."""
        self.read.add(key)
        return super().get(key, default)

    def pop(self, key, *default):
        """As of a dict."""
        self.read.add(key)
        return super().pop(key, *default)

    def items(self):
        """As of a dict."""
        self.read.update(super().keys())
        return super().items()

    def values(self):
        """As of a dict."""
        self.read.update(super().keys())
        return super().values()

    def copy(self):
        """A copy that notes in the same place."""
        return WatchedOptions(list(super().items()), self.read)


class WatchedOperators(TorchDispatchMode):
    """Notes in `reason` the first operator that makes the CPU wait for the GPU or moves values between them.

    Args:
        device_type: of the GPU.
    """

    def __init__(self, device_type: str):
        super().__init__()
        self._device_type = device_type
        self.reason: str | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # a subclass first does what it means by the operator, and that is seen then
        if any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types):
            return NotImplemented
        if self.reason is None:
            self.reason = _why_not_operator(func.name(), args, kwargs, self._device_type)
        return func(*args, **kwargs)


def _why_not_operator(full_name: str, args: tuple, kwargs: dict, device_type: str) -> str | None:
    space, _, name = full_name.partition("::")
    name = name.partition(".")[0]
    if space != "aten":
        return None
    tensors = [x for x in _flat(args) if isinstance(x, torch.Tensor)]
    on_gpu = any(x.device.type == device_type for x in tensors)
    counts = name == "repeat_interleave" and (len(args) == 1 or isinstance(args[1], torch.Tensor))
    if on_gpu and (name in _WAITS or (counts and kwargs.get("output_size") is None)):
        return f"the model waits for values from the GPU ({name})"
    if on_gpu and name == "lift_fresh":
        return "the model copies a value from the CPU to the GPU (tensor)"
    if name in ("index", "index_put", "index_put_", "_unsafe_index"):
        chosen = [x for x in args[1] if x is not None]
        # one mask and one number from Python is masked_fill
        is_fill = name != "index" and len(chosen) == 1 and args[2].dim() == 0 and args[2].device.type == "cpu"
        if on_gpu and any(x.dtype in (torch.bool, torch.uint8) for x in chosen) and not is_fill:
            return f"the model waits for values from the GPU ({name} with a mask)"
        return None
    copies = name in ("_to_copy", "copy_", "to")
    # a number in a tensor of the CPU is handed to the kernel, but not when it is copied
    devices = {x.device.type for x in tensors if copies or x.dim() or x.device.type != "cpu"}
    if copies and tensors:
        devices.update(x.type for x in (*args, *kwargs.values()) if isinstance(x, torch.device))
    return f"the model copies values between the CPU and the GPU ({name})" if len(devices) > 1 else None


def _flat(values) -> Iterator:
    for value in values:
        if isinstance(value, (list, tuple)):
            yield from _flat(value)
        else:
            yield value


class Modules:
    """What a graph relies on in the modules of one model, which is not kept alive.

    own: `forward`s that are seats of this pack.
    """

    def __init__(self, diffusion_model: torch.nn.Module, own: set[int]):
        self._own = own
        self._modules = [(type(module), module.__dict__) for module in diffusion_model.modules()]
        # the host's files take the attention they use by name, and packs replace it there
        self._attentions = [
            (vars(module), name)
            for path, module in list(sys.modules.items())
            if path.startswith("comfy.ldm.") and module is not None
            for name in vars(module)
            if name.startswith("optimized_attention")
        ]

    def facts(self) -> list[int]:
        """Identities and addresses: a graph fits while they are what they were. Raises Refused when none can fit."""
        if any(_GLOBAL_HOOKS):
            raise Refused("hooks are set on all modules")
        facts = [id(names.get(name)) for names, name in self._attentions]
        for kind, attributes in self._modules:
            reason = self._why_not(attributes)
            if reason is not None:
                raise Refused(reason)
            facts.append(id(kind.forward))
            facts += map(id, attributes["_modules"].values())
            for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
                if tensor is not None:
                    facts += _addresses(tensor)
            low_rank = attributes.get(short_way.BRANCH)
            if low_rank is not None:
                # a new stack may lie where an old one lay, with another rank
                facts += (id(low_rank), low_rank.down.data_ptr(), low_rank.up.data_ptr(), low_rank.down.shape[0])
        return facts

    def _why_not(self, attributes: dict) -> str | None:
        if "_v" in attributes:
            return "the host's dynamic VRAM holds the weights; start ComfyUI with --disable-dynamic-vram or --highvram for this"
        if attributes.get("weight_function") or attributes.get("bias_function"):
            return "a function changes weights at every call, such as a LoRA on an offloaded layer"
        if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
            return "a module of the model has hooks"
        if attributes.get("_compiled_call_impl") is not None or "_orig_mod" in attributes["_modules"]:
            return "the MODEL is compiled with torch.compile"
        if is_replaced(attributes, "forward") and id(attributes["forward"]) not in self._own:
            return "another pack replaced the forward of a module, as a bypass LoRA does"
        return None

    def why_not_on(self, device: torch.device) -> str | None:
        """Whether all weights lie on `device`, or one sentence."""
        for _, attributes in self._modules:
            for tensor in (*attributes["_parameters"].values(), *attributes["_buffers"].values()):
                if tensor is not None and tensor.device != device:
                    return f"not all weights are on the GPU: some are on {tensor.device}"
        return None


def _addresses(tensor: torch.Tensor) -> tuple[int, ...]:
    if type(tensor) in (torch.Tensor, torch.nn.Parameter):
        return id(tensor), tensor.data_ptr()
    codes, params = getattr(tensor, "_qdata", None), getattr(tensor, "_params", None)
    scale = getattr(params, "scale", None)
    found = [part.data_ptr() for part in (codes, scale) if isinstance(part, torch.Tensor)]
    return (id(tensor), id(codes), id(params), *found)
