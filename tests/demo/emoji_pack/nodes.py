"""The three demo nodes. Legend: B pictures, h and w the latent's height and width."""

from pathlib import Path

import torch
from comfy_api.latest import ComfyExtension, io
from safetensors import safe_open
from safetensors.torch import load_file

from .report import describe

DATA = Path(__file__).resolve().parent.parent / "data"
PROMPTS = DATA / "emoji_prompts_minilm.safetensors"
DECODER = DATA / "emoji_latent_decoder.safetensors"
TEXT_TOKENS = 512
PATCH_PIXELS = 8


def prompt_names() -> list[str]:
    """All prompts that the model knows, sorted."""
    with safe_open(PROMPTS, "pt") as file:
        return sorted(file.keys())


def text_states(prompt: str) -> torch.Tensor:
    """The prompt's token states repeated to the length that the model was trained on: [1, 512, 384] float32."""
    with safe_open(PROMPTS, "pt") as file:
        states = file.get_tensor(prompt).float()  # [tokens, 384]
    repeats = -(-TEXT_TOKENS // states.shape[0])
    return states.repeat(repeats, 1)[:TEXT_TOKENS].unsqueeze(0)


def decode(latent: torch.Tensor) -> torch.Tensor:
    """Turn a latent [B, 128, h, w] into pictures [B, 8h, 8w, 3] float32 in 0..1."""
    decoder = load_file(DECODER)
    patches = latent.float().movedim(1, -1) * decoder["scale"] @ decoder["decode"] + decoder["mean"]  # [B, h, w, 192]
    pixels = torch.nn.functional.pixel_shuffle(patches.movedim(-1, 1), PATCH_PIXELS)  # [B, 3, 8h, 8w]
    return ((pixels + 1) / 2).clamp(0, 1).movedim(1, -1).contiguous()


class EmojiPrompt(io.ComfyNode):
    """One of the model's 375 prompts as conditioning."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EmojiPrompt",
            display_name="Emoji Prompt (demo)",
            category="model/int8/demo",
            description="One of the emoji model's 375 prompts as positive conditioning, and its empty negative.",
            inputs=[
                io.Combo.Input(
                    "prompt",
                    options=prompt_names(),
                    default="penguin",
                    tooltip="The emoji to draw; the model knows no others.",
                )
            ],
            outputs=[
                io.Conditioning.Output(display_name="positive", tooltip="The prompt's token states, [1, 512, 384]."),
                io.Conditioning.Output(display_name="negative", tooltip="Zeros, which the model learned as no prompt."),
            ],
        )

    @classmethod
    def execute(cls, prompt):
        positive = text_states(prompt)
        return io.NodeOutput([[positive, {}]], [[torch.zeros_like(positive), {}]])


class EmojiDecode(io.ComfyNode):
    """The model's linear decoder."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EmojiDecode",
            display_name="Emoji Decode (demo)",
            category="model/int8/demo",
            description="Decodes the emoji model's latent; every latent cell becomes 8x8 pixels.",
            inputs=[io.Latent.Input("samples", tooltip="Latent with 128 channels from the emoji model.")],
            outputs=[io.Image.Output(tooltip="Pictures, eight times the latent's width and height.")],
        )

    @classmethod
    def execute(cls, samples):
        return io.NodeOutput(decode(samples["samples"].cpu()))


class EmojiReport(io.ComfyNode):
    """What the pack itself recorded about a MODEL, as JSON."""

    @classmethod
    def define_schema(cls):
        return io.Schema(
            node_id="EmojiReport",
            display_name="Emoji Report (demo)",
            category="model/int8/demo",
            description="Reads the layer decisions and kernel calls that Native INT8 DiT recorded on a MODEL, after sampling.",
            inputs=[
                io.Model.Input("model", tooltip="The MODEL that was sampled."),
                io.Latent.Input("after", tooltip="The sampler's output; only makes this node run after it."),
            ],
            outputs=[io.String.Output(display_name="json", tooltip="Layers, reasons and call counts as JSON.")],
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, model, after):
        return io.NodeOutput(describe(model))


class EmojiExtension(ComfyExtension):
    """Index of the demo nodes."""

    async def get_node_list(self):
        return [EmojiPrompt, EmojiDecode, EmojiReport]


async def comfy_entrypoint():
    """Return the demo extension for ComfyUI's V3 loader."""
    return EmojiExtension()
