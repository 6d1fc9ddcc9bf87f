"""Load DiT (Native INT8): a checkpoint file -> an INT8 MODEL."""

import os

import folder_paths
from comfy_api.latest import io

from .int8 import widgets

FOLDER = "diffusion_models"
MORE_ENDINGS = (".gguf", ".safetensors.index.json")
BRANCHES = ["auto", "conditional", "unconditional"]


def files() -> list[str]:
    """The model files that ComfyUI lists, and what it does not: GGUF files, and indices of models in several files."""
    names = set(folder_paths.get_filename_list(FOLDER))
    for folder in folder_paths.get_folder_paths(FOLDER):
        if os.path.isdir(folder):
            found, _ = folder_paths.recursive_search(folder, excluded_dir_names=[".git"])
            names.update(name for name in found if name.lower().endswith(MORE_ENDINGS))
    return sorted(names)


class LoadDiTNativeINT8(io.ComfyNode):
    """Loads a diffusion transformer with its block Linears in INT8; see `int8.loader`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="LoadDiTNativeINT8",
            display_name="Load DiT (Native INT8)",
            category="model/int8",
            description="Loads a diffusion transformer and runs its large Linears in INT8, on the INT8 tensor cores.",
            search_aliases=["int8", "load diffusion model", "unet loader", "w8a8", "convrot", "quantize"],
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=files(),
                    tooltip="A file of models/diffusion_models (or models/unet). INT8 files of nearly all makers load as they "
                    "are or are converted; bf16, fp16, fp32, fp8 and GGUF Q8_0 files are quantised while they load, one "
                    "layer at a time. A model in several files: choose its index (.safetensors.index.json) or any part.",
                ),
                io.Boolean.Input(
                    "rotation",
                    default=True,
                    tooltip="Rotate the weights that are quantised here, in groups of up to 256 columns (ConvRot). Closer "
                    "to the float model, for a few percent of time per step. An INT8 file keeps what it has.",
                ),
                *widgets.layers(),
                io.Boolean.Input(
                    "keep_copy",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Keep a converted copy on disk and load that the next time: about half the size of the bf16 file, "
                    "so 6 to 20 GB for each model and setting, for a faster start. Off, since disks are often full of models. "
                    "The copies are in user/native_int8/cache and may be deleted at any time.",
                ),
                io.Combo.Input(
                    "branch",
                    options=BRANCHES,
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="Only for a file that holds two models for guidance, such as Transformer Lab's Ideogram 4: which of "
                    "them to load. auto is the conditional one, and right for all other files. No cost.",
                ),
                widgets.scale_search(),
                widgets.int8_speed(),
            ],
            outputs=[io.Model.Output(tooltip="The INT8 MODEL. LoRA, offload and saving work as with any other MODEL.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, model_name: str, **options) -> tuple:
        """Run again when a file of the model changed."""
        from .int8 import shards

        path = folder_paths.get_full_path(FOLDER, model_name)
        stats = [os.stat(file) for file in shards.files_there(path)] if path else []
        return (path, [(stat.st_mtime_ns, stat.st_size) for stat in stats], sorted(options.items()))

    @classmethod
    def execute(
        cls,
        model_name: str,
        rotation: bool = True,
        protect: str = "",
        force: str = "",
        keep_copy: bool = False,
        branch: str = "auto",
        scale_search: bool = False,
        int8_speed: str = "fused",
    ) -> io.NodeOutput:
        """Load the file and show what became of its layers."""
        from .int8 import host_backend, status, warm_up
        from .int8.loader import LoadOptions, load_model
        from .int8.report import REPORT_KEY

        path = folder_paths.get_full_path_or_raise(FOLDER, model_name)
        options = LoadOptions(
            rotation=rotation, protect=protect, force=force, branch=branch, mse=scale_search, cache=keep_copy
        )
        model = load_model(path, options)
        line = status.Line(cls.hidden.unique_id)
        host_backend.set_speed(model, int8_speed, line.add)
        line.show(model.get_attachment(REPORT_KEY).summary() + warm_up.compile_kernels(model))
        return io.NodeOutput(model)
