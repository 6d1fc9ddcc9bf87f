"""What the fused forms of all kinds of blocks have in common: which inputs they take, and arguments of the kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch

from ....kernels.residual_norm import Branch, Norm, modulated_norm_torch, residual_norm
from .. import short_way
from ..shared_rows import Given

NOT_TAKEN = "a Linear did not take the rows that were made for it"


def owner(module: torch.nn.Module, where: str):
    """The class of the block ("") or of a child by its path, or a Python module of the host by its name."""
    if where.startswith("comfy."):
        return importlib.import_module(where)
    return type(module.get_submodule(where))


def why_not_int8(linears: Iterable[tuple[str, torch.nn.Module | None]]) -> str | None:
    """None when all of the named children are INT8 Linears that take rows."""
    float_ones = [name for name, linear in linears if linear is None or not short_way.is_known(linear)]
    return f"{' and '.join(float_ones)} of a block are not INT8" if float_ones else None


def kinds_of(groups: Iterable[Iterable[torch.nn.Module]], device: torch.device) -> list[tuple] | str:
    """The kind of rows that the Linears of each group read, or one sentence that says why they cannot share rows."""
    found = []
    for linears in groups:
        kinds = {short_way.rows_kind(linear, device) for linear in linears}
        if None in kinds:
            return "another pack replaced what a Linear of the block multiplies with"
        if len(kinds) > 1:
            return "Linears that read the same tensor are quantised differently"
        found += kinds
    return found


def read(
    run: short_way.Run,
    linears: Sequence[torch.nn.Module],
    x: torch.Tensor,
    rows: torch.Tensor | tuple,
    kind: tuple,
    make: Callable[[], torch.Tensor],
) -> list[torch.Tensor] | str:
    """What Linears make of rows that were quantised for them, or a sentence.

    Args:
        x: what they are called with, of the shape and dtype of their input; not read.
        rows: their quantised input, of `kind`.
        make: returns the input itself, for a Linear that cannot take rows.
    """
    return called(run, lambda x: [linear(x) for linear in linears], len(linears), x, rows, kind, make)


def called(
    run: short_way.Run,
    attend: Callable[[torch.Tensor], torch.Tensor | list[torch.Tensor]],
    readers: int,
    x: torch.Tensor,
    rows: torch.Tensor | tuple,
    kind: tuple,
    make: Callable[[], torch.Tensor],
) -> torch.Tensor | list[torch.Tensor] | str:
    """What `attend` makes of x as a stand-in, whose rows so many Linears in it read; or a sentence. Otherwise as `read`."""
    given = run.shared.given = Given(x, rows, kind, make)
    y = attend(x)
    run.shared.given = None
    return y if given.used == readers else NOT_TAKEN


def options(kind: tuple) -> dict:
    """What a kernel that makes rows of `kind` (short_way.rows_kind) is told."""
    return {"rotation_group": kind[3], "implementation": kind[1]}


def why_unfit(x: torch.Tensor, dtypes: tuple = (torch.bfloat16, torch.float32)) -> str | None:
    """None for an input that fused blocks take. Most hosts' blocks clamp float16 in between, so that it is not among dtypes."""
    import comfy.model_management

    if type(x) is not torch.Tensor or x.dim() != 3 or not x.is_contiguous() or not x.numel():
        return "the input is no plain tensor of tokens"
    if x.dtype not in dtypes:
        return f"the input is {x.dtype}"
    if x.requires_grad or comfy.model_management.in_training:
        return "the MODEL is in training"
    return None


def by_row(modulation: torch.Tensor, count: int, x: torch.Tensor) -> torch.Tensor | str:
    """[B, count K] or [B, 1 or L, count K] as [rows, count, K]: one row for all, for each image or for each token.

    One sentence when it is none of these for x [B, L, K].
    """
    batch, tokens, width = x.shape
    leading = tuple(modulation.shape[:-1])
    fits = leading in ((1,), (batch,), (1, 1), (batch, 1), (batch, tokens)) and modulation.shape[-1] == count * width
    if not fits or modulation.dtype != x.dtype or modulation.device != x.device:
        return f"the modulation is {modulation.dtype} {tuple(modulation.shape)} beside {x.dtype} {tuple(x.shape)}"
    return modulation.reshape(-1, count, width)


def room_for_input(readers: Iterable[torch.nn.Module], like: torch.Tensor, columns: int) -> torch.Tensor | None:
    """Memory for what `readers` read, [..., columns], of the dtype and rows of `like`, if a LoRA beside one will ask for it.

    None otherwise: a pass then writes nothing that nobody reads.
    """
    # a graph makes the input by itself
    if torch.compiler.is_compiling() or all(short_way.low_rank_of(linear) is None for linear in readers):
        return None
    return like.new_empty((*like.shape[:-1], columns))


def begin(
    readers: Iterable[torch.nn.Module], x: torch.Tensor, branch: Branch | None, norm: Norm, kind: tuple
) -> tuple[torch.Tensor, torch.Tensor | tuple, Callable[[], torch.Tensor]]:
    """`residual_norm` for the Linears `readers`.

    Returns:
        x', the rows of `kind` that they read, and what returns their input in float, for LoRAs and Linears without rows.
    """
    kept = room_for_input(readers, x, x.shape[-1])
    x, rows = residual_norm(x, branch, norm, kept=kept, **options(kind))
    return x, rows, partial(_normed, x, norm) if kept is None else lambda: kept


def _normed(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    return modulated_norm_torch(x.view(-1, x.shape[-1]), norm).view(x.shape)
