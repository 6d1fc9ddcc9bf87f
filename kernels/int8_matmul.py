"""int8_matmul: int8 rows times an int8 weight, accumulated in int32, scaled and biased in one go.

y[m, n] = ((acc[m, n] * x_scale[m]) * w_scale[n]) + bias[n] in fp32, rounded once to the output dtype, with
acc[m, n] = sum_k q_x[m, k] * q_w[n, k] exact. Codes may be -128. K is at most 131,072, so that acc fits int32.
"""

from __future__ import annotations

import torch

from .capability import Device, detect
from .dispatch import UnsupportedInput, choose
from .launch import on_device
from .tiles import Tile, pick, sm_of

MAX_K = 131_072
OUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# fp32 scaling happens in pieces of this size
CHUNK_BYTES = 64 << 20
# 128 * 127 * 1024 < 2**24: a sum of this many products is exact in fp32
EXACT_FP32_K = 1024


def _padded(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """x [R, C] with zeros appended to [rows, columns]; x itself when it has that shape, is contiguous and aligned."""
    if x.shape == (rows, columns):
        # cuBLAS refuses operands that do not start at a multiple of 16 bytes
        return x.contiguous() if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)
    return torch.nn.functional.pad(x, (0, columns - x.shape[1], 0, rows - x.shape[0]))


