"""Compile a MODEL's kernels while its node runs, with the progress bar, instead of in the first step."""

import logging
import time

log = logging.getLogger("native_int8.warm_up")


def compile_kernels(model) -> str:
    """Compile every INT8 kernel that `model` can need on its CUDA device; what exists already costs nothing.

    Returns:
        what to add to the node's line, such as "; 15 kernels ready in 6.1 s"; "" when there was nothing to do.
    Raises:
        InterruptProcessingException: the user stopped the run.
    """
    from comfy import model_management
    from comfy.utils import ProgressBar

    from ...kernels.warmup import compile_all
    from . import host_backend
    from .fusion import registry as fusion
    from .speeds import FUSING
    from .tuned_tiles import linears_of

    device = model.load_device
    if device.type != "cuda":
        return ""
    bar = ProgressBar(1)
    result = compile_all(
        device,
        linears_of(model),
        progress=lambda done, total, name: bar.update_absolute(done, total),
        interrupted=model_management.processing_interrupted,
    )
    model_management.throw_exception_if_processing_interrupted()
    count, start = result.variants, time.perf_counter()
    if host_backend.speed_of(model) in FUSING:
        count += fusion.compile_kernels(model.model.diffusion_model, device, model.model.get_dtype_inference())
    seconds = result.seconds + time.perf_counter() - start
    return f"; {count} kernels ready in {seconds:.1f} s" if count else ""
