"""The example workflows against the live server: known nodes, inputs, links and widgets; two of them really run."""

import json
import re
from pathlib import Path

import pytest
from packtest import ROOT, server
from packtest.frontend import HEIGHT_WITH_TEXT
from PIL import Image

FOLDER = ROOT / "example_workflows"
WORKFLOWS = sorted(path.stem for path in FOLDER.glob("*.json"))
# drawn by the frontend alone; the server has never heard of them
FRONTEND_ONLY = {"MarkdownNote": [], "Note": []}
OURS = (
    "LoadDiTNativeINT8",
    "LoadTextEncoderNativeINT8",
    "INT8PatchModel",
    "INT8CapabilityCheck",
    "INT8Audit",
    "INT8Benchmark",
    "INT8QualityReport",
    "INT8TuneKernels",
    "INT8SaveModel",
)
# a choice that may bring further widgets
DYNAMIC = "COMFY_DYNAMICCOMBO_V3"
WIDGET_TYPES = {"INT", "FLOAT", "STRING", "BOOLEAN", "COMBO", DYNAMIC}
MODELS = ("Ideogram 4", "Z-Image Turbo", "Flux.2 Klein", "Qwen-Image", "Wan 2.2", "Krea 2")
CONTROL_VALUES = {"fixed", "increment", "decrement", "randomize"}

pytestmark = pytest.mark.comfy


