"""The node INT8 Tune Kernels."""

from comfy_api.latest import io

from .int8 import widgets


class INT8TuneKernels(io.ComfyNode):
    """Measures this card once on a MODEL's shapes; the work is in `int8/tune.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8TuneKernels",
            display_name="INT8 Tune Kernels",
            category="model/int8",
            description="Measures once which INT8 kernel settings are fastest on this card for a MODEL, and keeps them.",
            search_aliases=["autotune", "int8 tuning", "tile tuning", "benchmark kernels", "faster int8"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="An INT8 MODEL. Its layer shapes are measured, not the model itself; it comes out unchanged.",
                ),
                *widgets.picture_size("Sizes near it share what is measured; larger takes longer."),
                io.Int.Input(
                    "batch_size",
                    default=1,
                    min=1,
                    max=64,
                    tooltip="Pictures at once. Both branches of the guidance in one batch are measured too.",
                ),
                io.Int.Input(
                    "text_tokens",
                    default=256,
                    min=0,
                    max=8192,
                    tooltip="Length of the prompt in tokens, about. Costs little time; 0 leaves the text layers out.",
                ),
            ],
            outputs=[
                io.Model.Output(tooltip="The MODEL as it came in; placing the node before the sampler tunes first."),
                io.String.Output(
                    "report",
                    tooltip="One line on what was kept and where, then microseconds before and after per shape.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, model, width: int, height: int, batch_size: int, text_tokens: int) -> io.NodeOutput:
        """Tune, with the progress bar, and show the report's first line."""
        from comfy import model_management
        from comfy.utils import ProgressBar

        from .int8 import status, tune, tuned_tiles

        bar = ProgressBar(1)
        text = tune.tune_model(
            model,
            tuned_tiles.rows_of(model, width, height, batch_size, text_tokens),
            lambda done, total, name: bar.update_absolute(done, total),
            model_management.processing_interrupted,
        )
        status.show(text.splitlines()[0], cls.hidden.unique_id)
        # after what was measured so far was kept
        model_management.throw_exception_if_processing_interrupted()
        return io.NodeOutput(model, text)
