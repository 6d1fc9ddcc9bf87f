"""Files that hold two models of one kind, for guidance: which of them is loaded."""

from dataclasses import replace

from ..checkpoint import CheckpointError, Header

BRANCHES = ("auto", "conditional", "unconditional")
# Transformer Lab's Ideogram 4, and its GGUF twin
_WORDS = {"conditional": ("conditional.", "cond."), "unconditional": ("unconditional.", "uncond.")}


def choose_branch(header: Header, branch: str = "auto") -> tuple[Header, list[str]]:
    """The header of one branch, with names without the branch word, and notes.

    Args:
        branch: "auto" for the conditional branch of a file with both, or a branch by name.
    Raises:
        CheckpointError: the file has no such branch, or tensors outside its branches.
    """
    if branch not in BRANCHES:
        raise ValueError(f"branch is {branch!r}; {', '.join(BRANCHES)} is needed.")
    words = {
        kind: next((w for w in spellings if any(n.startswith(w) for n in header.tensors)), None)
        for kind, spellings in _WORDS.items()
    }
    there = [kind for kind, word in words.items() if word]
    inside = sum(name.startswith(tuple(w for w in words.values() if w)) for name in header.tensors) if there else 0
    if not there or inside < len(header.tensors) / 2:
        if branch != "auto":
            raise CheckpointError(
                f"{header.path}: has no {branch} branch: its names carry no branch. A file with both branches is needed; "
                "set branch to auto."
            )
        return header, []
    chosen = there[0] if branch == "auto" else branch
    if chosen not in there:
        raise CheckpointError(
            f"{header.path}: holds the {there[0]} branch only. The {branch} branch was asked for; set branch to auto or "
            f"{there[0]}."
        )
    word = words[chosen]
    taken = {name.removeprefix(word): info for name, info in header.tensors.items() if name.startswith(word)}
    others = tuple(w for kind, w in words.items() if w and kind != chosen)
    rest = tuple(
        header.key(name) for name in header.tensors if not name.startswith(word) and not name.startswith(others or " ")
    )
    notes = []
    if len(there) > 1:
        other = next(kind for kind in there if kind != chosen)
        notes.append(
            f"The file holds two models; the {chosen} one was loaded. For the other use a second loader with branch "
            f"{other}."
        )
    return replace(header, tensors=taken, prefix=header.prefix + word, rest=(*header.rest, *rest)), notes
