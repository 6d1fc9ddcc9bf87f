"""The node INT8 Quality Report."""

from comfy_api.latest import io


class INT8QualityReport(io.ComfyNode):
    """Compares an INT8 MODEL with the float MODEL it stands for; the work is in `int8/compare.py` and `int8/quality.py`."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        """Return the node's inputs and outputs."""
        return io.Schema(
            node_id="INT8QualityReport",
            display_name="INT8 Quality Report",
            category="model/int8",
            description="Compares an INT8 MODEL with its float MODEL: every layer, every step, and two pictures.",
            search_aliases=[
                "int8 quality",
                "sqnr",
                "psnr",
                "ssim",
                "compare models",
                "compare images",
                "protect layers",
            ],
            is_output_node=True,
            inputs=[
                io.Model.Input(
                    "float_model",
                    tooltip="The MODEL in bf16, fp16, fp32 or fp8, for instance of Load Diffusion Model. Runs first, one forward "
                    "a step; then it may leave the GPU.",
                ),
                io.Model.Input(
                    "int8_model",
                    tooltip="The same model in INT8, of Load DiT (Native INT8) or INT8 Patch Model. Runs about two forwards a step.",
                ),
                io.Conditioning.Input(
                    "positive", tooltip="A prompt that is typical of your use; layers differ in what it excites."
                ),
                io.Latent.Input("latent_image", tooltip="An empty latent of the usual size. A smaller one is faster."),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="Of the starting noise, the same for both MODELs.",
                ),
                io.Int.Input(
                    "steps",
                    default=8,
                    min=1,
                    max=1000,
                    tooltip="Euler steps on the simple schedule. Takes about three times as long as sampling with the float MODEL.",
                ),
                io.Float.Input(
                    "cfg",
                    default=1.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    tooltip="Strength of the guidance. 1 leaves the negative prompt out and takes half the time.",
                ),
                io.Float.Input(
                    "protect_below",
                    default=20.0,
                    min=0.0,
                    max=100.0,
                    step=0.5,
                    tooltip="Layers below this SQNR in dB go on the protect list. A higher one keeps more layers in float: closer to "
                    "the float MODEL, more memory and time. 20 dB is an error of a tenth of the layer's output.",
                ),
                io.Conditioning.Input(
                    "negative", optional=True, tooltip="Used when cfg is not 1; without it the positive one is."
                ),
                io.Image.Input(
                    "image_a", optional=True, tooltip="A picture of the float MODEL, to compare with image_b."
                ),
                io.Image.Input(
                    "image_b", optional=True, tooltip="The INT8 MODEL's picture of the same seed, of the same size."
                ),
            ],
            outputs=[
                io.Image.Output(
                    "plot", tooltip="Layers sorted, the worst by name, errors by step, and the pictures' difference."
                ),
                io.String.Output("report", tooltip="The numbers, the worst layers first."),
                io.String.Output(
                    "protect",
                    tooltip="Layers below protect_below, as the loader's protect takes them; empty when there are none.",
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        float_model,
        int8_model,
        positive,
        latent_image,
        seed: int,
        steps: int,
        cfg: float,
        protect_below: float,
        negative=None,
        image_a=None,
        image_b=None,
    ) -> io.NodeOutput:
        """Compare with the progress bar, and show the summary."""
        from .int8 import compare, quality, status

        progress = status.progress()
        picture = quality.compare_both(image_a, image_b)
        result = compare.compare(
            float_model,
            int8_model,
            positive,
            negative,
            latent_image,
            seed=seed,
            steps=steps,
            cfg=cfg,
            progress=lambda done, total: progress(done / total),
        )
        result = result.with_picture(picture)
        status.show(result.summary(protect_below), cls.hidden.unique_id)
        protect = quality.protect_list(result.layers, protect_below, compare.linears(int8_model))
        return io.NodeOutput(result.plot(), result.report(protect_below), protect)
