"""The node INT8 Benchmark."""

import time

import folder_paths
from comfy_api.latest import io


class INT8Benchmark(io.ComfyNode):
    """Measures a MODEL's Linears and step on this machine; the work is in `int8/benchmark.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8Benchmark",
            display_name="INT8 Benchmark",
            category="model/int8",
            description="Measures what INT8 is worth for a MODEL on this card: each Linear, a whole step, memory, and the bound.",
            search_aliases=["int8 speed", "why is int8 slow", "bf16 vs int8", "fp8 vs int8", "amdahl"],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="An INT8 or a float MODEL; it comes to no harm. Loads it, and runs about ten forwards of it per "
                    "resolution.",
                ),
                io.String.Input(
                    "resolutions",
                    default="1024x1024",
                    tooltip="Sizes in pixels, separated by commas; for a video with the number of frames, such as 832x480x81. "
                    "INT8 gains more at larger ones; each takes some seconds on a GPU.",
                ),
                io.Int.Input(
                    "text_tokens",
                    default=256,
                    min=1,
                    max=8192,
                    tooltip="Length of the made-up prompt in tokens. Some models pad it to a length of their own. Not used with a "
                    "conditioning.",
                ),
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="A prompt for the measured forward. Needed only where none can be made up, as the table then says.",
                ),
            ],
            outputs=[
                io.Image.Output("plot", tooltip="The slowest Linears, and a step with and without INT8."),
                io.String.Output("table", tooltip="A line for each shape of Linear; step, memory and Amdahl's bound."),
                io.String.Output(
                    "json_file", tooltip="Path of the file with all numbers; it names no user and no folder."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> float:
        """Never equal to the last one: a card's clock and load change behind the graph's back."""
        return time.time()

    @classmethod
    def execute(cls, model, resolutions: str, text_tokens: int, conditioning=None) -> io.NodeOutput:
        """Measure with the progress bar, write the file, and show the summary."""
        from .int8 import benchmark, status

        result = benchmark.benchmark(
            model,
            benchmark.parse_sizes(resolutions),
            text_tokens=text_tokens,
            conditioning=conditioning,
            progress=status.progress(),
        )
        path = benchmark.write(result, folder_paths.get_output_directory())
        status.show(result.summary(), cls.hidden.unique_id)
        return io.NodeOutput(result.plot(), result.table(), str(path))
