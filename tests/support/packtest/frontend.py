"""ComfyUI's own frontend in a headless Chromium: do what a user does, read what a user sees.

with frontend.start(server.url, folder_for_screenshots) as ui:
    ui.open_template("native-int8-dit", "INT8 capability check")
    ui.run()
"""

import contextlib
import json
import os
import re
import shutil
import urllib.request
from pathlib import Path

SIZE = {"width": 1500, "height": 950}
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
# a page is asked for in the user's language first, then without: the first answer may be 404
TRANSLATED_PAGE = re.compile(r"/docs/\w+/[\w-]+\.md$")
# no tour on the first start, nothing over the canvas, text at every zoom, and few frames: a CPU draws them
SETTINGS = {
    "Comfy.TutorialCompleted": True,
    "Comfy.Minimap.Visible": False,
    "Comfy.Graph.CanvasInfo": False,
    "LiteGraph.Canvas.MinFontSizeForLOD": 0,
    "LiteGraph.Canvas.MaximumFps": 10,
    # milliseconds; a busy machine is slow to take a second click
    "Comfy.Pointer.DoubleClickTime": 1000,
}

# how tall a node is once it shows its text, whatever its length: longer text is scrolled
HEIGHT_WITH_TEXT = {
    "LoadDiTNativeINT8": 288,
    "LoadTextEncoderNativeINT8": 192,
    "INT8PatchModel": 192,
    "INT8SaveModel": 144,
    "INT8CapabilityCheck": 140,
    "INT8Audit": 188,
    "INT8Benchmark": 184,
    "INT8QualityReport": 336,
    "INT8TuneKernels": 212,
}


def missing() -> str | None:
    """Why no browser can be started here, or None."""
    try:
        import playwright.sync_api  # noqa: F401
    except ImportError:
        return "needs playwright: pip install -r requirements-dev.txt"
    if not _chromium():
        return "needs Chromium (Debian: apt-get install chromium), or its path in NATIVE_INT8_CHROMIUM"
    return None


def _chromium() -> str | None:
    if "NATIVE_INT8_CHROMIUM" in os.environ:
        return os.environ["NATIVE_INT8_CHROMIUM"]
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextlib.contextmanager
def start(url: str, screenshots: Path, own: str):
    """The frontend of the server at `url`, loaded and empty; `own` is the folder name of the pack under test."""
    from playwright.sync_api import sync_playwright

    for name, value in SETTINGS.items():
        _post(f"{url}/settings/{name}", value)
    sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_chromium(), args=sandbox)
        try:
            page = browser.new_page(viewport=SIZE)
            page.set_default_timeout(20_000)
            ui = Frontend(page, url, screenshots, own)
            page.goto(url)
            # its default workflow is the last thing that comes
            ready = "window.app?.vueAppReady && app.extensionManager.workflow?.activeWorkflow?.isLoaded"
            page.wait_for_function(f"{ready} && app.graph?._nodes.length > 0", timeout=60_000)
            page.locator(".p-blockui-mask").wait_for(state="hidden")
            yield ui
        finally:
            browser.close()


def _post(url: str, value):
    body = json.dumps(value).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")
    urllib.request.urlopen(request, timeout=60).close()


