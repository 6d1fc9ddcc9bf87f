"""Draw the same emoji with the float model and with both INT8 nodes, on a real ComfyUI server, and compare.

    python tests/demo/run.py                        the penguin; pictures go to demo_output/
    python tests/demo/run.py --prompt rocket
    python tests/demo/run.py --prompts 10           ten prompts and the distribution of the cosines

Needs PYTHON and COMFYUI_PATH as .ci/env sets them; `make demo` does.
"""

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "tests" / "demo"
sys.path[:0] = [str(ROOT / "tests" / "support"), str(DEMO)]

from graph import CFG, MODEL_FILE, PATHS, STEPS, build, with_defaults  # noqa: E402
from packtest import server  # noqa: E402
from picture import side_by_side  # noqa: E402

# prompts of the runs after the first; spread over the alphabet and over shapes and colours
MORE_PROMPTS = (
    "rocket", "red apple", "hot beverage", "zebra face", "sunflower", "soccer ball", "strawberry",
    "automobile", "lion face", "mushroom", "cactus", "snowman", "wrapped present", "whale", "tomato",
)  # fmt: skip


@dataclass(frozen=True)
class Drawing:
    """One prompt drawn on one path."""

    picture: Path
    latent: np.ndarray
    report: dict
    seconds: float


def main() -> int:
    """Run the demo; the exit code is 1 when an INT8 path did not run on INT8 as promised."""
    options = parse_options()
    # without this the server would outlive a demo that is terminated
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    options.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="native-int8-demo-") as base:
        prepare_models(Path(base))
        started = time.monotonic()
        print("Starting ComfyUI ...", flush=True)
        packs = {"native-int8-dit": ROOT, "emoji_pack": DEMO / "emoji_pack"}
        with server.start(base, packs, options.server_args) as comfy:
            print(f"{describe_server(comfy)}; started in {time.monotonic() - started:.0f} s")
            prompts = choose_prompts(comfy, options)
            drawings = {name: draw_all(comfy, name, prompts, options) for name in PATHS}
        shutil.copy(Path(base) / "server.log", options.output / "server.log")
    print_layers(drawings)
    print_calls(drawings)
    print_comparison(prompts, drawings)
    sheet = side_by_side(sheet_rows(prompts, drawings), options.output / "side_by_side.png")
    print(f"\nPictures: {options.output}/  Side by side: {sheet}")
    return report_failures(drawings)


def parse_options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompt", default="penguin", help="one of the model's 375 prompts (default: penguin)")
    parser.add_argument("--prompts", type=int, default=1, metavar="N", help="draw N prompts, --prompt first")
    parser.add_argument("--seed", type=int, default=1, help="seed of the first prompt; each next one adds 1")
    parser.add_argument("--output", type=Path, default=Path("demo_output"), help="folder for the pictures")
    parser.add_argument("--server-args", nargs="*", default=[], metavar="ARG", help="more arguments for ComfyUI")
    return parser.parse_args()


def prepare_models(base: Path) -> None:
    """Put the emoji model where ComfyUI looks for diffusion models."""
    folder = base / "models" / "diffusion_models"
    folder.mkdir(parents=True)
    shutil.copy(DEMO / "data" / MODEL_FILE, folder / MODEL_FILE)


def describe_server(comfy: server.Server) -> str:
    """ComfyUI's version, torch and device in one line."""
    stats = comfy.get("/system_stats")
    devices = ", ".join(device["name"] for device in stats["devices"])
    return f"ComfyUI {stats['system']['comfyui_version']}, torch {stats['system']['pytorch_version']}, {devices}"


def node_schema(comfy: server.Server, node_id: str) -> dict:
    """What /object_info says about one node; ends the demo when the server does not know it."""
    schema = comfy.object_info(node_id).get(node_id)
    if schema is None:
        raise SystemExit(f"The server has no node {node_id}. Its log:\n{comfy.log()}")
    return schema


def choose_prompts(comfy: server.Server, options: argparse.Namespace) -> list[str]:
    """`--prompt`, then more until there are `--prompts`."""
    kind, *rest = node_schema(comfy, "EmojiPrompt")["input"]["required"]["prompt"]
    known = kind if isinstance(kind, list) else rest[0]["options"]
    if options.prompt not in known:
        near = [name for name in known if options.prompt.lower() in name]
        raise SystemExit(
            f"The model does not know {options.prompt!r}. Near: {near or 'nothing'}. All: {', '.join(known)}"
        )
    preferred = [name for name in MORE_PROMPTS if name in known]
    ordered = dict.fromkeys([options.prompt, *preferred, *known])
    return list(ordered)[: max(1, options.prompts)]


