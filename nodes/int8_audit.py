"""The node INT8 Audit."""

import time

from comfy_api.latest import io

from .int8 import widgets


class INT8Audit(io.ComfyNode):
    """Lists what each Linear of a MODEL really runs; the work is in `int8/audit.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8Audit",
            display_name="INT8 Audit",
            category="model/int8",
            description="Watches one forward of any MODEL and lists for each Linear the kernel that ran, its share of the time, "
            "and fake INT8: weights kept in INT8 but multiplied in float.",
            search_aliases=[
                "is int8 really used",
                "fake int8",
                "which kernel",
                "fallback",
                "int8 profile",
                "dequantize",
            ],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="Any MODEL: of this pack, ComfyUI's own INT8, of another pack, or float. Four forwards of it are run.",
                ),
                *widgets.picture_size("It changes the shares of the time; kernels are the same."),
                io.Int.Input(
                    "text_tokens",
                    default=256,
                    min=1,
                    max=8192,
                    tooltip="Length of the made-up prompt in tokens. Not used with a conditioning.",
                ),
                io.Conditioning.Input(
                    "conditioning",
                    optional=True,
                    tooltip="A prompt for the forward. Needed only where none can be made up, as the message then says.",
                ),
            ],
            outputs=[
                io.String.Output(
                    "report",
                    tooltip="A summary, the groups of layers that ran alike with the reason, and a line for each Linear.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls, **_) -> float:
        """Never equal to the last one: what runs depends on free memory and start options, too."""
        return time.time()

    @classmethod
    def execute(cls, model, width: int, height: int, text_tokens: int, conditioning=None) -> io.NodeOutput:
        """Watch, with the progress bar, and show the summary."""
        from .int8 import audit, status, trajectory

        latent = trajectory.empty_latent(model, width, height, 1, 1)
        positive = conditioning or trajectory.made_up_conditioning(model, text_tokens)
        found = audit.audit(model, latent, positive, status.progress())
        status.show(found.summary(), cls.hidden.unique_id)
        return io.NodeOutput(found.table())
