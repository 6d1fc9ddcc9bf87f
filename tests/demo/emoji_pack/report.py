"""What Native INT8 DiT left on a MODEL, as JSON: the load report's decisions and the calls that were counted.

Read from the MODEL's public attachments and wrappers by their documented key, so this pack imports nothing of the
other one.
"""

import json

from comfy.patcher_extension import WrappersMP

KEY = "native_int8"
REPORT_KEY = "native_int8_report"


def describe(model) -> str:
    """JSON of what was decided ("summary", "source", "layers"), what ran ("calls", "declined") and what is held.

    "layers" is None for a MODEL that the pack did not build; "calls" is None where its kernels are not attached.
    The weight counts are elements of 2-D weights, taken from the live model and not from the report.
    """
    report = model.get_attachment(REPORT_KEY)
    record = next((w.record for w in model.get_wrappers(WrappersMP.APPLY_MODEL, KEY) if hasattr(w, "record")), None)
    counted = record.snapshot() if record else {"calls": None, "declined": None}
    int8_weights, float_weights = _count_weights(model.model.diffusion_model)
    return json.dumps(
        {
            "summary": None if report is None else report.summary(),
            "source": None if report is None else report.source_line,
            "layers": None if report is None else [_layer(decision) for decision in report.decisions],
            "calls": counted["calls"],
            "declined": counted["declined"],
            "int8_weights": int8_weights,
            "float_weights": float_weights,
            "weight_bytes": model.model_size(),
            "device": str(model.load_device),
        }
    )


def _layer(decision) -> dict:
    return {
        "layer": decision.layer,
        "action": decision.action,
        "reason": decision.reason,
        "shape": list(decision.shape),
        "rotation_group": decision.rotation_group,
    }


def _count_weights(module) -> tuple[int, int]:
    """Elements of 2-D block weights that are held as int8, and as floats."""
    counts = {True: 0, False: 0}
    for name, parameter in module.named_parameters():
        if parameter.ndim == 2 and "_blocks." in name:
            data = getattr(parameter, "_qdata", parameter)
            counts[str(data.dtype) == "torch.int8"] += parameter.numel()
    return counts[True], counts[False]