def accumulate_torch(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """q_x [M, K] int8, q_w [N, K] int8 -> int32 [M, N], exact, on any device.

    CUDA's torch._int_mm wants M > 16 and K, N in multiples of 8, so the operands are padded with zeros. A device
    without torch._int_mm multiplies in fp32, 1024 columns at a time, which is exact.
    """
    m, k = q_x.shape
    n = q_w.shape[0]
    if q_x.device.type == "cuda":
        rows, columns, outputs = max(32, m), -(-k // 8) * 8, -(-n // 8) * 8
        acc = torch._int_mm(_padded(q_x, rows, columns), _padded(q_w, outputs, columns).t())
        return acc[:m, :n]
    if q_x.device.type == "cpu":
        return torch._int_mm(q_x.contiguous(), q_w.t())
    acc = torch.zeros((m, n), dtype=torch.int32, device=q_x.device)
    for start in range(0, k, EXACT_FP32_K):
        part = slice(start, start + EXACT_FP32_K)
        acc += (q_x[:, part].float() @ q_w[:, part].float().t()).to(torch.int32)
    return acc


def int8_matmul_torch(
    q_x: torch.Tensor,
    x_scale: torch.Tensor,
    q_w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    y: torch.Tensor,
) -> None:
    """The op in PyTorch: fills y [M, N], a chunk of rows at a time, so that no fp32 copy of all of it exists."""
    n = q_w.shape[0]
    rows = max(1, CHUNK_BYTES // (4 * n))
    row_bias = None if bias is None else bias.float().reshape(1, n)
    for start in range(0, q_x.shape[0], rows):
        part = slice(start, start + rows)
        out = accumulate_torch(q_x[part], q_w).float() * x_scale[part].reshape(-1, 1) * w_scale.reshape(1, -1)
        if row_bias is not None:
            out = out + row_bias
        y[part] = out.to(y.dtype)


def matmul_2d(
    q_x: torch.Tensor,
    x_scale: torch.Tensor,
    q_w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    implementation: str,
    device: Device,
    tile: Tile | None = None,
) -> torch.Tensor:
    """q_x [M, K] int8 with x_scale [M] -> y [M, N] by the named implementation; arguments are trusted."""
    y = torch.empty((q_x.shape[0], q_w.shape[0]), dtype=out_dtype, device=q_x.device)
    if y.numel() == 0:
        return y
    if implementation == "torch":
        int8_matmul_torch(q_x, x_scale, q_w, w_scale, bias, y)
        return y
    from .int8_matmul_triton import int8_matmul_triton

    tile = tile or pick(device, q_x.shape[0], q_w.shape[0], q_x.shape[1])
    with on_device(q_x.device):
        int8_matmul_triton(q_x, x_scale, q_w, w_scale, bias, y, tile, sm_of(device), device.multiprocessors)
    return y


def check_weight(weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None, k: int, op: str) -> None:
    """Raise UnsupportedInput unless weight is int8 [N, k], weight_scale holds 1 or N values and bias N."""
    if weight.dtype != torch.int8 or weight.dim() != 2 or weight.shape[1] != k or k > MAX_K:
        raise UnsupportedInput(
            f"{op}: weight is {weight.dtype} of shape {tuple(weight.shape)} for an input of {k} columns. "
            f"Needed: int8 [N, {k}] with at most {MAX_K} columns. Check that the weight belongs to this layer."
        )
    n = weight.shape[0]
    if weight_scale.numel() not in (1, n):
        raise UnsupportedInput(
            f"{op}: weight_scale has {weight_scale.numel()} values for {n} output rows. Needed: 1 or {n}. "
            "Block-wise scales must be converted to one per row first."
        )
    if bias is not None and bias.numel() != n:
        raise UnsupportedInput(
            f"{op}: bias has {bias.numel()} values. Needed: {n}, one per output row. Check the layer."
        )


def as_scales(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """scale of any shape and float dtype -> contiguous fp32 [numel] on the device of `like`."""
    if scale.dtype != torch.float32 or scale.device != like.device:
        scale = scale.to(device=like.device, dtype=torch.float32)
    # an expanded scale has stride 0, which a kernel would not see
    return scale.reshape(-1).contiguous()


def as_bias(bias: torch.Tensor | None) -> torch.Tensor | None:
    """bias of any shape and strides -> contiguous [numel], or None."""
    return None if bias is None else bias.reshape(-1).contiguous()


def int8_matmul(
    q_x: torch.Tensor,
    x_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype,
    implementation: str | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """Multiply quantised rows by a quantised weight.

    y = ((q_x @ weight^T) * x_scale) * weight_scale + bias, accumulated in int32, scaled in fp32, rounded once.

    Args:
        q_x: [..., K] int8.
        x_scale: [..., 1] float32, one per row.
        weight: [N, K] int8; -128 is allowed.
        weight_scale: 1 or N values, any float dtype and shape.
        bias: [N] any float dtype, or None.
        out_dtype: float16, bfloat16 or float32.
        implementation: "triton" or "torch", to ask for exactly that one.
        tile: a tile instead of the table's; for tests and tuning.
    Returns:
        [..., N] in out_dtype.
    Raises:
        UnsupportedInput: a dtype or a shape that is not listed here.
    """
    if q_x.dtype != torch.int8 or q_x.dim() == 0 or out_dtype not in OUT_DTYPES:
        raise UnsupportedInput(
            f"int8_matmul: q_x is {q_x.dtype} of shape {tuple(q_x.shape)}, out_dtype {out_dtype}. "
            f"Needed: int8 [..., K] and one of {OUT_DTYPES}. Quantise the input with quantize_rows."
        )
    k = q_x.shape[-1]
    check_weight(weight, weight_scale, bias, k, "int8_matmul")
    rows = q_x.reshape(-1, k)
    if x_scale.numel() != rows.shape[0]:
        raise UnsupportedInput(
            f"int8_matmul: x_scale has {x_scale.numel()} values for {rows.shape[0]} rows. Needed: one per row. "
            "Pass the scale that quantize_rows returned with these rows."
        )
    device = detect(q_x.device)
    chosen = choose(device, in_features=k, out_features=weight.shape[0], implementation=implementation)
    y = matmul_2d(
        rows if rows.stride(1) == 1 else rows.contiguous(),
        as_scales(x_scale, q_x),
        weight if weight.stride(1) == 1 else weight.contiguous(),
        as_scales(weight_scale, q_x),
        as_bias(bias),
        out_dtype,
        chosen.implementation,
        device,
        tile,
    )
    return y.reshape(*q_x.shape[:-1], weight.shape[0])
