"""The demo's prompt graph in ComfyUI's API format; only the loader differs between the paths."""

MODEL_FILE = "emoji_flux2_dit_bf16.safetensors"
STEPS = 12
CFG = 3.0
LATENT_CELLS = 16
PIXELS_PER_CELL = 16  # of the node that makes the latent; the emoji decoder itself makes 8

FLOAT_LOADER = {"class_type": "UNETLoader", "inputs": {"unet_name": MODEL_FILE, "weight_dtype": "default"}}
LOAD_DIT = {"class_type": "LoadDiTNativeINT8", "inputs": {}}
PATCH_MODEL = {"class_type": "INT8PatchModel", "inputs": {"model": ["float_loader", 0]}}

PATHS = {
    "float": {"model": FLOAT_LOADER},
    "Load DiT": {"model": LOAD_DIT},
    "INT8 Patch": {"float_loader": FLOAT_LOADER, "model": PATCH_MODEL},
}


def with_defaults(node: dict, schema: dict, model_file: str = MODEL_FILE) -> dict:
    """`node` with every required widget that it leaves open set as the server's `schema` says.

    A combo takes `model_file` where it offers it, else its default or first choice.
    """
    inputs = dict(node["inputs"])
    for name, (kind, *rest) in schema["input"].get("required", {}).items():
        options = rest[0] if rest else {}
        choices = kind if isinstance(kind, list) else options.get("options", [])
        if name in inputs:
            continue
        if model_file in choices:
            inputs[name] = model_file
        elif "default" in options:
            inputs[name] = options["default"]
        elif choices:
            inputs[name] = choices[0]
    return {"class_type": node["class_type"], "inputs": inputs}


def build(loader: dict, prompt: str, seed: int, prefix: str) -> dict:
    """The whole graph: `loader` holds the node "model" and what it needs.

    Shows pictures at node "picture", the latent's file at "latent" and the report at "report_text".
    """
    size = LATENT_CELLS * PIXELS_PER_CELL
    return {
        **loader,
        "prompt": {"class_type": "EmojiPrompt", "inputs": {"prompt": prompt}},
        "empty": {"class_type": "EmptyFlux2LatentImage", "inputs": {"width": size, "height": size, "batch_size": 1}},
        "sampler": {
            "class_type": "KSampler",
            "inputs": {
                "model": ["model", 0],
                "positive": ["prompt", 0],
                "negative": ["prompt", 1],
                "latent_image": ["empty", 0],
                "seed": seed,
                "steps": STEPS,
                "cfg": CFG,
                "sampler_name": "euler",
                "scheduler": "simple",
                "denoise": 1.0,
            },
        },
        "decoded": {"class_type": "EmojiDecode", "inputs": {"samples": ["sampler", 0]}},
        "picture": {"class_type": "SaveImage", "inputs": {"images": ["decoded", 0], "filename_prefix": prefix}},
        "latent": {"class_type": "SaveLatent", "inputs": {"samples": ["sampler", 0], "filename_prefix": prefix}},
        "report": {"class_type": "EmojiReport", "inputs": {"model": ["model", 0], "after": ["sampler", 0]}},
        "report_text": {"class_type": "PreviewAny", "inputs": {"source": ["report", 0]}},
    }
