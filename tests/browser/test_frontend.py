"""The pack as a user meets it: ComfyUI's frontend in a browser, on a real server.

Screenshots go to the folder NATIVE_INT8_SCREENSHOTS, else to pytest's temporary one.
"""

import json
import os
from pathlib import Path

import pytest
from packtest import ROOT, frontend

PACK = "native-int8-dit"
WORKFLOWS = sorted(path.stem for path in (ROOT / "example_workflows").glob("*.json"))
SEARCHED = {"LoadDiTNativeINT8": "Load DiT (Native INT8)", "INT8PatchModel": "INT8 Patch Model"}
DRAGGED = {"INT8CapabilityCheck": "INT8 Capability Check", "INT8SaveModel": "INT8 Save Model"}
ADDED = ("INT8TuneKernels", "INT8Benchmark", "INT8QualityReport", "LoadTextEncoderNativeINT8")
HELPED = sorted(path.stem for path in (ROOT / "nodes" / "web" / "docs").glob("*.md"))
# longer than what fits into one line of a node
STATUS = "204 layers INT8, 34 kept, kernel native_int8 on sm_86; " + "compiled for the first run, " * 9

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def browser(pack_server, tmp_path_factory):
    """The frontend, open for this file: its event loop must be gone before other tests use theirs."""
    why = frontend.missing()
    if why and os.environ.get("CI") == "true":
        pytest.fail(f"{why}; CI must have it, see .ci/chromium")
    if why:
        pytest.skip(why)
    folder = os.environ.get("NATIVE_INT8_SCREENSHOTS")
    with frontend.start(pack_server.url, Path(folder or tmp_path_factory.mktemp("screenshots")), PACK) as ui:
        yield ui


@pytest.fixture
def ui(browser):
    """The frontend with an empty canvas; a test fails when the browser reports an error of the pack's files."""
    browser.clear()
    browser.problems.clear()
    yield browser
    assert not browser.problems, "\n".join(browser.problems)


def test_search_and_library_bring_the_nodes_in(ui):
    ui.add_by_search(SEARCHED["LoadDiTNativeINT8"], 500, 300)
    ui.add_by_search(SEARCHED["INT8PatchModel"], 900, 300)
    for number, title in enumerate(DRAGGED.values()):
        ui.add_from_library(title, 700, 550 + 150 * number)
    ui.screenshot("node library")
    ui.close_library()
    assert [node["type"] for node in ui.nodes()] == [*SEARCHED, *DRAGGED]
    assert all(node["known"] and not node["error"] for node in ui.nodes())


