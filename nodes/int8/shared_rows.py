"""Linears that read the same tensor share its quantised rows: q, k and v of an attention, gate and up of a SwiGLU.

That two Linears in a row get the same tensor object does not prove that they read the same values: `x += y` in between
keeps the object, and tensors of inference mode count no versions. So rows are shared inside the host's classes of `TABLE`
only, where the host's code shows that nothing changes the tensor between the calls. The code is read again in the
host that runs: a class whose method changed in a way that no longer shows it is left alone, with the reason.

The rows are kept by the thread's run and never by a module, since threads share modules; and no longer than from the first
member of a group to its last, or to the next Linear outside it. The caller holds the tensor itself for as long, so what it
costs is one byte per value until the last member has run.
"""

from __future__ import annotations

import ast
import functools
import inspect
import textwrap
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

import torch

HOST = "comfy."
# class of the host -> (method, groups of children in the order in which the method calls them)
TABLE: dict[str, tuple[str, tuple[tuple[str, ...], ...]]] = {
    "ldm.cosmos.predict2.Attention": ("compute_qkv", (("q_proj", "k_proj", "v_proj"),)),
    "ldm.aura.mmdit.SingleAttention": ("forward", (("w1q", "w1k", "w1v"),)),
    "ldm.aura.mmdit.DoubleAttention": ("forward", (("w1q", "w1k", "w1v"), ("w2q", "w2k", "w2v"))),
    "ldm.boogu.model.BooguDoubleStreamProcessor": (
        "forward",
        (("img_to_q", "img_to_k", "img_to_v"), ("instruct_to_q", "instruct_to_k", "instruct_to_v")),
    ),
    "ldm.ernie.model.ErnieImageAttention": ("forward", (("to_q", "to_k", "to_v"),)),
    "ldm.ernie.model.ErnieImageFeedForward": ("forward", (("up_proj", "gate_proj"),)),
    "ldm.flux.layers.YakMLP": ("forward", (("gate_proj", "up_proj"),)),
    "ldm.hidream.model.FeedForwardSwiGLU": ("forward", (("w1", "w3"),)),
    "ldm.krea2.model.Attention": ("forward", (("wq", "wk", "wv", "gate"),)),
    "ldm.krea2.model.SwiGLU": ("forward", (("gate", "up"),)),
    "ldm.lens.model.GateMLP": ("forward", (("w1", "w3"),)),
    # self-attentions and cross-attentions are one class: a tensor that is not the one before is quantised anew
    "ldm.lightricks.model.CrossAttention": ("forward", (("to_q", "to_k", "to_v"),)),
    # Ideogram 4 and Z-Image
    "ldm.lumina.model.FeedForward": ("forward", (("w1", "w3"),)),
    "ldm.omnigen.omnigen2.Attention": ("forward", (("to_q", "to_k", "to_v"),)),
    "ldm.omnigen.omnigen2.LuminaFeedForward": ("forward", (("linear_1", "linear_3"),)),
    "ldm.qwen_image.model.Attention": (
        "forward",
        (("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj")),
    ),
    "ldm.wan.ar_model.CausalWanSelfAttention": ("forward", (("q", "k", "v"),)),
    "ldm.wan.model.WanSelfAttention": ("forward", (("q", "k", "v"),)),
    "ldm.wan.model.WanT2VCrossAttention": ("forward", (("k", "v"),)),
    "ldm.wan.model.WanI2VCrossAttention": ("forward", (("k", "v"), ("k_img", "v_img"))),
    "ldm.wan.model.WanT2VCrossAttentionGather": ("forward", (("k", "v"),)),
    # text encoders
    "text_encoders.llama.Attention": ("forward", (("q_proj", "k_proj", "v_proj"),)),
    "text_encoders.llama.MLP": ("forward", (("gate_proj", "up_proj"),)),
    "text_encoders.t5.T5Attention": ("forward", (("q", "k", "v"),)),
    "text_encoders.t5.T5DenseGatedActDense": ("forward", (("wi_0", "wi_1"),)),
}


class Group:
    """Linears that read the same tensor. kept: (tensor, its rows) while torch.compile traces them (traced.py)."""

    def __init__(self):
        self.kept: tuple | None = None


class Place(NamedTuple):
    """Where a Linear stands in its group. host: the method that was read, to see whether it is still the one that runs."""

    group: Group
    position: int
    is_last: bool
    host: _Method


