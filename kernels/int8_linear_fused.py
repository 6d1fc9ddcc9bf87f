"""Linears whose epilogue does what usually follows them: SwiGLU of two Linears, or gate * y + residual.

    int8_linear_swiglu     y = silu(x W_gate^T + b_gate) * (x W_up^T + b_up)      one quantisation, one matmul kernel
    int8_linear_residual   y = residual + gate * (x W^T + b)                      no separate pass over y

The two weights of a SwiGLU stay two tensors (or two halves of one); nothing is repacked.
"""

from __future__ import annotations

import functools
import logging

import torch

from .capability import detect
from .dispatch import LinearFacts, UnsupportedInput, choose_for
from .int8_matmul import OUT_DTYPES, as_bias, as_scales, check_weight, matmul_2d
from .launch import is_aligned, on_device
from .low_rank import LowRank, add_low_rank, fits_epilogue
from .packed_rows import parts_of
from .quantize_rows import input_features, quantize_2d
from .tiles import pick, sm_of

log = logging.getLogger("native_int8.int8_linear_fused")


def _prepare(x, weight, rotation_group, input_act, implementation, op):
    """Checks x and chooses: (device, implementation, q_x [M, K], x_scale [M])."""
    k = input_features(x, input_act, op)
    device = detect(x.device)
    facts = LinearFacts(k, weight.shape[0], rotation_group, input_act)
    chosen = choose_for(device, facts, implementation).implementation
    q_x, x_scale = quantize_2d(x.reshape(-1, x.shape[-1]), rotation_group, input_act, chosen)
    return device, chosen, q_x, x_scale


@functools.cache
def _say_copied(n: int, k: int) -> None:
    """Say once per shape that a call copies its weights."""
    log.warning(
        "int8_linear_swiglu copies its weights [%d, %d] on every call: they do not start at a multiple of 16 bytes, or "
        "their rows are spaced differently. Keep both contiguous.",
        n,
        k,
    )


