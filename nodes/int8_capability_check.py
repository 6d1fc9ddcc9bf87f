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
            search_aliases=[
                "int8 gpu check",
                "triton check",
                "ampere check",
                "why is int8 slow",
                "gpu throttled",
                "which gpu",
            ],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "model",
                    optional=True,
                    tooltip="With measure on, the Linears of this MODEL are measured in place of typical ones; it comes to no harm. "
                    "Loading it is the only cost.",
                ),
                io.Boolean.Input(
                    "measure",
                    default=False,
                    optional=True,
                    tooltip="Measure Linears in bf16 and in INT8 on this GPU, and whether it is as fast as it should be (hot and "
                    "busy cards are named). Takes about five seconds and 2 GB of free GPU memory each time; off, the report takes "
                    "less than one.",
                ),
            ],
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
    def fingerprint_inputs(cls, **_) -> float:
        """Never equal to the last one: drivers, packages and start options change behind the graph's back."""
        return time.time()

    @classmethod
    def execute(cls, model=None, measure: bool = False) -> io.NodeOutput:
        """Look, measure if asked to, and show the report."""
        from comfy import model_management

        from ..kernels.capability import detect
        from .int8 import advice, attention, status, surroundings

        here = model_management.get_torch_device()
        device = detect(here)
        forced_cpu = device.type == "cpu" and detect().type != "cpu"
        measured = []
        if measure:
            from .int8 import card_speed

            measured = card_speed.measure(here, model, status.progress())
        around, others = surroundings.look(forced_cpu=forced_cpu), surroundings.other_gpus(here)
        text = advice.report(device, around, measured, others, attention.look())
        status.show(text, cls.hidden.unique_id)
        return io.NodeOutput(device.is_consumer_ampere, text)
