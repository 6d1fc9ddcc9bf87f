"""What must hold before a fused block may run in place of the host's: the host's own source, and nobody else's hands in it.

A fused block repeats what the source of the host's methods says. So their source is compared, without comments and
layout, with the versions that the block was written for; and before each call the modules are looked through for what
other packs attach to them.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import io
import textwrap
import tokenize
import types

import torch
from torch.nn.modules import module as torch_module

from ..seats import is_replaced

_LAYOUT = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_GLOBAL_HOOKS = tuple(
    getattr(torch_module, name)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    if hasattr(torch_module, name)
)


@functools.cache
def fingerprint(function) -> str:
    """16 hex digits that change with the tokens of a function's source, but not with comments or layout.

    Raises OSError or TypeError when the source cannot be read.
    """
    source = inspect.getsource(function)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    text = " ".join(token.string for token in tokens if token.type not in _LAYOUT)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def why_unknown(owner: type | types.ModuleType, known: dict[str, frozenset[str]]) -> str | None:
    """None when the source of each function of a class or Python module is one of the fingerprints known for it."""
    for name, fingerprints in known.items():
        function = getattr(owner, name, None)
        where = _where(owner, name)
        if not getattr(function, "__module__", "").startswith("comfy."):
            return f"another pack replaced {where}"
        try:
            found = fingerprint(function)
        except (OSError, TypeError, SyntaxError, tokenize.TokenError) as error:
            return f"the source of {where} cannot be read ({type(error).__name__})"
        if found not in fingerprints:
            return f"{where} of this ComfyUI is another than the known ones ({found})"
    return None


def _where(owner: type | types.ModuleType, name: str) -> str:
    return f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"


@functools.cache
def why_reads_more(module_class: type, method: str, argument: str, children: tuple[str, ...]) -> str | None:
    """None when the source shows that `method` reads `argument` as `argument.shape` and in `self.child(argument)` only.

    Then it may be called with a stand-in of the same shape, once the children know what the stand-in stands for.
    """
    function = getattr(module_class, method, None)
    where = f"{module_class.__qualname__}.{method}"
    if not getattr(function, "__module__", "").startswith("comfy."):
        return f"another pack replaced {where}"
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        return f"the source of {where} cannot be read ({type(error).__name__})"
    allowed = 0
    for node in ast.walk(tree):
        if type(node) is ast.Attribute and _is_name(node.value, argument) and node.attr == "shape":
            allowed += 1
        if type(node) is ast.Call and len(node.args) == 1 and not node.keywords and _is_name(node.args[0], argument):
            called = node.func
            allowed += type(called) is ast.Attribute and called.attr in children and _is_name(called.value, "self")
    if allowed != sum(_is_name(node, argument) for node in ast.walk(tree)):
        return f"{where} reads {argument} in another place than {', '.join(children)}"
    return None


def _is_name(node, name: str) -> bool:
    return type(node) is ast.Name and node.id == name


class Watched:
    """The modules and methods that a fused block passes over, as they were when they were checked.

    Args:
        parents: modules whose children must stay the same.
        modules: modules whose own forward the fused block does not call, or calls with a stand-in.
        methods: (class or Python module, name) of host functions that must not be replaced.
    """

    __slots__ = ("_attributes", "_children", "_methods", "_parents", "_remembered")

    def __init__(self, parents, modules, methods):
        self._parents = [parent._modules for parent in parents]
        self._children = [child for children in self._parents for child in children.values()]
        self._attributes = [module.__dict__ for module in modules]
        self._methods = [(kind, name, getattr(kind, name)) for kind, name in methods]
        self._remembered = "it was not looked at"

    def remember(self) -> None:
        """Look now, for what is traced until the next time: a compiler would look once and never again."""
        self._remembered = self.why_foreign()

    def why_foreign(self) -> str | None:
        """None while nobody changed or hooked any of them; costs a few microseconds."""
        if torch.compiler.is_compiling():
            return self._remembered
        if [child for children in self._parents for child in children.values()] != self._children:
            return "a module of the block was replaced"
        for attributes in self._attributes:
            if "forward" in attributes and is_replaced(attributes, "forward"):
                return "a module of the block has another forward, such as that of a bypass LoRA"
            if attributes["_forward_hooks"] or attributes["_forward_pre_hooks"]:
                return "a module of the block has hooks"
        for kind, name, function in self._methods:
            if getattr(kind, name, None) is not function:
                return f"another pack replaced {_where(kind, name)}"
        if any(_GLOBAL_HOOKS):
            return "hooks are set on all modules"
        return None


def affine(norm: torch.nn.Module, like: torch.Tensor) -> tuple[torch.Tensor, tuple | None] | str:
    """The weight of a norm of the host in the dtype and on the device of `like`, and what `release` needs; or why not."""
    found = affine_pair(norm, like)
    return found if isinstance(found, str) else (found[0], found[2])


def affine_pair(
    norm: torch.nn.Module, like: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None, tuple | None] | str:
    """`affine` with the norm's bias, or None, between the two."""
    import comfy.ops

    weight, bias = (norm._parameters.get(name) for name in ("weight", "bias"))
    if weight is None:
        return "a norm has no weight"
    as_they_are = all(t is None or (t.dtype == like.dtype and t.device == like.device) for t in (weight, bias))
    functions = norm.weight_function or (bias is not None and norm.bias_function)
    if as_they_are and "_v" not in norm.__dict__ and not functions:
        return weight, bias, None
    if not norm.comfy_cast_weights and not functions:
        return "a norm computes in another dtype"
    cast, cast_bias, stream = comfy.ops.cast_bias_weight(norm, like, offloadable=True)
    loan = (norm, cast, cast_bias, stream)
    if stream is None or stream[0] is None:
        return cast, cast_bias, loan
    # on a stream of its own the host casts into one of few buffers, and overwrites it while we still read
    cast, cast_bias = (None if t is None else t.clone() for t in (cast, cast_bias))
    release(loan)
    return cast, cast_bias, None


def release(borrowed: tuple | None) -> None:
    """Tell the host that a weight from `affine` was used for the last time."""
    if borrowed is not None:
        import comfy.ops

        comfy.ops.uncast_bias_weight(*borrowed)
