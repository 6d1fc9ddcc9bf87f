"""INT8 linear algebra for diffusion transformers: the ops. Imports torch and triton only.

op                   | what it does                                          | Triton                       | plain PyTorch
quantize_rows        | float rows -> int8 codes and one scale per row        | quantize_rows_triton.py      | quantize_rows.py
quantize_rms_norm    | the same with an RMSNorm in front, in one pass        | quantize_rms_norm_triton.py  | quantize_rms_norm.py
residual_norm        | x + gate * norm(y); norm, modulate and quantise that  | residual_norm_triton.py      | residual_norm.py
quantize_swiglu      | silu(gate) * up of two tensors, then as quantize_rows | quantize_activation_triton.py | quantize_activation.py
quantize_gelu        | the same with the GELU of one                         | quantize_activation_triton.py | quantize_activation.py
rms_rope             | RMSNorm and rotary embedding of the heads of q and k  | rms_rope_triton.py           | rms_rope.py
rotate               | grouped Hadamard rotation of the columns (ConvRot)    | rotate_triton.py             | rotate.py
int8_matmul          | int8 x int8 -> int32, scales and bias in the epilogue | int8_matmul_triton.py, _tma_, _split_k_ | int8_matmul.py
int8_linear          | act? + rotate? + quantise + matmul: one Linear        | (the kernels above)          | int8_linear.py
int8_linear_swiglu   | two Linears with SwiGLU in the epilogue               | int8_matmul_fused_triton.py  | int8_linear_fused.py
int8_linear_residual | a Linear with gate and residual in the epilogue       | int8_matmul_fused_triton.py  | int8_linear_fused.py
add_low_rank         | y + (x down^T) up^T: what LoRAs add to a Linear       | int8_matmul_low_rank_triton.py | low_rank.py

Around them: capability.py (what this GPU can do), dispatch.py (which implementation, and why not the others),
tiles.py (which tile), tile_search.py, tuning.py and tuned.py (measure a card's own tiles, on request), warmup.py
(compile ahead), prepared_linear.py (int8_linear with little host time per call), packed_rows.py (quantised rows made for
one), reference.py (what each op means; for tests only).

Letters, the same in every file:
    M  rows: tokens x batch        K  in_features        N  out_features
    x [M, K]  activation           w, weight [N, K]      y [M, N]  output
    q_x, q_w  int8 codes           x_scale [M, 1], w_scale [N, 1] or one value: float32, multiply to dequantise
"""

from .capability import Device, detect, device_from
from .dispatch import (
    Choice,
    Implementation,
    Int8Error,
    NoImplementation,
    UnsupportedInput,
    choose,
    implementations,
)
from .int8_linear import int8_linear
from .int8_linear_fused import int8_linear_residual, int8_linear_swiglu
from .int8_matmul import int8_matmul
from .low_rank import LowRank, add_low_rank
from .prepared_linear import PreparedLinear
from .quantize_activation import quantize_gelu, quantize_swiglu
from .quantize_rms_norm import quantize_rms_norm
from .quantize_rows import quantize_rows
from .residual_norm import Branch, Norm, residual_norm
from .rms_rope import rms_rope
from .rotate import rotate

__all__ = [
    "Branch",
    "Choice",
    "Device",
    "Implementation",
    "Int8Error",
    "LowRank",
    "NoImplementation",
    "Norm",
    "PreparedLinear",
    "UnsupportedInput",
    "add_low_rank",
    "choose",
    "detect",
    "device_from",
    "implementations",
    "int8_linear",
    "int8_linear_residual",
    "int8_linear_swiglu",
    "int8_matmul",
    "quantize_gelu",
    "quantize_rms_norm",
    "quantize_rows",
    "quantize_swiglu",
    "residual_norm",
    "rms_rope",
    "rotate",
]