def load(name: str) -> dict:
    """A workflow as its file has it, with each subgraph opened."""
    return opened(json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8")))


def graphs(name: str) -> list[dict]:
    """The graphs of a file, each as it is drawn: the outer one, then its subgraphs."""
    outer = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return [outer, *outer.get("definitions", {}).get("subgraphs", [])]


def opened(workflow: dict) -> dict:
    """The same graph without subgraphs, as the server gets it; a subgraph's inputs are widgets of nodes inside."""
    links = list(workflow["links"])
    nodes = {node["id"]: node for node in workflow["nodes"]}
    for inner in workflow.get("definitions", {}).get("subgraphs", []):
        (instance,) = (node for node in nodes.values() if node["type"] == inner["id"])
        assert all(slot["link"] is None for slot in instance["inputs"])
        assert [slot["name"] for slot in instance["inputs"]] == [slot["name"] for slot in inner["inputs"]]
        assert [slot["name"] for slot in instance["outputs"]] == [slot["name"] for slot in inner["outputs"]]
        del nodes[instance["id"]]
        assert nodes.keys().isdisjoint(node["id"] for node in inner["nodes"])
        nodes |= {node["id"]: node for node in inner["nodes"]}
        for link in inner["links"]:
            ends = link["origin_id"], link["origin_slot"], link["target_id"], link["target_slot"]
            if link["origin_id"] == inner["inputNode"]["id"]:
                assert link["id"] in inner["inputs"][link["origin_slot"]]["linkIds"]
                slot = nodes[link["target_id"]]["inputs"][link["target_slot"]]
                assert slot["link"] == link["id"] and "widget" in slot
                # the widget shown outside is this node's: its own value counts
                slot["link"] = None
            elif link["target_id"] == inner["outputNode"]["id"]:
                outside = instance["outputs"][link["target_slot"]]["links"]
                source = nodes[link["origin_id"]]["outputs"][link["origin_slot"]]
                source["links"] = [i for i in source["links"] if i != link["id"]] + outside
                links = [[old[0], *ends[:2], *old[3:]] if old[0] in outside else old for old in links]
            else:
                links.append([link["id"], *ends, link["type"]])
    return {**workflow, "nodes": list(nodes.values()), "links": links}


def inputs_of(schema: dict) -> dict[str, tuple[str, dict]]:
    """Input name -> (type, options), required ones first, as the frontend orders them."""
    found = {}
    for group in ("required", "optional"):
        for name, (kind, *rest) in schema["input"].get(group, {}).items():
            options = rest[0] if rest else {}
            found[name] = ("COMBO", {**options, "options": kind}) if isinstance(kind, list) else (kind, options)
    return found


def widgets_of(schema: dict) -> list[str]:
    """Names of the values in `widgets_values`, in order; a seed is followed by what happens to it after a run."""
    names = []
    for name, (kind, options) in inputs_of(schema).items():
        if kind in WIDGET_TYPES and not options.get("forceInput"):
            names.append(name)
            if options.get("control_after_generate"):
                names.append("control_after_generate")
    return names


def stored_widgets(node: dict, schema: dict) -> dict[str, tuple]:
    """Widget name -> (value stored in the file, type, options); raises when the counts differ."""
    stored, found = list(node.get("widgets_values", [])), {}
    take_widgets(schema, "", stored, found)
    assert not stored, (node["type"], stored)
    return found


def take_widgets(schema: dict, prefix: str, stored: list, found: dict) -> None:
    """Move values from `stored` to `found`; the widgets that a choice brings follow it."""
    for name, (kind, options) in inputs_of(schema).items():
        # what a host hides is there for the files of older ones
        if kind not in WIDGET_TYPES or options.get("forceInput") or (options.get("hidden") and not stored):
            continue
        value = stored.pop(0)
        found[prefix + name] = value, kind, options
        if options.get("control_after_generate"):
            found["control_after_generate"] = stored.pop(0), "COMBO", {"options": CONTROL_VALUES}
        if kind == DYNAMIC:
            chosen = {choice["key"]: choice["inputs"] for choice in options["options"]}
            assert value in chosen, (prefix + name, value)
            take_widgets({"input": chosen[value]}, f"{prefix}{name}.", stored, found)


def values_of(node: dict, schema: dict) -> dict:
    """Widget name -> value stored in the file."""
    return {name: value for name, (value, *_) in stored_widgets(node, schema).items()}


def matches(output: str, wanted: str) -> bool:
    # newer hosts made choices of their own inputs out of some combos
    if {output, wanted} == {"COMBO", DYNAMIC}:
        return True
    return "*" in (output, wanted) or wanted == "COMFY_MATCHTYPE_V3" or output == "COMFY_MATCHTYPE_V3" or bool(
        set(output.split(",")) & set(wanted.split(","))
    )  # fmt: skip


def to_prompt(workflow: dict, schemas: dict) -> dict:
    """The API prompt that the frontend would queue."""
    links = {link[0]: link for link in workflow["links"]}
    prompt = {}
    for node in workflow["nodes"]:
        if node["type"] in FRONTEND_ONLY:
            continue
        values = values_of(node, schemas[node["type"]])
        values.pop("control_after_generate", None)
        for slot in node["inputs"]:
            if slot["link"] is not None:
                _, origin, output, *_ = links[slot["link"]]
                values[slot["name"]] = [str(origin), output]
        prompt[str(node["id"])] = {"class_type": node["type"], "inputs": values}
    return prompt


def test_there_are_workflows_and_each_of_our_nodes_is_in_one(schemas):
    ours = {name for name, schema in schemas.items() if schema["python_module"] == "custom_nodes.native-int8-dit"}
    assert ours == set(OURS) == set(HEIGHT_WITH_TEXT)
    used = {node["type"] for name in WORKFLOWS for node in load(name)["nodes"]}
    assert used.issuperset(ours)


def test_every_model_has_its_workflow():
    assert all(any(name.startswith(model) for name in WORKFLOWS) for model in MODELS)


@pytest.mark.parametrize("name", [name for name in WORKFLOWS if name.startswith(MODELS)])
def test_the_note_of_a_model_says_what_to_download_and_how_fast_it_is(name):
    workflow = load(name)
    (note,) = (node["widgets_values"][0] for node in workflow["nodes"] if node["type"] == "MarkdownNote")
    for node in workflow["nodes"]:
        for file in node["properties"].get("models", []):
            # under the name of its folder, with its link
            line = next(line for line in note.splitlines() if line.startswith(f"- {file['directory']}: "))
            assert file["url"] in line
    assert "**Load DiT (Native INT8)**" in note and "**Speed**: " in note
    speed = note[note.index("**Speed**: ") :]
    # a figure without its card would be read as the reader's own
    assert "H200" in speed and "bf16" in speed and "not" in speed


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_inputs_and_widgets_are_known(name, schemas):
    for node in load(name)["nodes"]:
        if node["type"] in FRONTEND_ONLY:
            continue
        assert node["type"] in schemas, node["type"]
        schema = schemas[node["type"]]
        known = inputs_of(schema)
        for slot in node["inputs"]:
            assert slot["name"] in known, (node["type"], slot["name"])
            # a combo may be typed by the frontend as COMBO or by its options
            assert matches(known[slot["name"]][0], slot["type"]), (node["type"], slot)
        assert [slot["type"] for slot in node["outputs"]] == schema["output"] or "COMFY_MATCHTYPE_V3" in schema[
            "output"
        ]
        for widget, (value, kind, options) in stored_widgets(node, schema).items():
            check_value(node, widget, value, kind, options)


def check_value(node, widget, value, kind, options):
    where = (node["type"], widget, value)
    if kind == "BOOLEAN":
        assert isinstance(value, bool), where
    elif kind == "STRING":
        assert isinstance(value, str), where
    elif kind in ("INT", "FLOAT"):
        assert isinstance(value, int | float) and not isinstance(value, bool), where
        assert options.get("min", value) <= value <= options.get("max", value), where
    elif kind != DYNAMIC and not str(value).endswith(".safetensors"):
        assert value in options["options"], where


@pytest.mark.parametrize("name", WORKFLOWS)
def test_links_join_matching_types(name, schemas):
    workflow = load(name)
    nodes = {node["id"]: node for node in workflow["nodes"]}
    assert len(nodes) == len(workflow["nodes"])
    assert workflow["last_node_id"] >= max(nodes)
    seen = set()
    for link, origin, output, target, slot, kind in workflow["links"]:
        source, sink = nodes[origin]["outputs"][output], nodes[target]["inputs"][slot]
        assert link in source["links"] and sink["link"] == link
        assert matches(source["type"], sink["type"]) and matches(kind, source["type"]), (
            link,
            source["type"],
            sink["type"],
        )
        seen.add(link)
    assert seen == {slot["link"] for node in nodes.values() for slot in node["inputs"] if slot["link"] is not None}
    assert workflow["last_link_id"] >= max(seen, default=0)
    for node in workflow["nodes"]:
        if node["type"] in FRONTEND_ONLY:
            continue
        linked = {slot["name"] for slot in node["inputs"] if slot["link"] is not None}
        widgets = set(widgets_of(schemas[node["type"]]))
        required = set(schemas[node["type"]]["input"].get("required", {}))
        assert required <= linked | widgets, (node["type"], required - linked - widgets)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_nodes_do_not_overlap_once_they_show_their_text(name):
    title = 30
    for graph in graphs(name):
        boxes = [
            (n["type"], *n["pos"], n["size"][0], max(n["size"][1], HEIGHT_WITH_TEXT.get(n["type"], 0)))
            for n in graph["nodes"]
        ]
        for i, (a, ax, ay, aw, ah) in enumerate(boxes):
            for b, bx, by, bw, bh in boxes[i + 1 :]:
                apart = ax + aw <= bx or bx + bw <= ax or ay + ah <= by - title or by + bh <= ay - title
                assert apart, (a, b)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_every_model_file_has_a_link_or_comes_with_the_demo(name, schemas):
    for node in load(name)["nodes"]:
        if node["type"] in FRONTEND_ONLY or node["type"].startswith("Primitive"):
            continue
        files = [value for value in node.get("widgets_values", []) if str(value).endswith(".safetensors")]
        models = {model["name"]: model for model in node["properties"].get("models", [])}
        assert set(models) == {file for file in files if not file.startswith("emoji_")}
        for model in models.values():
            assert re.fullmatch(rf"https://huggingface\.co/\S+/{re.escape(model['name'])}", model["url"])
            assert model["directory"] in ("diffusion_models", "text_encoders", "vae")


@pytest.mark.parametrize("name", WORKFLOWS)
def test_thumbnail(name):
    with Image.open(FOLDER / f"{name}.jpg") as picture:
        assert picture.format == "JPEG" and min(picture.size) >= 240
        low, high = picture.convert("L").getextrema()
        assert high - low > 100


def test_server_lists_the_workflows_and_serves_them(pack_server):
    listed = pack_server.get("/workflow_templates")["native-int8-dit"]
    assert sorted(listed) == WORKFLOWS


@pytest.mark.parametrize("name", [name for name in WORKFLOWS if name.startswith(MODELS)])
def test_the_server_misses_nothing_but_model_files(name, pack_server, schemas):
    with pytest.raises(server.ServerError) as refused:
        pack_server.queue(to_prompt(load(name), schemas))
    answer = json.loads(str(refused.value).partition(": ")[2])
    found = [error for node in answer["node_errors"].values() for error in node["errors"]]
    assert found and {error["type"] for error in found} == {"value_not_in_list"}, found
    assert all(error["extra_info"]["received_value"].endswith(".safetensors") for error in found), found


def test_capability_check_runs_alone(pack_server, schemas):
    workflow = load("INT8 capability check")
    result = pack_server.run(to_prompt(workflow, schemas))
    shown = {node["id"]: node for node in workflow["nodes"] if node["type"] == "PreviewAny"}
    texts = [result.text(str(node_id)) for node_id in shown]
    report = next(text for text in texts if "\n" in text)
    assert "consumer Ampere" in report.splitlines()[0]
    for heading in ("Missing", "Path of each kind of layer", "What to expect", "Machine"):
        assert f"\n{heading}" in report
    expected = "int8_convrot" if ": consumer Ampere" in report.splitlines()[0] else "fp8_scaled"
    assert any(expected in text for text in texts if "\n" not in text)


def test_capability_check_measures_when_asked_to_or_says_why_not(pack_server):
    prompt = {
        "1": {"class_type": "INT8CapabilityCheck", "inputs": {"measure": True}},
        "2": {"class_type": "PreviewAny", "inputs": {"source": ["1", 1]}},
    }
    lines = pack_server.run(prompt).text("2").splitlines()
    assert lines[lines.index("Measured now") + 1].startswith(
        ("INT8 Linears run ", "THROTTLED: ", "Nothing was measured: ")
    )


def test_tune_kernels_reports_and_passes_the_model_on(pack_server, schemas):
    workflow = load("INT8 tune kernels")
    prompt = to_prompt(workflow, schemas)
    loader = next(node for node in prompt.values() if node["class_type"] == "LoadDiTNativeINT8")
    loader["inputs"]["model_name"] = "emoji_flux2_dit_bf16.safetensors"
    (shown,) = (node["id"] for node in workflow["nodes"] if node["type"] == "PreviewAny")
    report = pack_server.run(prompt).text(str(shown))
    if "Nothing was measured" in report:
        assert "no GPU" in report or "needs" in report
    else:
        assert "shapes measured" in report.splitlines()[0] and "bf16" in report
        assert list((pack_server.base_dir / "user" / "native_int8").glob("tiles-*.json"))


def test_convert_and_save_writes_a_file_that_the_loaders_list(pack_server, schemas):
    workflow = load("INT8 convert and save")
    prompt = to_prompt(workflow, schemas)
    loader = next(node for node in prompt.values() if node["class_type"] == "LoadDiTNativeINT8")
    loader["inputs"]["model_name"] = "emoji_flux2_dit_bf16.safetensors"
    (shown,) = (node["id"] for node in workflow["nodes"] if node["type"] == "PreviewAny")
    file = Path(pack_server.run(prompt).text(str(shown)))
    assert file.parent == pack_server.base_dir / "output" / "diffusion_models" and file.is_file()
    for node_id, widget in (("LoadDiTNativeINT8", "model_name"), ("UNETLoader", "unet_name")):
        schema = pack_server.get(f"/object_info/{node_id}")[node_id]
        assert file.name in inputs_of(schema)[widget][1]["options"]
    # other tests see the same lists
    file.unlink()


def test_quality_and_speed_shows_plots_and_numbers(pack_server, schemas):
    prompt = to_prompt(load("INT8 quality and speed"), schemas)
    for node in prompt.values():
        if "steps" in node["inputs"]:
            node["inputs"]["steps"] = 2
        if node["class_type"] == "INT8QualityReport":
            node["inputs"]["protect_below"] = 100
        if node["class_type"] == "INT8Benchmark":
            node["inputs"]["resolutions"] = "128x128"
    result = pack_server.run(prompt)
    shown = {
        kind: [n for n, node in prompt.items() if node["class_type"] == kind] for kind in ("PreviewAny", "PreviewImage")
    }
    report, protect, table, audit = (result.text(node) for node in shown["PreviewAny"])
    assert "28 of 28 INT8 layers multiply in INT8" in audit and "single_blocks.3.linear2, native_int8" in audit
    assert "28 INT8 layers: worst" in report and "PSNR" in report and "single_blocks.3.linear2" in report
    assert len(protect.split(", ")) == 28
    assert "128x128; rows seen in a forward" in table and "Amdahl: these Linears take" in table
    for node in shown["PreviewImage"]:
        (picture,) = result.outputs[node]["images"]
        assert picture["type"] == "temp"
    (file,) = (pack_server.base_dir / "output" / "native_int8").glob("benchmark_*.json")
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["model"]["linears"] == 28 and found["sizes"][0]["amdahl"]["bound"] > 1
    assert str(pack_server.base_dir) not in file.read_text(encoding="utf-8")


def test_emoji_demo_draws_three_pictures(pack_server, schemas):
    workflow = load("Emoji demo - float and INT8")
    prompt = to_prompt(workflow, schemas)
    for node in prompt.values():
        if node["class_type"] == "KSampler":
            node["inputs"]["steps"] = 2
    result = pack_server.run(prompt)
    savers = [node_id for node_id, node in prompt.items() if node["class_type"] == "SaveImage"]
    pictures = [result.images(node_id) for node_id in savers]
    assert [len(files) for files in pictures] == [1, 1, 1]
    for (file,) in pictures:
        with Image.open(file) as picture:
            assert picture.size == (128, 128)
