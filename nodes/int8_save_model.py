"""The node INT8 Save Model."""

import folder_paths
from comfy_api.latest import io


class INT8SaveModel(io.ComfyNode):
    """MODEL -> a native INT8 file; the work is in `int8/save.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8SaveModel",
            display_name="INT8 Save Model",
            category="model/int8",
            description="Saves an INT8 MODEL as a native INT8 safetensors file, which ComfyUI loads without this pack too.",
            search_aliases=["save int8", "convert", "export", "quantize", "convrot"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="An INT8 MODEL, of Load DiT (Native INT8) or INT8 Patch Model. It is written one layer at a time, so "
                    "that takes little memory beyond its own.",
                ),
                io.String.Input(
                    "filename_prefix",
                    default="diffusion_models/native_int8",
                    tooltip="Name of the file in ComfyUI's output folder; a number is added, so no file is replaced. Loaders "
                    "list what is in its subfolder diffusion_models. Takes about half the size of the bf16 file.",
                ),
                io.Combo.Input(
                    "loras",
                    options=["bake", "refuse"],
                    default="bake",
                    tooltip="bake: LoRAs on the MODEL become part of the saved weights, as they run, and cost nothing at "
                    "run time then; they cannot be taken out again. refuse: stop when there are any.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "file_name", display_name="file_name", tooltip="The path of the file that was written."
                ),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename_prefix: str, loras: str = "bake") -> io.NodeOutput:
        """Save the MODEL and show where."""
        from .int8 import save, status

        path = save.free_name(folder_paths.get_output_directory(), filename_prefix)
        baked = save.save_model(model, str(path), loras)
        size = path.stat().st_size / 1e9
        line = f"saved {path.name}, {size:.2f} GB" + (f", patches baked into {baked} weights" if baked else "")
        status.show(line, cls.hidden.unique_id)
        return io.NodeOutput(str(path))