class Frontend:
    """One open page."""

    def __init__(self, page, url: str, screenshots: Path, own: str):
        self.page = page
        self.url = url
        self.own = own
        self.problems: list[str] = []
        self._screenshots = screenshots
        page.on("pageerror", lambda error: self.problems.append(f"uncaught: {error}"))
        page.on("console", self._on_console)
        page.on("response", self._on_response)

    def _on_console(self, message):
        where = message.location.get("url", "")
        if message.type == "error" and self._is_ours(f"{where} {message.text}") and not TRANSLATED_PAGE.search(where):
            self.problems.append(f"console: {message.text} ({where})")

    def _on_response(self, response):
        if response.status >= 400 and self._is_ours(response.url) and not TRANSLATED_PAGE.search(response.url):
            self.problems.append(f"HTTP {response.status}: {response.url}")

    def _is_ours(self, text: str) -> bool:
        return f"/{self.own}/" in text

    def screenshot(self, name: str) -> Path:
        """Write what the page shows to `name`.png."""
        self._screenshots.mkdir(parents=True, exist_ok=True)
        path = self._screenshots / f"{name}.png"
        self.page.screenshot(path=path)
        return path

    def nodes(self) -> list[dict]:
        """id, type, position and whether the frontend knows the type, of every node on the canvas."""
        return self.page.evaluate(
            """app.graph._nodes.map(n => ({id: n.id, type: n.type, x: n.pos[0], y: n.pos[1], error: !!n.has_errors,
               known: n.type in LiteGraph.registered_node_types || !!n.isSubgraphNode?.()}))"""
        )

    def clear(self):
        """Close what is open over the canvas and empty it."""
        self.page.keyboard.press("Escape")
        self.page.evaluate("app.canvas.deselectAll(); app.graph.clear()")
        self.page.evaluate("app.canvas.ds.scale = 1; app.canvas.ds.offset = [0, 0]; app.canvas.setDirty(true, true)")

    def vue_nodes(self, on: bool):
        """Switch between nodes drawn on the canvas and nodes of HTML ("Nodes 2.0")."""
        self.page.evaluate("on => app.extensionManager.setting.set('Comfy.VueNodes.Enabled', on)", on)

    def _open_search(self, x: int, y: int, attempts: int = 4):
        """Double-click the canvas until the search is there: a page that is still busy loses a click."""
        from playwright.sync_api import TimeoutError as NotThere

        found = self.page.locator("[role=dialog] input[type=text]")
        for left in reversed(range(attempts)):
            self.page.mouse.dblclick(x, y)
            try:
                found.wait_for(timeout=5_000 if left else None)
                return
            except NotThere:
                if not left:
                    raise

    def add_by_search(self, text: str, x: int, y: int):
        """Double-click the canvas, type, take the first result, and click where the node should lie."""
        before = len(self.nodes())
        self._open_search(x, y)
        self.page.locator("[role=dialog] input[type=text]").fill(text)
        self.page.get_by_test_id("result-item").filter(has_text=text).first.wait_for()
        self.page.keyboard.press("Enter")
        self.page.wait_for_function(
            "n => app.graph._nodes.length > n && app.canvas.state.ghostNodeId != null", arg=before
        )
        self.page.locator("[role=dialog] input[type=text]").wait_for(state="hidden")
        self.page.mouse.move(x + 5, y + 5)
        self.page.mouse.click(x, y)
        self.page.wait_for_function("app.canvas.state.ghostNodeId == null")

    def add_from_library(self, title: str, x: int, y: int):
        """Search for a node in the node library and drag it onto the canvas."""
        before = len(self.nodes())
        field = self.page.get_by_placeholder("Search...")
        if not field.is_visible():
            self.page.get_by_label(re.compile("^Node Library")).click()
        field.fill(title)
        entry = self.page.get_by_role("treeitem").filter(has_text=title).last
        entry.drag_to(self.page.locator("#graph-canvas"), target_position={"x": x, "y": y})
        self.page.wait_for_function("n => app.graph._nodes.length > n", arg=before)

    def close_library(self):
        """Close the node library when it is open."""
        if self.page.get_by_placeholder("Search...").is_visible():
            self.page.get_by_label(re.compile("^Node Library")).click()

    def add(self, node_type: str, x: int, y: int):
        """Put a node on the canvas as a workflow file does."""
        self.page.evaluate(
            """([type, x, y]) => {const n = LiteGraph.createNode(type); n.pos = [x, y]; app.graph.add(n)}""",
            [node_type, x, y],
        )

    def open_template(self, pack: str, name: str):
        """Templates > `pack` > `name`, and wait until its nodes are there."""
        self.page.evaluate("app.graph.clear()")
        self.page.get_by_label("Templates").first.click()
        self.page.get_by_role("button", name=pack, exact=True).or_(
            self.page.get_by_text(pack, exact=True)
        ).first.click()
        self.page.get_by_test_id(f"template-workflow-{name}").click()
        self.page.wait_for_function("app.graph._nodes.length > 0")

    def open_workflow(self, pack: str, name: str):
        """Open a workflow that the server has among a pack's templates, past the dialog with all templates' pictures."""
        self.page.evaluate(
            """async ([pack, name]) => {
               const file = await fetch(`/api/workflow_templates/${pack}/${encodeURIComponent(name)}.json`);
               await app.loadGraphData(await file.json(), true, true, name, {openSource: 'template'})}""",
            [pack, name],
        )
        self.page.wait_for_function("app.graph._nodes.length > 0")

    def close_panel(self):
        """Close the properties panel when it is open."""
        if self.page.get_by_test_id("properties-panel").is_visible():
            self.page.get_by_label("Toggle properties panel").last.click()

    def error_groups(self) -> dict[str, str]:
        """What the properties panel lists under Errors: kind of error -> its text; empty without errors."""
        tab = self.page.get_by_test_id("panel-tab-errors")
        if not self.page.get_by_test_id("properties-panel").is_visible():
            self.page.get_by_label("Toggle properties panel").last.click()
        if not tab.is_visible():
            return {}
        tab.click()
        self.page.locator("[data-testid^=error-group-]").first.wait_for()
        found = {}
        for group in self.page.locator("section[data-testid^=error-group-]").all():
            kind = group.get_attribute("data-testid").removeprefix("error-group-")
            found[kind] = group.text_content()
        return found

    def select(self, node_type: str):
        """Select the first node of a type and bring it into view."""
        self.page.evaluate(
            """type => {const n = app.graph._nodes.find(n => n.type === type);
               app.canvas.deselectAll(); app.canvas.selectNode(n); app.canvas.centerOnNode(n)}""",
            node_type,
        )

    def help_page(self, node_type: str) -> str:
        """Select a node, press Node Info, and return the text of the help panel."""
        self.select(node_type)
        self.page.get_by_test_id("info-button").click()
        panel = self.page.locator(".node-help-content").or_(self.page.get_by_test_id("properties-panel")).first
        panel.locator(".markdown-content h1").first.wait_for()
        return panel.inner_text()

    def cut_off_in_help(self) -> list[str]:
        """What in the open help page is wider than its place: the first words of each part, innermost last."""
        return self.page.locator(".markdown-content").evaluate(
            """page => [page, ...page.querySelectorAll('*')].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth)
               .map(e => `${e.tagName} ${e.scrollWidth} > ${e.clientWidth}: ${e.textContent.trim().slice(0, 60)}`)"""
        )

    def set_widgets(self, **values):
        """Set widgets by name on every node that has them."""
        self.page.evaluate(
            """values => {for (const n of app.graph._nodes) for (const w of n.widgets ?? [])
               if (w.name in values) {w.value = values[w.name]; w.callback?.(w.value)}}""",
            values,
        )

    def run(self):
        """Press Run, with the server's cache empty: a node that does not run again shows no text of its own."""
        _post(f"{self.url}/free", {"free_memory": True})
        # the server does it when it waits for prompts, and would take ours first if it were there already
        self.page.wait_for_timeout(1000)
        self.page.get_by_test_id("queue-button").click()

    def wait_for_texts(self, timeout_s: float = 60) -> list[str]:
        """Wait until every Preview as Text shows something, and return what."""
        shown = "app.graph._nodes.filter(n => n.type === 'PreviewAny').map(n => String(n.widgets[0].value))"
        self.page.wait_for_function(f"{shown}.every(text => text.length > 0)", timeout=timeout_s * 1000)
        return self.page.evaluate(shown)

    def wait_for_pictures(self, node_type: str, timeout_s: float = 60) -> list[tuple[int, int]]:
        """Wait until every node of a type shows a picture, and return widths and heights."""
        size = "n => [n.imgs?.[0]?.naturalWidth ?? 0, n.imgs?.[0]?.naturalHeight ?? 0]"
        shown = f"app.graph._nodes.filter(n => n.type === '{node_type}').map({size})"
        self.page.wait_for_function(f"{shown}.every(([w]) => w > 0)", timeout=timeout_s * 1000)
        return [tuple(pair) for pair in self.page.evaluate(shown)]

    def text_on_node(self, node_type: str) -> str:
        """What the node's own code showed under its widgets."""
        return self.page.evaluate(
            """type => {const n = app.graph._nodes.find(n => n.type === type);
               return String(n.widgets.find(w => w.name.startsWith('$$'))?.value ?? '')}""",
            node_type,
        )

    def show_text(self, node_types, text: str) -> dict[str, float]:
        """Let nodes of these types show a text as if they had run; node type -> how tall it is then."""
        shown = self.page.evaluate(
            """([types, text]) => {
               const nodes = app.graph._nodes.filter(n => types.includes(n.type));
               for (const n of nodes) app.api.dispatchCustomEvent('progress_text', {nodeId: String(n.id), text});
               return nodes.map(n => n.id)}""",
            [list(node_types), text],
        )
        self.page.wait_for_function(
            """ids => ids.every(id => app.graph.getNodeById(id).widgets.some(w => w.name.startsWith('$$')))""",
            arg=shown,
        )
        # the frame that follows lays them out
        self.page.wait_for_timeout(250)
        heights = self.page.evaluate(
            """ids => ids.map(id => app.graph.getNodeById(id)).map(n => [n.type, Math.max(n.size[1], n.computeSize()[1])])""",
            shown,
        )
        return dict(heights)

    def overlaps(self) -> list[tuple[str, str]]:
        """Pairs of types of nodes that cover each other, as tall as they are now."""
        title = 30
        boxes = self.page.evaluate("app.graph._nodes.map(n => [n.type, ...n.pos, ...n.size])")
        found = []
        for i, (a, ax, ay, aw, ah) in enumerate(boxes):
            for b, bx, by, bw, bh in boxes[i + 1 :]:
                if ax < bx + bw and bx < ax + aw and ay - title < by + bh and by - title < ay + ah:
                    found.append((a, b))
        return found

    def fit(self):
        """Show the whole graph."""
        self.page.evaluate("app.canvas.deselectAll(); app.extensionManager.command.execute('Comfy.Canvas.FitView')")
        # the view glides there
        self.page.wait_for_timeout(600)

    def view(self, x: float, y: float, scale: float):
        """Show the canvas from graph position x, y at a zoom."""
        self.page.evaluate(
            """([x, y, s]) => {app.canvas.deselectAll(); app.canvas.ds.scale = s; app.canvas.ds.offset = [-x, -y];
               app.canvas.setDirty(true, true)}""",
            [x, y, scale],
        )
        # two frames at MaximumFps
        self.page.wait_for_timeout(250)
