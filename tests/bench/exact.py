"""What the INT8 ops must give, computed on the GPU by other means than the kernels under test."""

from __future__ import annotations

import torch

# fp32 and fp64 copies are made of pieces of this size
CHUNK_BYTES = 256 << 20
MIN_SCALE = 1e-30


def _row_chunks(rows: int, row_bytes: int):
    step = max(1, CHUNK_BYTES // max(row_bytes, 1))
    return (slice(start, start + step) for start in range(0, rows, step))


def accumulate_int_mm(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """q_x [M, K] int8, q_w [N, K] int8 -> int32 [M, N] by torch._int_mm; operands are padded to what it takes."""
    m, k = q_x.shape
    n = q_w.shape[0]
    pad = torch.nn.functional.pad
    if m <= 16 or k % 8:
        q_x = pad(q_x, (0, -k % 8, 0, max(0, 32 - m)))
    if n % 8 or k % 8:
        q_w = pad(q_w, (0, -k % 8, 0, -n % 8))
    return torch._int_mm(q_x.contiguous(), q_w.contiguous().t())[:m, :n]


def accumulate_fp64(q_x: torch.Tensor, q_w: torch.Tensor) -> torch.Tensor:
    """The same in fp64, where every sum of K <= 2**38 products is exact; any shape, also empty ones."""
    return (q_x.double() @ q_w.double().t()).to(torch.int32)


def rounded_once(
    accumulate,
    q_x: torch.Tensor,
    x_scale: torch.Tensor,
    q_w: torch.Tensor,
    w_scale: torch.Tensor,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """y = ((acc * x_scale) * w_scale) + bias in fp32, rounded once to dtype. x_scale [M, 1], w_scale [N, 1] or one value."""
    m, n = q_x.shape[0], q_w.shape[0]
    y = torch.empty((m, n), dtype=dtype, device=q_x.device)
    for part in _row_chunks(m, 4 * n):
        out = accumulate(q_x[part], q_w).float() * x_scale[part].reshape(-1, 1) * w_scale.float().reshape(1, -1)
        if bias is not None:
            out = out + bias.float()
        y[part] = out.to(dtype)
    return y


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] float -> q int8, scale [M, 1] fp32: amax / 127 per row, half to even, in plain PyTorch, a pass each."""
    x = x.float()
    amax = x.abs().amax(dim=1, keepdim=True).clamp(min=127 * MIN_SCALE)
    # a tensor, not a number: CUDA divides by a number through its reciprocal, which rounds differently
    most = torch.full_like(amax, 127.0)
    return torch.round(x * (most / amax)).to(torch.int8), amax / most


def first_difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """None when bit for bit the same (NaN equals NaN), else how many differ and the first of them."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype} {tuple(got.shape)} instead of {expected.dtype} {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return None
    differ = got != expected
    if got.is_floating_point():
        differ &= ~(got.isnan() & expected.isnan())
    count = int(differ.sum())
    if count == 0:
        return None
    index = tuple(differ.nonzero()[0].tolist())
    return f"{count} of {differ.numel()} differ, first at {index}: {got[index].item()} for {expected[index].item()}"


def codes_apart(got: torch.Tensor, expected: torch.Tensor) -> tuple[int, float]:
    """int8 codes: the largest distance, and the share that differs."""
    most, differ = 0, 0
    for part in _row_chunks(got.shape[0], 4 * got.shape[1]):
        distance = (got[part].short() - expected[part].short()).abs()
        most, differ = max(most, int(distance.max())), differ + int((distance > 0).sum())
    return most, differ / max(got.numel(), 1)


def relative_rms(got: torch.Tensor, expected: torch.Tensor) -> float:
    """RMS of the difference over RMS of expected; infinite when got is not finite."""
    error = total = 0.0
    for part in _row_chunks(got.shape[0], 4 * got.shape[1]):
        g, e = got[part].float(), expected[part].float()
        error += float((g - e).square().sum(dtype=torch.float64))
        total += float(e.square().sum(dtype=torch.float64))
    return (error / max(total, 1e-300)) ** 0.5 if error == error else float("inf")