def draw_all(comfy: server.Server, path: str, prompts: list[str], options: argparse.Namespace) -> list[Drawing]:
    """Draw every prompt on one path, so that its model stays loaded in between."""
    loader = {name: with_defaults(node, node_schema(comfy, node["class_type"])) for name, node in PATHS[path].items()}
    drawings = []
    for number, prompt in enumerate(prompts):
        name = f"{prompt}_{path}".replace(" ", "_").lower()
        result = comfy.run(build(loader, prompt, options.seed + number, name))
        picture = options.output / f"{name}.png"
        shutil.copy(result.images("picture")[0], picture)
        latent = load_file(result.files("latent", "latents")[0])["latent_tensor"]
        drawings.append(Drawing(picture, latent, json.loads(result.text("report_text")), result.seconds))
        print(f"  {path:<10} {prompt:<24} {result.seconds:6.2f} s", flush=True)
    return drawings


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    """Cosine of two latents taken as vectors."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def psnr_db(a: Path, b: Path) -> float:
    """PSNR of two 8-bit pictures in dB; infinite when they are equal."""
    with Image.open(a) as first, Image.open(b) as second:
        difference = np.asarray(first.convert("RGB"), np.float64) - np.asarray(second.convert("RGB"), np.float64)
    error = np.mean(difference**2)
    return float("inf") if error == 0 else float(10 * np.log10(255**2 / error))


def int8_paths(drawings: dict) -> dict:
    """The paths that should run on INT8, without the float one."""
    return {path: drawn for path, drawn in drawings.items() if path != "float"}


def print_layers(drawings: dict) -> None:
    """The layer table of each INT8 path, as the pack recorded it; equal tables are printed once."""
    seen = {}
    for path, drawn in int8_paths(drawings).items():
        report, layers = drawn[-1].report, drawn[-1].report["layers"]
        print(f"\nLayers, {path}: {report['summary'] or 'the MODEL carries no load report'}")
        if layers is None:
            continue
        print(f"  source: {report['source']}")
        if json.dumps(layers) in seen:
            print(f"  as {seen[json.dumps(layers)]}")
        else:
            seen[json.dumps(layers)] = path
            for row in layers:
                shape = "x".join(map(str, row["shape"]))
                print(f"  {row['layer']:<44} {shape:>11}  {row['action']:<8}  {row['reason']}")


def print_calls(drawings: dict) -> None:
    """Which implementation ran how often, and how much of the blocks is held as INT8 in the live model."""
    print("\nCalls and weights")
    for path, drawn in drawings.items():
        report = drawn[-1].report
        print(
            f"  {path:<10} model {report['weight_bytes'] / 2**20:6.2f} MiB, {int8_share(report):6.1%} of block weights are INT8"
        )
        for name, count in (report["calls"] or {}).items():
            print(f"  {'':<10} {name}: {count} linears in {len(drawn)} pictures of {STEPS} steps, cfg {CFG:g}")
        for reason, count in (report["declined"] or {}).items():
            print(f"  {'':<10} declined: {count} times, {reason}")


def print_comparison(prompts: list[str], drawings: dict) -> None:
    """Cosine of latents, PSNR of pictures and times against the float path."""
    print("\nAgainst float        cosine of latents   PSNR of picture   seconds (first one includes loading)")
    for path, drawn in int8_paths(drawings).items():
        cosines = []
        for number, prompt in enumerate(prompts):
            reference = drawings["float"][number]
            cosines.append(cosine(drawn[number].latent, reference.latent))
            quality = psnr_db(drawn[number].picture, reference.picture)
            times = f"{drawn[number].seconds:.2f} (float {reference.seconds:.2f})"
            print(f"  {path:<10} {prompt:<24} {cosines[-1]:.5f}   {quality:5.1f} dB   {times}")
        if len(cosines) > 1:
            low, middle, high = np.min(cosines), np.median(cosines), np.max(cosines)
            passed = sum(value >= 0.995 for value in cosines)
            print(
                f"  {path:<10} lowest {low:.5f}, median {middle:.5f}, highest {high:.5f}; {passed} of {len(cosines)} >= 0.995"
            )


def sheet_rows(prompts: list[str], drawings: dict) -> list:
    """Rows of the side-by-side picture."""
    rows = []
    for number, prompt in enumerate(prompts):
        cells = []
        for path, drawn in drawings.items():
            value = cosine(drawn[number].latent, drawings["float"][number].latent)
            note = "the reference" if path == "float" else f"cosine to float {value:.4f}"
            cells.append((f"{prompt}: {path}\n{note}", drawn[number].picture))
        rows.append(cells)
    return rows


def report_failures(drawings: dict) -> int:
    """1 and a sentence for everything that an INT8 path did not do as promised, else 0."""
    failures = []
    for path, drawn in int8_paths(drawings).items():
        report = drawn[-1].report
        layers = [row for row in report["layers"] or [] if row["action"] != "keep"]
        calls = sum((report["calls"] or {}).values())
        # each step runs every layer once, or twice where the host splits prompt and negative
        forwards = STEPS * len(drawn)
        if not layers or calls not in (len(layers) * forwards, 2 * len(layers) * forwards):
            failures.append(f"{path}: {len(layers)} INT8 layers in {forwards} steps made {calls} INT8 calls")
        if report["declined"]:
            failures.append(f"{path}: calls were declined: {report['declined']}")
        if int8_share(report) < 0.95:
            failures.append(f"{path}: only {int8_share(report):.1%} of the block weights are INT8; 95 % are needed")
    for failure in failures:
        print(f"FAILED: {failure}; see server.log in the output folder.", file=sys.stderr)
    return 1 if failures else 0


def int8_share(report: dict) -> float:
    """Share of the block weights that the live model holds as INT8, 0 to 1."""
    return report["int8_weights"] / (report["int8_weights"] + report["float_weights"])


if __name__ == "__main__":
    sys.exit(main())
