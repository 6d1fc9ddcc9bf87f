"""The index of the pack's nodes."""

import logging

from comfy_api.latest import ComfyExtension, io


class NativeInt8Extension(ComfyExtension):
    """The nodes of Native INT8 DiT."""

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        """Return the node classes; they are imported here so that loading the pack stays cheap."""
        try:
            from .int8_audit import INT8Audit
            from .int8_benchmark import INT8Benchmark
            from .int8_capability_check import INT8CapabilityCheck
            from .int8_patch_model import INT8PatchModel
            from .int8_quality_report import INT8QualityReport
            from .int8_save_model import INT8SaveModel
            from .int8_tune import INT8TuneKernels
            from .load_dit_native_int8 import LoadDiTNativeINT8
            from .load_text_encoder_native_int8 import LoadTextEncoderNativeINT8
        except Exception:
            # ComfyUI logs only the message of an exception raised here, never its traceback
            logging.getLogger("native_int8.extension").exception("A node of Native INT8 DiT could not be imported.")
            raise
        return [
            LoadDiTNativeINT8,
            LoadTextEncoderNativeINT8,
            INT8PatchModel,
            INT8SaveModel,
            INT8CapabilityCheck,
            INT8Audit,
            INT8Benchmark,
            INT8QualityReport,
            INT8TuneKernels,
        ]