def _columns_contiguous(t: torch.Tensor) -> torch.Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def int8_linear_swiglu(
    x: torch.Tensor,
    gate_weight: torch.Tensor,
    gate_scale: torch.Tensor,
    up_weight: torch.Tensor,
    up_scale: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
    up_bias: torch.Tensor | None = None,
    *,
    rotation_group: int = 0,
    out_dtype: torch.dtype | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """The first half of a SwiGLU MLP: silu(gate Linear) * (up Linear), x quantised once.

    y = silu(g) * u in fp32, rounded once, with g and u as in int8_matmul.

    Args:
        x: [..., K] float16, bfloat16 or float32.
        gate_weight, up_weight: [N, K] int8, rotated offline alike; rows may be strided (halves of one [2N, K] tensor).
            Weights that do not start at a multiple of 16 bytes are copied on every call, with a warning.
        gate_scale, up_scale: 1 or N values each, the same number.
        gate_bias, up_bias: [N] any float dtype, both or none.
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K.
        out_dtype: float16, bfloat16 or float32; default the dtype of x.
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        [..., N] in out_dtype.
    Raises:
        UnsupportedInput: weights of different shape, different kinds of scale, one bias of two, or a wrong x.
        NoImplementation: the named implementation cannot run on this device.
    """
    op = "int8_linear_swiglu"
    out_dtype = x.dtype if out_dtype is None else out_dtype
    k = input_features(x, None, op)
    for weight, scale, bias in ((gate_weight, gate_scale, gate_bias), (up_weight, up_scale, up_bias)):
        check_weight(weight, scale, bias, k, op)
    alike = gate_weight.shape == up_weight.shape and gate_scale.numel() == up_scale.numel()
    if not alike or (gate_bias is None) != (up_bias is None) or out_dtype not in OUT_DTYPES:
        raise UnsupportedInput(
            f"{op}: gate weight {tuple(gate_weight.shape)} with {gate_scale.numel()} scales, up weight "
            f"{tuple(up_weight.shape)} with {up_scale.numel()}, biases {gate_bias is not None} and {up_bias is not None}, "
            f"out_dtype {out_dtype}. Needed: equal shapes, as many scales, both biases or none, and one of {OUT_DTYPES}. "
            "Use two int8_linear calls instead."
        )
    device, chosen, q_x, x_scale = _prepare(x, gate_weight, rotation_group, None, implementation, op)
    n = gate_weight.shape[0]
    gate_scale, up_scale = as_scales(gate_scale, x), as_scales(up_scale, x)
    gate_bias, up_bias = as_bias(gate_bias), as_bias(up_bias)
    y = torch.empty((q_x.shape[0], n), dtype=out_dtype, device=x.device)
    if chosen == "torch":
        g = matmul_2d(q_x, x_scale, gate_weight, gate_scale, gate_bias, torch.float32, chosen, device)
        u = matmul_2d(q_x, x_scale, up_weight, up_scale, up_bias, torch.float32, chosen, device)
        y = (torch.nn.functional.silu(g) * u).to(out_dtype)
    elif y.numel():
        from .int8_matmul_fused_triton import int8_matmul_swiglu_triton

        gate_weight, up_weight = _columns_contiguous(gate_weight), _columns_contiguous(up_weight)
        # the kernel steps from one weight to the other in units of 16 bytes
        if gate_weight.stride(0) != up_weight.stride(0) or not is_aligned(gate_weight.data_ptr(), up_weight.data_ptr()):
            _say_copied(n, k)
            gate_weight, up_weight = gate_weight.clone().contiguous(), up_weight.clone().contiguous()
        tile = pick(device, q_x.shape[0], 2 * n, k)
        with on_device(x.device):
            int8_matmul_swiglu_triton(
                q_x, x_scale, gate_weight, gate_scale, up_weight, up_scale, gate_bias, up_bias, y, tile, sm_of(device)
            )
    return y.reshape(*x.shape[:-1], n)


def swiglu_of_rows(
    x: torch.Tensor,
    rows: torch.Tensor | tuple,
    gate: tuple,
    up: tuple,
    implementation: str,
    low_rank: tuple[LowRank, LowRank] | None = None,
) -> torch.Tensor:
    """silu(gate Linear) * (up Linear) of rows that were quantised before, rounded where separate operations round.

    Arguments are trusted: Linears as PreparedLinear takes them, of one shape, with equal kinds of scales and biases.

    Args:
        x: [..., K] of the dtype of the output; read for low_rank only.
        rows: the quantised input, as PreparedLinear.with_rows takes it.
        gate, up: (weight [N, K] int8, scale of 1 or N values float32, bias [N] or None) each.
        low_rank: what each Linear gets added; None for nothing. `fits_low_rank` says whether a pair can be.
    Returns:
        [..., N] in the dtype of x, equal to the two Linears followed by SiLU and the product.
    """
    if torch.compiler.is_compiling():
        return torch.ops.native_int8.swiglu_of_rows(x, *rows, *gate, *up)
    k, n = x.shape[-1], gate[0].shape[0]
    m = x.numel() // k
    q_x, x_scale = parts_of(rows, m, k)
    device = detect(x.device)
    if implementation == "torch":
        g, u = (matmul_2d(q_x, x_scale, *linear, x.dtype, implementation, device) for linear in (gate, up))
        if low_rank is not None:
            g, u = (add_low_rank(y, x.reshape(m, k), own) for y, own in zip((g, u), low_rank, strict=True))
        return (torch.nn.functional.silu(g) * u).view(*x.shape[:-1], n)
    from .int8_matmul_fused_triton import int8_matmul_swiglu_triton

    y = torch.empty((*x.shape[:-1], n), dtype=x.dtype, device=x.device)
    tile = pick(device, m, 2 * n, k)
    (gate_w, gate_scale, gate_bias), (up_w, up_scale, up_bias) = gate, up
    weights = (gate_w, gate_scale.view(-1), up_w, up_scale.view(-1), gate_bias, up_bias)
    with on_device(x.device):
        products = None if low_rank is None else _inner_products(x.reshape(m, k), *low_rank)
        int8_matmul_swiglu_triton(q_x, x_scale, *weights, y.view(m, n), tile, sm_of(device), True, products)
    return y


def _inner_products(x: torch.Tensor, gate: LowRank, up: LowRank) -> tuple:
    """(inner, factor) of both, as int8_matmul_swiglu_triton takes them; one product where both have one `down`."""
    inner = torch.nn.functional.linear(x, gate.down)
    other = inner if up.down is gate.down else torch.nn.functional.linear(x, up.down)
    return inner, gate.up, other, up.up


def fits_low_rank(low_rank: tuple[LowRank, LowRank], x: torch.Tensor) -> bool:
    """Whether `swiglu_of_rows` can add a pair to Linears of x."""
    return all(fits_epilogue(own, x) for own in low_rank) and low_rank[0].up.shape == low_rank[1].up.shape


def fits_swiglu(gate: tuple, up: tuple) -> bool:
    """Whether `swiglu_of_rows` takes two Linears without copying a weight."""
    (gate_w, gate_scale, gate_bias), (up_w, up_scale, up_bias) = gate, up
    return (
        gate_w.shape == up_w.shape
        and gate_w.stride() == up_w.stride()
        and gate_scale.numel() == up_scale.numel()
        and (gate_bias is None) == (up_bias is None)
        # a graph has no addresses; its op asks when it runs
        and (torch.compiler.is_compiling() or is_aligned(gate_w.data_ptr(), up_w.data_ptr()))
    )


def int8_linear_residual(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    residual: torch.Tensor,
    gate: torch.Tensor | None = None,
    rotation_group: int = 0,
    input_act: str | None = None,
    implementation: str | None = None,
) -> torch.Tensor:
    """A Linear that ends a residual branch: y = residual + gate * (x W^T + bias), in fp32, rounded once.

    Args:
        x, weight, weight_scale, bias, rotation_group, input_act, implementation: as in int8_linear.
        residual: [..., N] float, leading dimensions as x.
        gate: [N] for all rows, or [B, N] (or [B, 1, N]) with B dividing the rows: rows are B images of equal length.
    Returns:
        [..., N] in the dtype of residual, freshly allocated.
    Raises:
        UnsupportedInput: residual or gate of another shape, or what int8_linear refuses.
        NoImplementation: the named implementation cannot run on this device.
    """
    op = "int8_linear_residual"
    k = input_features(x, input_act, op)
    check_weight(weight, weight_scale, bias, k, op)
    n = weight.shape[0]
    rows = x.numel() // x.shape[-1]
    gates = None if gate is None else gate.reshape(-1, n) if gate.numel() % n == 0 else gate
    wrong_gate = gates is not None and (gates.dim() != 2 or gates.shape[-1] != n or rows % max(gates.shape[0], 1))
    if residual.shape != (*x.shape[:-1], n) or residual.dtype not in OUT_DTYPES or wrong_gate:
        raise UnsupportedInput(
            f"{op}: residual is {residual.dtype} {tuple(residual.shape)}, gate "
            f"{None if gate is None else tuple(gate.shape)} for an output of {(*x.shape[:-1], n)}. Needed: a float residual "
            f"of that shape and a gate of [{n}] or [B, {n}] with B dividing the rows. Add them after int8_linear instead."
        )
    device, chosen, q_x, x_scale = _prepare(x, weight, rotation_group, input_act, implementation, op)
    residual_2d = _columns_contiguous(residual.reshape(rows, n))
    weight_scale, bias = as_scales(weight_scale, x), as_bias(bias)
    y = torch.empty((rows, n), dtype=residual.dtype, device=x.device)
    if chosen == "torch":
        branch = matmul_2d(q_x, x_scale, weight, weight_scale, bias, torch.float32, chosen, device)
        if gates is not None:
            branch = branch * gates.float().repeat_interleave(rows // gates.shape[0], dim=0)
        y = (residual_2d.float() + branch).to(residual.dtype)
    elif y.numel():
        from .int8_matmul_fused_triton import int8_matmul_residual_triton

        gates = None if gates is None else _columns_contiguous(gates)
        tile = pick(device, rows, n, k)
        with on_device(x.device):
            int8_matmul_residual_triton(
                q_x, x_scale, _columns_contiguous(weight), weight_scale, bias, gates, residual_2d, y, tile
            )
    return y.reshape(residual.shape)
