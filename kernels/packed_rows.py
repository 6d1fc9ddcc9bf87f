"""Quantised rows as PreparedLinear takes them, made before the Linear runs.

For "triton" they are one int8 buffer, codes [M, K] padded to 16 bytes and then M float32 scales; for "torch" the pair
(codes [M, K], scales [M]).
"""

from __future__ import annotations

import torch


def empty_rows(
    m: int, k: int, device: torch.device, implementation: str, packed: bool = True
) -> tuple[torch.Tensor | tuple, torch.Tensor, torch.Tensor]:
    """Memory for M quantised rows of K columns.

    Args:
        implementation: "triton" or "torch", which will write the rows.
        packed: False for two tensors with any implementation; what a graph's op returns may share no memory.
    Returns:
        rows for `PreparedLinear.with_rows`, and views of their parts: q [M, K] int8, scale [M] float32.
    """
    if implementation != "triton" or not packed:
        q = torch.empty((m, k), dtype=torch.int8, device=device)
        scale = torch.empty((m,), dtype=torch.float32, device=device)
        return (q, scale), q, scale
    # 16 bytes: what Triton compiles kernels for
    scales_at = -(-m * k // 16) * 16
    buffer = torch.empty(scales_at + 4 * m, dtype=torch.int8, device=device)
    return buffer, buffer[: m * k].view(m, k), buffer[scales_at:].view(torch.float32)


def parts_of(rows: torch.Tensor | tuple, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """q [M, K] int8 and scale [M] float32 of rows, without a copy."""
    if isinstance(rows, tuple):
        return rows
    return rows[: m * k].view(m, k), rows[-4 * m :].view(torch.float32) if m else rows.view(torch.float32)
