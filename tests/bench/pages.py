"""Markdown that programs write: tables, and named sections of a page between two comment lines."""

from __future__ import annotations

from pathlib import Path


def table(columns: list[str], rows: list[list], left: int = 1) -> str:
    """A Markdown table; the first `left` columns are aligned to the left, numbers in the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(columns) - left)
    lines = [columns, rule, *[[str(cell) for cell in row] for row in rows]]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def replace_section(page: Path, name: str, text: str) -> None:
    """Put `text` between the page's lines "<!-- NAME:begin -->" and "<!-- NAME:end -->".

    Raises:
        ValueError: the page has no such section.
    """
    old = page.read_text()
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    if begin not in old or end not in old:
        raise ValueError(f"{page}: no section {name!r}. Needed: the lines {begin} and {end}. Add them to the page.")
    head, _, rest = old.partition(begin)
    _, _, tail = rest.partition(end)
    page.write_text(f"{head}{begin}\n{text.strip()}\n{end}{tail}")