class _Method:
    """A method of one module of the host, which other packs may replace on the module or on its class."""

    __slots__ = ("_attributes", "_class", "_function", "_name")

    def __init__(self, module: torch.nn.Module, name: str):
        self._attributes, self._class, self._name = module.__dict__, type(module), name
        self._function = getattr(type(module), name)

    def is_the_hosts(self) -> bool:
        return self._name not in self._attributes and getattr(self._class, self._name, None) is self._function


class _Kept(NamedTuple):
    group: Group
    position: int
    input: torch.Tensor
    kind: tuple
    rows: torch.Tensor | tuple


class Given:
    """Rows that a fused block made for Linears, which are called with another tensor of the same shape and dtype.

    Args:
        stand_in: that tensor; what it holds is not read.
        rows: the quantised input, of `kind` (see PreparedLinear.rows_kind).
        make: returns the input itself, for a Linear that cannot take the rows.
    Attributes: used: how often the rows or the input were taken; a Linear that took neither read the stand-in.
    """

    __slots__ = ("_input", "_make", "kind", "rows", "stand_in", "used")

    def __init__(
        self, stand_in: torch.Tensor, rows: torch.Tensor | tuple, kind: tuple, make: Callable[[], torch.Tensor]
    ):
        self.stand_in, self.rows, self.kind = stand_in, rows, kind
        self._make, self._input, self.used = make, None, 0

    def input(self) -> torch.Tensor:
        """The input itself, made once."""
        if self._input is None:
            self._input = self._make()
        return self._input


class SharedRows:
    """The rows that one run of a MODEL keeps at the moment, and how often it could spare quantising.

    given: rows that a fused block has made, for as long as it calls their Linears.
    spared: Linears that took rows which were there. not_shared: why groups of a listed class are not -> Linears.
    """

    __slots__ = ("_kept", "given", "not_shared", "spared")

    def __init__(self):
        self._kept: _Kept | None = None
        self.given: Given | None = None
        self.spared = 0
        self.not_shared: Counter[str] = Counter()

    def run(self, place: Place | None, prepared, input, weight, weight_scale, bias, low_rank=None) -> torch.Tensor:
        """Call `prepared` (a PreparedLinear) with the rows of an earlier member, or keep its rows for a later one."""
        given = self.given
        if given is not None and given.stand_in is input:
            given.used += 1
            if prepared.rows_kind == given.kind:
                self.spared += 1
                x = input if low_rank is None else given.input()
                return prepared.with_rows(x, weight, weight_scale, bias, given.rows, low_rank)[0]
            input = given.input()
        kept, self._kept = self._kept, None
        if place is None:
            return prepared.with_rows(input, weight, weight_scale, bias, None, low_rank)[0]
        group, position, is_last, host = place
        rows = None
        if (
            kept is not None
            and kept.group is group
            and kept.input is input
            and kept.kind is prepared.rows_kind
            # a member that comes round again starts anew: its input may have changed since
            and kept.position < position
        ):
            rows = kept.rows
            self.spared += 1
        y, rows = prepared.with_rows(input, weight, weight_scale, bias, rows, low_rank)
        if not is_last and rows is not None and host.is_the_hosts():
            self._kept = _Kept(group, position, input, prepared.rows_kind, rows)
        return y

    def pass_by(self, place: Place | None) -> None:
        """A Linear at `place` runs another way; forget the rows unless later members can still use them."""
        if self._kept is not None and (place is None or place.is_last or place.group is not self._kept.group):
            self._kept = None

    def real(self, input: torch.Tensor) -> torch.Tensor:
        """What a Linear multiplies that is called with `input`, which may be the stand-in of a fused block."""
        given = self.given
        if given is None or given.stand_in is not input:
            return input
        given.used += 1
        return given.input()

    def forget(self) -> None:
        """Let go of what is kept."""
        self._kept = self.given = None


def find(root: torch.nn.Module, is_member: Callable[[torch.nn.Module], bool]) -> tuple[dict[int, Place], Counter[str]]:
    """The groups inside `root`.

    Args:
        is_member: whether a child can share rows at all; a group of fewer than two such children is none.
    Returns:
        id of a Linear -> its place; reason why groups of a listed class are not shared -> their Linears.
    """
    places: dict[int, Place] = {}
    unknown: Counter[str] = Counter()
    for parent in root.modules():
        name = _name_of(type(parent))
        if name not in TABLE:
            continue
        method, groups = TABLE[name]
        for names in groups:
            children = [parent._modules.get(child) for child in names]
            members = [child for child in children if child is not None and is_member(child)]
            if len(members) < 2:
                continue
            reason = "its children have other names" if None in children else why_unknown(type(parent), method, names)
            if reason is None and any(id(child) in places for child in members):
                reason = "its children belong to another module, too"
            if reason is not None:
                unknown[f"{HOST}{name} is not known here: {reason}"] += len(members)
                continue
            group, host = Group(), _Method(parent, method)
            for position, child in enumerate(members):
                places[id(child)] = Place(group, position, position == len(members) - 1, host)
    return places, unknown


