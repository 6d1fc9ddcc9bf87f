"""Takes the pictures of the example workflows that ComfyUI's template browser shows.

PYTHONPATH=tests/support python -m packtest.thumbnails "INT8 quality and speed"    (all without a name)

A workflow of the demo's model is run first, which takes minutes on a CPU, so that its plots and pictures are there; for
the others empty files stand in for the models, which are only listed.
"""

import json
import sys
import tempfile
from pathlib import Path

from PIL import Image

from . import ROOT, frontend, server

FOLDER = ROOT / "example_workflows"
EMOJI_MODEL = "emoji_flux2_dit_bf16.safetensors"
WIDTH = 960
# pixels of the page that menus do not cover
LEFT, TOP = 100, 120
# a graph that is not run is shown from its left, in letters that can be read
SMALLEST_SCALE = 0.5


def main(names: list[str]) -> None:
    names = names or sorted(path.stem for path in FOLDER.glob("*.json"))
    texts = {name: (FOLDER / f"{name}.json").read_text(encoding="utf-8") for name in names}
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        for text in texts.values():
            for node in _nodes(json.loads(text)):
                for model in node.get("properties", {}).get("models", []):
                    _put(base / "models" / model["directory"] / model["name"])
        emoji = base / "models" / "diffusion_models" / EMOJI_MODEL
        emoji.parent.mkdir(parents=True, exist_ok=True)
        emoji.symlink_to(ROOT / "tests" / "demo" / "data" / EMOJI_MODEL)
        packs = {"native-int8-dit": ROOT, "emoji_pack": ROOT / "tests" / "demo" / "emoji_pack"}
        with server.start(base, packs) as comfy, frontend.start(comfy.url, base, "native-int8-dit") as ui:
            ui.page.set_viewport_size({"width": WIDTH + 300, "height": 1400})
            for name, text in texts.items():
                runs = EMOJI_MODEL in text or "INT8CapabilityCheck" in text
                _take(ui, name, runs).save(FOLDER / f"{name}.jpg", quality=88)


def _nodes(workflow: dict) -> list[dict]:
    inner = workflow.get("definitions", {}).get("subgraphs", [])
    return [node for graph in [workflow, *inner] for node in graph["nodes"]]


def _put(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()


def _take(ui: frontend.Frontend, name: str, runs: bool) -> Image.Image:
    ui.page.evaluate("app.graph.clear()")
    ui.open_workflow("native-int8-dit", name)
    if runs:
        ui.fit()
        ui.run()
        for node_type in ("PreviewImage", "SaveImage"):
            ui.wait_for_pictures(node_type, 900)
        # texts come with the pictures
        ui.page.wait_for_timeout(5000)
    ui.close_panel()
    left, top, right, bottom = ui.page.evaluate(
        """() => {const b = app.graph._nodes.map(n => [...n.pos, n.pos[0] + n.size[0], n.pos[1] + n.size[1]]);
           return [0, 1, 2, 3].map(i => (i < 2 ? Math.min : Math.max)(...b.map(box => box[i])))}"""
    )
    margin, title = 20, 30
    left, top, right, bottom = left - margin, top - margin - title, right + margin, bottom + margin
    scale = WIDTH / (right - left)
    if not runs:
        scale = max(scale, SMALLEST_SCALE)
    canvas = ui.page.locator("#graph-canvas").bounding_box()
    ui.view(left - (LEFT - canvas["x"]) / scale, top - (TOP - canvas["y"]) / scale, scale)
    ui.page.mouse.move(WIDTH + 200, 1200)
    # the widgets of HTML follow the canvas, and messages go
    ui.page.wait_for_timeout(4000)
    with Image.open(ui.screenshot(name)) as picture:
        return picture.convert("RGB").crop((LEFT, TOP, LEFT + WIDTH, TOP + round((bottom - top) * scale)))


if __name__ == "__main__":
    main(sys.argv[1:])
