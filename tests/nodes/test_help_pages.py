"""Each node has a help page whose lists name its inputs and outputs as its schema does.

Lists, since the help panel is too narrow for a table; tests/browser looks at that.
"""

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


def entries(text: str) -> dict[str, tuple[str, str]]:
    """The items of the section's list: name -> what is in brackets after it, and what is said of it.

    - `name` (TYPE, default 1, 0 to 8): One sentence or more.
    """
    # a line that goes on is indented
    items = re.sub(r"\n  +", " ", text).strip().splitlines()
    found = [re.fullmatch(r"- `(\w+)` \(([^)]+)\): ([A-Z`].*\.)", item) for item in items if item.startswith("- ")]
    assert all(found), items
    return {item[1]: (item[2], item[3]) for item in found}


def facts(kind: str, options: dict, required: bool) -> str:
    """What the brackets after an input must say: type, whether it may be left out, default, range, advanced."""
    words = [kind]
    if not required and "default" not in options:
        words.append("optional")
    default = options.get("default")
    if isinstance(default, bool):
        words.append(f"default {str(default).lower()}")
    elif isinstance(default, int | float):
        words.append(f"default {default:g}")
    elif default is not None:
        words.append(f"default {default or 'empty'}")
    if "min" in options:
        largest = "2^64 - 1" if options["max"] == 2**64 - 1 else f"{options['max']:g}"
        words.append(f"{options['min']:g} to {largest}")
    if options.get("advanced"):
        words.append("advanced")
    return ", ".join(words)


def test_index_and_pages_are_the_same_set():
    assert len(NODE_IDS) >= 3
    assert {path.stem for path in DOCS.glob("*.md")} == set(NODE_IDS)


@pytest.mark.comfy
@pytest.mark.parametrize("node_id", NODE_IDS)
def test_page_agrees_with_the_schema(node_id, schemas):
    schema = schemas[node_id]
    page = (DOCS / f"{node_id}.md").read_text(encoding="utf-8")
    assert page.startswith(f"# {schema['display_name']}\n")

    inputs = entries(section(page, "Inputs"))
    declared = {**schema["input"].get("required", {}), **schema["input"].get("optional", {})}
    assert list(inputs) == list(declared)
    for name, (kind, *rest) in declared.items():
        options = rest[0] if rest else {}
        shown, text = inputs[name]
        assert shown == facts(kind, options, name in schema["input"].get("required", {})), name
        choices = options.get("options", [])
        # a list of files, or of the models that the host knows, is not written out
        if kind == "COMBO" and "default" in options:
            assert choices and all(f"`{choice}`" in text for choice in choices), name

    outputs = entries(section(page, "Outputs"))
    assert list(outputs) == schema["output_name"]
    assert [kind for kind, _ in outputs.values()] == schema["output"]
    assert not re.search(r"^\|", page, re.M), "a table is wider than the help panel"


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
