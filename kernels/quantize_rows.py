"""quantize_rows: float rows -> int8 codes and one fp32 scale per row.

amax = max(|row|); scale = amax / 127; q = round_half_even(x * (127 / amax)), in [-127, 127]; x ~ q * scale.
A row of zeros gets the scale 1e-30 and codes 0. A row that holds NaN or Inf gets the scale NaN, so that its whole
output row is NaN instead of a plausible number; other rows are not touched by it.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import INPUT_ACTS, UnsupportedInput, choose
from .launch import on_device
from .rotate import check_group, rotate_torch

MIN_SCALE = 1e-30
# rows are converted to fp32 in pieces of this size; on a CPU, where each thread has a part, they should stay in its cache
CHUNK_BYTES = 64 << 20
CPU_CHUNK_BYTES_PER_THREAD = 1 << 19


def apply_input_act(x: torch.Tensor, input_act: str | None) -> torch.Tensor:
    """x [M, K] (or [M, 2K] = [gate | up] for "swiglu") -> fp32 [M, K] after the activation."""
    x = x.float()
    if input_act == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if input_act == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    return x


def quantize_rows_torch(
    x: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, rotation_group: int, input_act: str | None
) -> None:
    """The op in PyTorch, for any device: x [M, K] float -> q [M, K] int8, scale [M] fp32, in chunks of rows."""
    on_cpu, k = x.device.type == "cpu", q.shape[1]
    chunk_bytes = CPU_CHUNK_BYTES_PER_THREAD * torch.get_num_threads() if on_cpu else CHUNK_BYTES
    rows = max(1, min(chunk_bytes // (4 * max(k, 1)), x.shape[0]))
    # a CPU spends more on new memory, page by page, than on the numbers in it
    spare = [torch.empty(rows * k) for _ in range(2 if rotation_group else 1)] if on_cpu else []
    amax = torch.empty((x.shape[0], 1), dtype=torch.float32, device=x.device)
    # a tensor, not a Python number: CUDA divides by a number through its reciprocal, which rounds differently
    most = torch.full_like(amax, 127.0)
    for start in range(0, x.shape[0], rows):
        part = slice(start, start + rows)
        codes, top = q[part], amax[part]
        buffers = [s[: codes.numel()].view(-1, k) for s in spare]
        v = buffers[0].copy_(x[part]) if buffers and input_act is None else apply_input_act(x[part], input_act)
        if rotation_group:
            v = rotate_torch(v, rotation_group, (buffers[1], buffers[0]) if buffers else None)
        # NaN passes through both, so that amax is finite exactly when its row is
        torch.maximum(v.amax(dim=1, keepdim=True), v.amin(dim=1, keepdim=True).neg_(), out=top)
        # v is x itself when nothing was done to it
        own = bool(on_cpu or rotation_group or input_act or x.dtype != torch.float32)
        factor = most[part] / top.clamp(min=127 * MIN_SCALE)
        codes.copy_(torch.mul(v, factor, out=v if own else None).round_())
    bad = ~(amax < float("inf"))
    # on a GPU the question would wait for it
    if not on_cpu or bad.any():
        q.masked_fill_(bad, 0)
    scale.copy_((amax.clamp_(min=127 * MIN_SCALE) / most).masked_fill_(bad, float("nan")).squeeze(1))


def quantize_2d(
    x: torch.Tensor, rotation_group: int, input_act: str | None, implementation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] (any strides) -> q [M, K] int8, scale [M] fp32, by the named implementation; arguments are trusted."""
    m = x.shape[0]
    k = x.shape[1] // 2 if input_act == "swiglu" else x.shape[1]
    q = torch.empty((m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty((m,), dtype=torch.float32, device=x.device)
    if m == 0:
        return q, scale
    if implementation == "torch":
        quantize_rows_torch(x, q, scale, rotation_group, input_act)
        return q, scale
    from .quantize_rows_triton import quantize_rows_triton

    x = x if x.stride(1) == 1 else x.contiguous()
    with on_device(x.device):
        quantize_rows_triton(x, q, scale, rotation_group, input_act)
    return q, scale


def input_features(x: torch.Tensor, input_act: str | None, op: str) -> int:
    """K of x [..., K], or of [..., 2K] for "swiglu". Raises UnsupportedInput for a scalar, an integer x or an odd 2K."""
    if x.dim() == 0 or not x.is_floating_point() or x.dtype == torch.float64 or x.shape[-1] == 0:
        raise UnsupportedInput(
            f"{op}: x is {x.dtype} of shape {tuple(x.shape)}. Needed: float16, bfloat16 or float32 with at least one "
            "dimension and one column. Convert it first."
        )
    if input_act not in INPUT_ACTS:
        raise UnsupportedInput(
            f"{op}: input_act is {input_act!r}. Needed: one of {INPUT_ACTS}. Apply it before the call."
        )
    if input_act == "swiglu":
        if x.shape[-1] % 2:
            raise UnsupportedInput(
                f"{op}: swiglu reads [gate | up], but x has {x.shape[-1]} columns. Needed: an even number. "
                "Check that the gate and up projections are joined."
            )
        return x.shape[-1] // 2
    return x.shape[-1]


def quantize_rows(
    x: torch.Tensor, *, rotation_group: int = 0, input_act: str | None = None, implementation: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row to int8 by its largest magnitude.

    q = round_half_even(v * (127 / amax)), scale = amax / 127, where v is x after the activation and the rotation.

    Args:
        x: [..., K] float16, bfloat16 or float32, any strides; [..., 2K] = [gate | up] for "swiglu".
        rotation_group: 0, or 4, 16, 64, 256, 1024 dividing K: rotate each run of that many columns first.
        input_act: None, "gelu_tanh" or "swiglu".
        implementation: "triton" or "torch", to ask for exactly that one.
    Returns:
        q: [..., K] int8 in [-127, 127], contiguous.
        scale: [..., 1] float32; 1e-30 for an all-zero row, NaN for a row that holds NaN or Inf.
    Raises:
        UnsupportedInput: x is not a float tensor of one of these dtypes, or the group does not divide K.
    """
    k = input_features(x, input_act, "quantize_rows")
    if rotation_group:
        check_group(k, rotation_group)
    chosen = choose(
        detect(x.device),
        in_features=k,
        out_features=k,
        rotation_group=rotation_group,
        input_act=input_act,
        implementation=implementation,
    )
    q, scale = quantize_2d(x.reshape(-1, x.shape[-1]), rotation_group, input_act, chosen.implementation)
    return q.reshape(*x.shape[:-1], k), scale.reshape(*x.shape[:-1], 1)
