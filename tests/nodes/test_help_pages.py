"""Each node has a help page whose tables name its inputs and outputs as its schema does."""

import re

import pytest
from packtest import ROOT

DOCS = ROOT / "nodes" / "web" / "docs"
INDEX = (ROOT / "nodes" / "extension.py").read_text(encoding="utf-8")
NODE_IDS = re.search(r"return \[(.*?)\]", INDEX, re.S).group(1).replace(",", " ").split()


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert found, f"no section {title}"
    return found.group(1)


def rows(text: str) -> dict[str, list[str]]:
    """The rows of the section's table: name -> other cells."""
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return {row[0].strip("`"): row[1:] for row in cells[2:]}


def test_index_and_pages_are_the_same_set():
    assert len(NODE_IDS) >= 3
    assert {path.stem for path in DOCS.glob("*.md")} == set(NODE_IDS)


@pytest.mark.comfy
@pytest.mark.parametrize("node_id", NODE_IDS)
def test_page_agrees_with_the_schema(node_id, schemas):
    schema = schemas[node_id]
    page = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schema['display_name']}\n")

    inputs = rows(section(page, "Inputs"))
    declared = {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}
    assert list(inputs) == list(declared)
    for name, (kind, *rest) in declared.items():
        expected = "COMBO" if isinstance(kind, list) else kind
        assert inputs[name][0] == expected, name
        default = (rest[0] if rest else {}).get("default")
        if isinstance(default, bool):
            assert inputs[name][1] == str(default).lower(), name

    outputs = rows(section(page, "Outputs"))
    assert list(outputs) == schema["output_name"]
    assert [cells[0] for cells in outputs.values()] == schema["output"]


@pytest.mark.comfy
@pytest.mark.parametrize("node_id", NODE_IDS)
def test_every_input_and_output_has_a_tooltip(node_id, schemas):
    schema = schemas[node_id]
    assert schema["description"]
    assert schema["category"] == "model/int8"
    for kinds in ("required", "optional"):
        for name, (_, *rest) in schema["input"].get(kinds, {}).items():
            assert rest and rest[0].get("tooltip"), name
    assert all(schema["output_tooltips"] or []) and len(schema["output_tooltips"] or []) == len(schema["output"])


@pytest.mark.comfy
@pytest.mark.parametrize("node_id", NODE_IDS)
def test_every_node_is_found_by_other_words(node_id, schemas):
    aliases = schemas[node_id]["search_aliases"]
    assert len(set(aliases)) == len(aliases) >= 4
    assert all(
        alias == alias.lower().strip() and alias != schemas[node_id]["display_name"].lower() for alias in aliases
    )
    # people look for what the pack is about, not for its name
    assert any("int8" in alias or "quanti" in alias for alias in aliases)
