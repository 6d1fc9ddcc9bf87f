"""What each op means, in slow plain PyTorch. For tests: no other file of the pack imports this one.

Arithmetic is fp32 in the order written here; an implementation that promises equality follows that order.
Everything is computed and returned on the CPU, wherever the arguments are.
Letters: see kernels/__init__.py.
"""

from __future__ import annotations

import torch

MIN_SCALE = 1e-30


def hadamard(group: int) -> torch.Tensor:
    """The regular Hadamard matrix of ConvRot: [group, group] float64, orthonormal, symmetric, H @ H = I.

    H(4) has -1 where row + column == 3 and +1 elsewhere, over 2; H(4^k) is its k-th Kronecker power.
    """
    h4 = torch.ones(4, 4, dtype=torch.float64)
    h4[torch.arange(4), 3 - torch.arange(4)] = -1
    h = torch.ones(1, 1, dtype=torch.float64)
    while h.shape[0] < group:
        h = torch.kron(h, h4 / 2)
    return h


def rotate(x: torch.Tensor, group: int) -> torch.Tensor:
    """x [..., K] -> float64 [..., K]: each contiguous run of `group` columns multiplied by H(group)."""
    shape = x.shape
    return (x.cpu().double().reshape(-1, group) @ hadamard(group)).reshape(shape)


def input_act(x: torch.Tensor, act: str | None) -> torch.Tensor:
    """The activation that is folded into quantisation, in float64. "swiglu" takes [gate | up] and halves K."""
    x = x.cpu().double()
    if act == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if act == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return x


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., K] float -> q [..., K] int8, scale [..., 1] fp32.

    amax = max(|row|), at least 127 * MIN_SCALE; scale = amax / 127; q = round_half_even(x * (127 / amax)).
    A row that holds NaN or Inf gives scale NaN and q 0, so that the whole output row is NaN.
    """
    x = x.cpu().float()
    amax = x.abs().amax(dim=-1, keepdim=True)
    finite = torch.isfinite(x).all(dim=-1, keepdim=True)
    amax = torch.where(finite, amax, torch.ones_like(amax)).clamp(min=torch.tensor(127.0) * MIN_SCALE)
    q = torch.round(x * (torch.tensor(127.0) / amax))
    q = torch.where(finite, q, torch.zeros_like(q)).to(torch.int8)
    scale = torch.where(finite, amax / 127.0, torch.full_like(amax, float("nan")))
    return q, scale


def int8_accumulate(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """q_x [M, K] int8, q_w [N, K] int8 -> int32 [M, N], exact (summed in int64)."""
    return (q_x.cpu().long() @ q_w.cpu().long().T).to(torch.int32)


def int8_matmul(
    q_x: torch.Tensor,
    x_scale: torch.Tensor,
    q_w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """y = ((acc * x_scale) * w_scale) + bias in fp32, rounded once to out_dtype.

    q_x [M, K] int8, x_scale [M, 1] fp32, q_w [N, K] int8, w_scale 1 or N values fp32, bias [N] -> [M, N].
    """
    y = int8_accumulate(q_x, q_w).float() * x_scale.cpu().reshape(-1, 1) * w_scale.cpu().reshape(1, -1)
    if bias is not None:
        y = y + bias.cpu().float()
    return y.to(out_dtype)
