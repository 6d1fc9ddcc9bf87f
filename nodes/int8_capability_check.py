"""The node that tells what INT8 is worth on this machine."""

import time

from comfy_api.latest import io


class INT8CapabilityCheck(io.ComfyNode):
    """Look at the GPU and the software around it and explain what INT8 does here."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="INT8CapabilityCheck",
            display_name="INT8 Capability Check",
            category="model/int8",
            description="Tells which INT8 path this GPU takes, what gain to expect and why, and what is missing.",
            search_aliases=["int8 gpu check", "triton check", "ampere check", "why is int8 slow"],
            is_output_node=True,
            inputs=[],
            outputs=[
                io.Boolean.Output(
                    "consumer_ampere",
                    tooltip="True on GeForce RTX 30 cards, where INT8 wins most. Drives a switch between two branches.",
                ),
                io.String.Output("report", tooltip="The text shown on the node, about 30 lines."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def fingerprint_inputs(cls) -> float:
        """Never equal to the last one: drivers, packages and start options change behind the graph's back."""
        return time.time()

    @classmethod
    def execute(cls) -> io.NodeOutput:
        from comfy import model_management

        from ..kernels.capability import detect
        from .int8 import advice, status, surroundings

        device = detect(model_management.get_torch_device())
        forced_cpu = device.type == "cpu" and detect().type != "cpu"
        text = advice.report(device, surroundings.look(forced_cpu=forced_cpu))
        status.show(text, cls.hidden.unique_id)
        return io.NodeOutput(device.is_consumer_ampere, text)