def test_the_other_nodes_are_drawn(ui):
    for number, node_type in enumerate(ADDED):
        ui.add(node_type, 100 + 440 * (number % 3), 120 + 330 * (number // 3))
    ui.view(0, 0, 1)
    ui.screenshot("other nodes")
    assert [node["type"] for node in ui.nodes()] == list(ADDED)
    assert all(node["known"] for node in ui.nodes())


@pytest.mark.parametrize("name", WORKFLOWS)
def test_workflow_opens_and_lacks_model_files_at_most(ui, name):
    stored = json.loads((ROOT / "example_workflows" / f"{name}.json").read_text(encoding="utf-8"))
    lists = [*stored["nodes"], *(n for sub in stored.get("definitions", {}).get("subgraphs", []) for n in sub["nodes"])]
    files = {model["name"] for node in lists for model in node.get("properties", {}).get("models", [])}
    ui.open_workflow(PACK, name)
    if files:
        ui.page.get_by_test_id("panel-tab-errors").or_(ui.page.get_by_text("View details")).first.wait_for()
    groups = ui.error_groups()
    ui.screenshot(f"workflow {name}")
    nodes = ui.nodes()
    assert sorted(node["type"] for node in nodes) == sorted(node["type"] for node in stored["nodes"])
    assert all(node["known"] for node in nodes), nodes
    assert set(groups) == ({"missing-model"} if files else set())
    for file in files:
        assert file in groups["missing-model"]
    # each missing file has a link that the frontend accepts
    assert ui.page.get_by_test_id("missing-model-download").count() == len(files)
    # nodes grow by the text that they show
    ui.show_text(frontend.HEIGHT_WITH_TEXT, STATUS)
    assert ui.overlaps() == []


def test_nodes_with_their_text_are_as_tall_as_the_layout_of_the_workflows_takes_them_to_be(ui):
    for number, node_type in enumerate(frontend.HEIGHT_WITH_TEXT):
        ui.add(node_type, 400 * number, 0)
    assert ui.show_text(frontend.HEIGHT_WITH_TEXT, STATUS) == frontend.HEIGHT_WITH_TEXT


@pytest.mark.parametrize("node_type", HELPED)
def test_help_panel_renders_the_page(ui, node_type):
    page = (ROOT / "nodes" / "web" / "docs" / f"{node_type}.md").read_text(encoding="utf-8")
    ui.add(node_type, 300, 300)
    shown = ui.help_page(node_type)
    ui.screenshot(f"help {node_type}")
    for line in page.splitlines():
        if line.startswith("#"):
            assert line.lstrip("# ") in shown, line
    assert ui.cut_off_in_help() == []
    # a list is a list and not its source
    assert "- `" not in shown and ui.page.locator(".markdown-content li").count() >= 2


def test_benchmark_and_quality_show_report_and_plots(ui):
    ui.open_template(PACK, "INT8 quality and speed")
    ui.set_widgets(steps=2, protect_below=100, resolutions="128x128")
    ui.run()
    texts = ui.wait_for_texts()
    pictures = ui.wait_for_pictures("PreviewImage")
    for words in ("28 INT8 layers: worst", "PSNR", "128x128; rows seen in a forward", "Amdahl"):
        assert any(words in text for text in texts), words
    assert any(text.count(", ") == 27 for text in texts), "the list of layers to protect"
    assert all(width >= 500 and height >= 300 for width, height in pictures)
    assert "a step is" in ui.text_on_node("INT8Benchmark")
    ui.close_panel()
    ui.page.mouse.move(700, 20)
    ui.fit()
    ui.screenshot("quality and speed")
    plot = next(node for node in ui.nodes() if node["type"] == "PreviewImage")
    ui.view(plot["x"] - 420, plot["y"] - 120, 0.8)
    ui.screenshot("quality report")


def test_emoji_is_drawn_on_int8(ui):
    ui.open_template(PACK, "Emoji demo - float and INT8")
    ui.set_widgets(steps=2)
    ui.run()
    assert ui.wait_for_pictures("SaveImage") == [(128, 128)] * 3
    assert "layers INT8" in ui.text_on_node("LoadDiTNativeINT8")
    assert "layers INT8" in ui.text_on_node("INT8PatchModel")
    # nodes grow by the text that they show
    assert ui.overlaps() == []
    ui.close_panel()
    ui.fit()
    ui.screenshot("emoji demo")
    loader = next(node for node in ui.nodes() if node["type"] == "LoadDiTNativeINT8")
    ui.view(loader["x"] - 100, loader["y"] - 150, 1)
    ui.screenshot("loader")


def test_capability_report_in_html_nodes(ui):
    ui.vue_nodes(True)
    try:
        ui.open_template(PACK, "INT8 capability check")
        ui.run()
        ui.page.get_by_text("Path of each kind of layer").first.wait_for(timeout=60_000)
        for node_type in ("INT8CapabilityCheck", "LoadDiTNativeINT8"):
            ui.add(node_type, 0, 900)
        ui.page.get_by_text("Load DiT (Native INT8)").first.wait_for(state="attached")
        ui.fit()
        ui.screenshot("capability report in HTML nodes")
    finally:
        ui.vue_nodes(False)
