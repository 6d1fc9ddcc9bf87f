"""int8_linear: what one Linear of a diffusion transformer runs. (act, rotate) -> quantise rows -> int8 matmul.

Two kernels on a GPU: the first reads the activation once and writes int8 rows and scales, the second multiplies on
the INT8 tensor cores and writes the finished output. The whole is a torch.library op, so torch.compile and CUDA graph
capture see one opaque call with known output; eager calls skip the op and its dispatch cost.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import LinearFacts, UnsupportedInput, choose_for
from .int8_matmul import OUT_DTYPES, as_bias, as_scales, check_weight, matmul_2d
from .quantize_rows import input_features, quantize_2d


def _run(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    rotation_group: int,
    input_act: str | None,
    out_dtype: torch.dtype,
    implementation: str | None,
) -> torch.Tensor:
    """Arguments are checked; x has any strides and 1 to many dimensions."""
    n, k = weight.shape
    device = detect(x.device)
    chosen = choose_for(device, LinearFacts(k, n, rotation_group, input_act), implementation).implementation
    q_x, x_scale = quantize_2d(x.reshape(-1, x.shape[-1]), rotation_group, input_act, chosen)
    y = matmul_2d(
        q_x,
        x_scale,
        weight if weight.stride(1) == 1 else weight.contiguous(),
        as_scales(weight_scale, x),
        as_bias(bias),
        out_dtype,
        chosen,
        device,
    )
    return y.reshape(*x.shape[:-1], n)


_library = torch.library.Library("native_int8", "FRAGMENT")
if not hasattr(torch.ops.native_int8, "int8_linear"):
    _library.define(
        "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int rotation_group, "
        "str? input_act, ScalarType out_dtype, str? implementation) -> Tensor"
    )
    _library.impl("int8_linear", _run, "CompositeExplicitAutograd")

    @torch.library.register_fake("native_int8::int8_linear", lib=_library)
    def _int8_linear_fake(x, weight, weight_scale, bias, rotation_group, input_act, out_dtype, implementation):
        return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    rotation_group: int = 0,
    input_act: str | None = None,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """A Linear with an int8 weight, computed in int8: y = dequantise(quantise(R(act(x))) @ weight^T) + bias.

    Args:
        x: [..., K] float16, bfloat16 or float32, 1 or more dimensions, any strides, 0 or more rows;
            [..., 2K] = [gate | up] for "swiglu".
        weight: [N, K] int8, rotated offline when rotation_group is set; -128 is allowed.
        weight_scale: 1 or N values, any float dtype and shape.
        bias: [N] any float dtype, or None.
        rotation_group: 0 for none, else 4, 16, 64, 256 or 1024 dividing K.
        input_act: None, "gelu_tanh" or "swiglu": activation applied to x before it is quantised.
        out_dtype: float16, bfloat16 or float32; default the dtype of x.
        implementation: "triton" or "torch", to ask for exactly that one; default the best for the device.
    Returns:
        [..., N] in out_dtype, contiguous, freshly allocated. A row of x that holds NaN or Inf gives a row of NaN.
    Raises:
        UnsupportedInput: a shape, dtype, group or activation that is not listed here, or x that requires a gradient.
        NoImplementation: the named implementation cannot run on this device.
    """
    out_dtype = x.dtype if out_dtype is None else out_dtype
    k = input_features(x, input_act, "int8_linear")
    check_weight(weight, weight_scale, bias, k, "int8_linear")
    if out_dtype not in OUT_DTYPES:
        raise UnsupportedInput(
            f"int8_linear: out_dtype is {out_dtype}. Needed: one of {OUT_DTYPES}. Convert the result."
        )
    if x.requires_grad and torch.is_grad_enabled():
        raise UnsupportedInput(
            "int8_linear: x requires a gradient, and rounding to int8 has none. Needed: inference. "
            "Call it under torch.no_grad() or torch.inference_mode(), or train the float model."
        )
    run = torch.ops.native_int8.int8_linear if type(x) is not torch.Tensor or torch.compiler.is_compiling() else _run
    return run(x, weight, weight_scale, bias, rotation_group, input_act, out_dtype, implementation)
