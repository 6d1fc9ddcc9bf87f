"""The node INT8 Patch Model."""

from comfy_api.latest import io

from .int8 import widgets


class INT8PatchModel(io.ComfyNode):
    """MODEL -> INT8 MODEL; the work is in `int8/patcher.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8PatchModel",
            display_name="INT8 Patch Model",
            category="model/int8",
            description="Makes an INT8 version of a MODEL and runs it on the fused INT8 kernels.",
            search_aliases=["quantize", "int8", "w8a8", "convrot"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="A float MODEL is rebuilt with INT8 weights (its float weights can then be freed); an INT8 "
                    "MODEL keeps its weights. LoRAs, model sampling and other patches made before this node are kept.",
                ),
                *widgets.layers(),
                widgets.scale_search(),
                widgets.int8_speed(),
            ],
            outputs=[io.Model.Output(tooltip="The INT8 MODEL, about half the size of bf16. The input is not changed.")],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls, model, protect: str = "", force: str = "", scale_search: bool = False, int8_speed: str = "fused"
    ) -> io.NodeOutput:
        """Patch the MODEL and show what became of its layers."""
        from .int8 import host_backend, patcher, status, warm_up
        from .int8.loader import LoadOptions

        patched, report = patcher.patch_model(model, LoadOptions(protect=protect, force=force, mse=scale_search))
        line = status.Line(cls.hidden.unique_id)
        host_backend.set_speed(patched, int8_speed, line.add)
        line.show(report.summary() + warm_up.compile_kernels(patched))
        return io.NodeOutput(patched)