def _name_of(module_class: type) -> str | None:
    name = f"{module_class.__module__}.{module_class.__qualname__}"
    return name.removeprefix(HOST) if name.startswith(HOST) else None


def why_unknown(module_class: type, method: str, names: tuple[str, ...]) -> str | None:
    """None if the source of `method` shows that the Linears `names` see an unchanged tensor, else why it does not.

    Shown is: each is called once, in this order, with one variable; and from the first call to the last nothing changes a
    local variable in place or hands the variables to a function that is not seen. That they are the same tensor is not
    shown here but seen when it runs.
    """
    function = getattr(module_class, method, None)
    if function is None:
        return f"it has no method {method}"
    if not getattr(function, "__module__", "").startswith(HOST):
        return f"another pack replaced its {method}"
    return _why_unproven(function, names)


@functools.cache
def _why_unproven(function, names: tuple[str, ...]) -> str | None:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        return f"its source cannot be read ({type(error).__name__})"
    nodes = list(ast.walk(tree))
    calls = [node for name in names for node in nodes if _is_call_of(node, name)]
    if [node.func.attr for node in calls] != list(names):
        return f"{function.__qualname__} does not call each of {', '.join(names)} once"
    if not all(len(node.args) == 1 and type(node.args[0]) is ast.Name and not node.keywords for node in calls):
        return f"{function.__qualname__} calls one of {', '.join(names)} with more than one variable"
    starts = [(node.lineno, node.col_offset) for node in calls]
    if starts != sorted(starts):
        return f"{function.__qualname__} calls {', '.join(names)} in another order"
    end = calls[-1].end_lineno, calls[-1].end_col_offset
    between = [node for node in nodes if hasattr(node, "lineno") and _overlaps(node, starts[0], end)]
    variables = {node.id for node in nodes if type(node) is ast.Name and type(node.ctx) is ast.Store}
    variables |= {node.arg for node in nodes if type(node) is ast.arg}
    variables.discard("self")
    seen = {node.name for node in nodes if type(node) is ast.FunctionDef}
    inputs = {node.args[0].id for node in calls}
    for node in between:
        if node not in calls and _may_change(node, variables, inputs, seen):
            return f"line {node.lineno} of {function.__qualname__} may change the input"
    return None


def _overlaps(node, start: tuple[int, int], end: tuple[int, int]) -> bool:
    return (node.lineno, node.col_offset) < end and (node.end_lineno, node.end_col_offset) > start


def _is_call_of(node, name: str) -> bool:
    return (
        type(node) is ast.Call
        and type(node.func) is ast.Attribute
        and node.func.attr == name
        and type(node.func.value) is ast.Name
        and node.func.value.id == "self"
    )


def _may_change(node, variables: set[str], inputs: set[str], seen: set[str]) -> bool:
    """Whether `node` changes a variable in place, or gives an input to a function whose source is not part of this."""
    if type(node) is ast.AugAssign:
        return _root(node.target) in variables
    if type(node) is ast.Assign:
        return any(type(target) is ast.Subscript and _root(target) in variables for target in node.targets)
    if type(node) is not ast.Call:
        return False
    name = node.func.attr if type(node.func) is ast.Attribute else getattr(node.func, "id", "")
    arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
    if name.endswith("_") and _root(node.func) in variables:
        return True
    in_place = name.endswith("_") or any(keyword.arg in ("out", "inplace") for keyword in node.keywords)
    if in_place and any(_root(argument) in variables for argument in arguments):
        return True
    given = {argument.id for argument in arguments if type(argument) is ast.Name}
    return name not in seen and bool(given & inputs)


def _root(node) -> str | None:
    """The variable that an expression such as `x.view(-1)[0]` starts from."""
    while type(node) in (ast.Attribute, ast.Subscript, ast.Call, ast.Starred):
        node = node.func if type(node) is ast.Call else node.value
    return node.id if type(node) is ast.Name else None
