"""Load Text Encoder (Native INT8): one or two text encoder files -> a CLIP that runs INT8."""

import os

import folder_paths
from comfy_api.latest import io

FOLDER = "text_encoders"
NONE = "none"


def types() -> list[str]:
    """What the stock CLIP loaders call `type`, of one file and of two."""
    from comfy.sd import CLIPType

    return [member.name.lower() for member in CLIPType]


class LoadTextEncoderNativeINT8(io.ComfyNode):
    """Loads a text encoder with its block Linears in INT8; see `int8.text_encoder`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        files = folder_paths.get_filename_list(FOLDER)
        return io.Schema(
            node_id="LoadTextEncoderNativeINT8",
            display_name="Load Text Encoder (Native INT8)",
            category="model/int8",
            description="Loads a text encoder (Qwen, T5, Mistral, Gemma, Llama) and really multiplies in INT8, which the "
            "stock Load CLIP does not: it expands INT8 weights to float32 at every call.",
            search_aliases=[
                "int8",
                "load clip",
                "clip loader",
                "dual clip loader",
                "text encoder",
                "t5",
                "qwen",
                "w8a8",
            ],
            inputs=[
                io.Combo.Input(
                    "clip_name",
                    options=files,
                    tooltip="A safetensors file of models/text_encoders. INT8 files load as they are or are converted; bf16, "
                    "fp16, fp32 and fp8 files are quantised while they load, one layer at a time.",
                ),
                io.Combo.Input(
                    "type",
                    options=types(),
                    tooltip="The model that the text is for, as in Load CLIP and DualCLIPLoader (sdxl there is "
                    "stable_diffusion with two files here). A wrong one gives poor pictures without an error.",
                ),
                io.Combo.Input(
                    "device",
                    options=["default", "cpu"],
                    default="default",
                    optional=True,
                    advanced=True,
                    tooltip="cpu quantises and runs on the processor: no GPU memory, but many times slower.",
                ),
                io.Combo.Input(
                    "clip_name2",
                    options=[NONE, *files],
                    default=NONE,
                    optional=True,
                    tooltip="The second file of a model with two text encoders, in any order: clip_l and t5xxl for Flux.1, for "
                    "instance. CLIP's own text models stay in float: they are small. none for one file.",
                ),
            ],
            outputs=[io.Clip.Output(tooltip="The CLIP. Text nodes, LoRA and offload work as with any other CLIP.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, clip_name: str, clip_name2: str = NONE, **options) -> tuple:
        """Run again when a file changed."""
        from .int8 import shards

        paths = [folder_paths.get_full_path(FOLDER, name) for name in (clip_name, clip_name2) if name != NONE]
        stats = [os.stat(file) for path in paths if path for file in shards.files_there(path)]
        return (paths, [(stat.st_mtime_ns, stat.st_size) for stat in stats], sorted(options.items()))

    @classmethod
    def execute(cls, clip_name: str, type: str, device: str = "default", clip_name2: str = NONE) -> io.NodeOutput:
        """Load the files and show what became of their layers."""
        from .int8 import status, text_encoder, warm_up
        from .int8.report import REPORT_KEY

        paths = [folder_paths.get_full_path_or_raise(FOLDER, name) for name in (clip_name, clip_name2) if name != NONE]
        clip = text_encoder.load_text_encoder(paths, type, device, folder_paths.get_folder_paths("embeddings"))
        line = clip.patcher.get_attachment(REPORT_KEY).summary() + warm_up.compile_kernels(clip.patcher)
        status.show(line, cls.hidden.unique_id)
        return io.NodeOutput(clip)
