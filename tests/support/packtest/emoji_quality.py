"""Pictures of the emoji model in INT8, as it is and with outliers that large models have and it lacks.

    COMFYUI_PATH=... PYTHONPATH=tests/support python -m packtest.emoji_quality

writes the second table of tests/quality/README.md. FLIP is there when the package flip-evaluator is installed.
"""

import importlib.util
import statistics
import sys

import torch

from . import ROOT, load_pack
from .real_quality import WAYS, with_table

MODEL = ROOT / "tests" / "demo" / "data" / "emoji_flux2_dit_bf16.safetensors"
START, END = "<!-- from tests/support/packtest/emoji_quality.py -->", "<!-- end of the pictures -->"
PROMPTS = ("penguin", "rocket", "red apple", "hot beverage", "snowman", "strawberry")
HIDDEN, FEED_FORWARD = 256, 768
# a power of two: the scaled weights are exact in bfloat16
FACTOR, CHANNELS = 64, (17, 101, 240)
LATENT, STEPS, CFG, SEED = (1, 128, 16, 16), 12, 3.0, 7


def with_outliers(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same function with activations 64 times as large in three channels before every output projection.

    Attention is linear in each channel of v, and a gated feed-forward in its second half. So rows of the Linear before can
    grow when the columns of the Linear behind shrink by as much.
    """
    state = {key: value.clone() for key, value in state.items()}
    channels = torch.tensor(CHANNELS)

    def scale(before: str, rows: int, behind: str, columns: int) -> None:
        state[f"{before}.weight"][rows + channels] *= FACTOR
        state[f"{behind}.weight"][:, columns + channels] /= FACTOR

    for i in range(2):
        for stream in ("img", "txt"):
            block = f"double_blocks.{i}.{stream}"
            scale(f"{block}_attn.qkv", 2 * HIDDEN, f"{block}_attn.proj", 0)
            scale(f"{block}_mlp.0", FEED_FORWARD, f"{block}_mlp.2", 0)
    for i in range(6):
        block = f"single_blocks.{i}"
        scale(f"{block}.linear1", 2 * HIDDEN, f"{block}.linear2", 0)
        scale(f"{block}.linear1", 3 * HIDDEN + FEED_FORWARD, f"{block}.linear2", HIDDEN)
    return state


def emoji_pack():
    """The demo's nodes as a module, for its prompts and its decoder."""
    name = "emoji_pack_of_tests"
    if name not in sys.modules:
        folder = ROOT / "tests" / "demo" / "emoji_pack"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return importlib.import_module(f"{name}.nodes")


def models(comfy, state: dict[str, torch.Tensor], ways=tuple(WAYS)) -> dict[str, object]:
    """Way -> MODEL: float and each of `ways`."""
    from native_int8.nodes.int8 import host_backend, loader

    found = {"float": comfy.sd.load_diffusion_model_state_dict(dict(state))}
    for way in ways:
        rotation, mse = WAYS[way]
        model, _ = loader.load_state_dict(state, None, loader.LoadOptions(rotation=rotation, mse=mse, device="cpu"))
        host_backend.attach(model)
        found[way] = model
    return found


def sample(comfy, model, prompt: str, latent=LATENT, steps: int = STEPS) -> torch.Tensor:
    """The latent of a prompt."""
    text = emoji_pack().text_states(prompt)
    empty = torch.zeros(latent)
    noise = comfy.sample.prepare_noise(empty, SEED)
    return comfy.sample.sample(
        model, noise, steps, CFG, "euler", "simple", [[text, {}]], [[torch.zeros_like(text), {}]], empty, disable_pbar=True,
        seed=SEED,
    )  # fmt: skip


def layers(float_model, int8_model) -> list:
    """`LayerQuality` of every INT8 layer over one step."""
    from native_int8.nodes.int8 import compare

    text = emoji_pack().text_states(PROMPTS[0])
    return list(
        compare.compare(
            float_model, int8_model, [[text, {}]], None, {"samples": torch.zeros(LATENT)}, seed=SEED, steps=1, cfg=1.0,
            progress=lambda done, total: None,
        ).layers
    )  # fmt: skip


def flip(reference: torch.Tensor, picture: torch.Tensor) -> float | None:
    """Mean FLIP of two pictures [height, width, 3] in 0..1; None without the package."""
    try:
        import flip_evaluator
    except ImportError:
        return None
    return float(flip_evaluator.evaluate(reference.numpy(), picture.numpy(), "LDR")[1])


def rows(comfy, name: str, state: dict[str, torch.Tensor]) -> list[str]:
    """The table's lines for one set of weights."""
    from native_int8.nodes.int8 import quality

    decode, ways = emoji_pack().decode, models(comfy, state)
    floats = {prompt: sample(comfy, ways["float"], prompt) for prompt in PROMPTS}
    lines = []
    for way in WAYS:
        worst = min(layer.sqnr_db for layer in layers(ways["float"], ways[way]))
        latents = {prompt: sample(comfy, ways[way], prompt) for prompt in PROMPTS}
        cosines = [quality.cosine(latents[prompt], floats[prompt]) for prompt in PROMPTS]
        pairs = [(decode(floats[prompt]), decode(latents[prompt])) for prompt in PROMPTS]
        compared = [quality.compare_pictures(a, b) for a, b in pairs]
        flips = [flip(a[0], b[0]) for a, b in pairs]
        told = f"{statistics.median(flips):.4f}" if None not in flips else "not taken"
        lines.append(
            f"| {name} | {way} | {worst:.1f} | {min(cosines):.4f} | {statistics.median(cosines):.5f} | "
            f"{statistics.median(p.psnr_db for p in compared):.1f} | {statistics.median(p.ssim for p in compared):.4f} | {told} |"
        )
    return lines


def main() -> None:
    from .host import import_comfy

    load_pack()
    comfy = import_comfy("comfy.sd", "comfy.sample", "comfy.samplers", "comfy.utils", "comfy.quant_ops")
    state = comfy.utils.load_torch_file(str(MODEL))
    lines = [
        "| weights | way | worst layer, dB | lowest cosine | median cosine | median PSNR, dB | median SSIM | median FLIP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    with torch.inference_mode():
        lines += rows(comfy, "as trained", state)
        lines += rows(comfy, "with outliers", with_outliers(state))
    path = ROOT / "tests" / "quality" / "README.md"
    path.write_text(with_table(path.read_text(encoding="utf-8"), "\n".join(lines), START, END), encoding="utf-8")


if __name__ == "__main__":
    main()
