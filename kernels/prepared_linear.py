"""PreparedLinear: int8_linear for one layer that is called often, with everything static worked out beforehand.

`int8_linear` checks its arguments and looks up implementation, tile and machine code on every call. Here a layer's
facts are checked once; a call allocates one buffer for codes and scales and one for the output and starts two kernels
whose arguments are kept per number of rows. The object holds no tensor, so it keeps no weight in memory.
Linears that read one tensor can pass the quantised rows on: `with_rows` takes and returns them.
"""

from __future__ import annotations

import torch

from .capability import detect
from .dispatch import LinearFacts, UnsupportedInput, choose_for
from .int8_matmul import check_weight, int8_matmul_torch
from .launch import is_aligned, on_device
from .low_rank import LowRank, add_low_rank, fits_epilogue
from .quantize_rows import quantize_2d
from .tiles import Tile, pick, sm_of, split_of

# equal kinds are one object, so that comparing them costs a call nothing
_rows_kinds: dict[tuple, tuple] = {}

# plans are kept for this many numbers of rows; a picture needs two or three
MAX_PLANS = 64


class _Plan:
    """What is left to do for one number of rows: the tile it was made for, buffer layout, kernels, arguments."""

    __slots__ = (
        "bytes", "matmul", "matmul_numbers", "matmul_programs", "quantise", "quantise_numbers", "scales_at", "tile"
    )  # fmt: skip


class PreparedLinear:
    """y = dequantise(quantise(R(act(x))) @ weight^T) + bias for weights of one shape on one device.

    Args:
        weight: [N, K] int8, columns contiguous.
        weight_scale: 1 or N values, float32, contiguous, on the device of `weight`.
        rotation_group, input_act, implementation: as in `int8_linear`.
    Raises:
        UnsupportedInput: a weight, scale, group or activation that is not listed here.
        NoImplementation: the named implementation cannot run on this device.

    Attributes: device; implementation ("triton" or "torch"); columns that x must have; rows_kind: rows that one layer
    quantised fit another exactly if this is the same object.
    """

    __slots__ = (
        "_act",
        "_device",
        "_facts",
        "_group",
        "_k",
        "_n",
        "_plans",
        "_row_scales",
        "_weight_stride",
        "columns",
        "device",
        "implementation",
        "rows_kind",
    )  # fmt: skip

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        *,
        rotation_group: int = 0,
        input_act: str | None = None,
        implementation: str | None = None,
    ):
        check_weight(weight, weight_scale, None, weight.shape[-1], "PreparedLinear")
        if (
            weight.stride(1) != 1
            or weight_scale.dtype != torch.float32
            or not weight_scale.is_contiguous()
            or weight_scale.device != weight.device
        ):
            raise UnsupportedInput(
                f"PreparedLinear: the scale is {weight_scale.dtype} on {weight_scale.device}, strides of weight and scale "
                f"are {weight.stride()} and {weight_scale.stride()}. Needed: float32 on {weight.device}, both contiguous. "
                "Call int8_linear, which converts them."
            )
        n, k = weight.shape
        self.device = weight.device
        self._device = detect(weight.device)
        # what the matmul wants to know of the GPU
        self._facts = sm_of(self._device), self._device.multiprocessors
        self.implementation = choose_for(
            self._device, LinearFacts(k, n, rotation_group, input_act), implementation
        ).implementation
        self._n, self._k, self._group, self._act = n, k, rotation_group, input_act
        self.columns = 2 * k if input_act == "swiglu" else k
        kind = (self.device, self.implementation, self.columns, rotation_group, input_act)
        self.rows_kind = _rows_kinds.setdefault(kind, kind)
        self._row_scales = weight_scale.numel() > 1
        self._weight_stride = weight.stride(0)
        self._plans: dict[tuple, _Plan] = {}

    def __call__(
        self, x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run the layer. Arguments are trusted; those of `__init__` or others of the same shape, strides and device.

        Args:
            x: [..., K] float16, bfloat16 or float32 on the device, no gradient; [..., 2K] for "swiglu".
            bias: [N], contiguous, any float dtype, or None.
        Returns:
            [..., N] in the dtype of x, contiguous, equal to `int8_linear` bit for bit.
        """
        return self.with_rows(x, weight, weight_scale, bias)[0]

    def with_rows(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None = None,
        rows: torch.Tensor | tuple | None = None,
        low_rank: LowRank | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | tuple | None]:
        """Run the layer with rows that another layer of the same `rows_kind` quantised from the same x.

        Args:
            x, weight, weight_scale, bias: as in a call; x is not read when rows are given and low_rank is not.
            rows: what the other layer's `with_rows` returned; None to quantise x here.
            low_rank: y gets (x down^T) up^T added, as `add_low_rank` does; not for an `input_act`.
        Returns:
            the output, and the rows for the next layer: for "triton" int8 [M * K padded to 16 bytes + 4 M], codes and
            then float32 scales; for "torch" codes [M, K] and scales [M]. None without rows or without outputs.
        """
        y = torch.empty((*x.shape[:-1], self._n), dtype=x.dtype, device=self.device)
        m = x.numel() // self.columns
        if m == 0 or self._n == 0:
            return y, rows
        if self.implementation != "triton":
            if rows is None:
                rows = quantize_2d(x.reshape(m, self.columns), self._group, self._act, self.implementation)
            int8_matmul_torch(*rows, weight, weight_scale, bias, y.view(m, self._n))
            return y if low_rank is None else add_low_rank(y, x, low_rank), rows
        if low_rank is not None and not fits_epilogue(low_rank, x):
            y, rows = self.with_rows(x, weight, weight_scale, bias, rows)
            return add_low_rank(y, x, low_rank), rows
        with on_device(self.device):
            low = ()
            if low_rank is not None:
                low = torch.nn.functional.linear(x.reshape(m, self.columns), low_rank.down), low_rank.up
            key = (m, x.dtype, None if bias is None else bias.dtype, low[1].shape[1] if low else 0)
            plan = self._plans.get(key)
            pointers = (
                x.data_ptr(), weight.data_ptr(), weight_scale.data_ptr(), 0 if bias is None else bias.data_ptr()
            )  # fmt: skip
            low_at = (low[0].data_ptr(), low[1].data_ptr()) if low else ()
            if (
                plan is None
                or not x.is_contiguous()
                or not is_aligned(*pointers, *low_at)
                # a plan that was made with given rows
                or (rows is None and plan.quantise is None)
                # the table changes when a card was tuned or a tile rejected
                or plan.tile is not pick(self._device, m, self._n, self._k)
            ):
                x = x.reshape(m, self.columns) if rows is None else None
                return y, self._first(key, x, weight, weight_scale, bias, y.view(m, self._n), rows, low)
            return y, self._again(plan, m, pointers, low_at, weight, weight_scale, bias, y, rows)

    def _again(self, plan: _Plan, m: int, pointers: tuple, low_at: tuple, weight, weight_scale, bias, y, rows):
        x_at, weight_at, weight_scale_at, bias_at = pointers
        buffer = torch.empty(plan.bytes, dtype=torch.int8, device=self.device) if rows is None else rows
        q_at = buffer.data_ptr()
        scale_at = q_at + plan.scales_at
        if rows is None:
            plan.quantise(m, (x_at, q_at, scale_at, *plan.quantise_numbers))
        if plan.matmul is None:
            from .int8_matmul_triton import int8_matmul_triton

            q = buffer[: plan.scales_at].view(m, self._k)
            scale = buffer[plan.scales_at :].view(torch.float32)
            int8_matmul_triton(q, scale, weight, weight_scale, bias, y.view(m, self._n), plan.tile, *self._facts)
            return buffer
        plan.matmul(
            plan.matmul_programs,
            (
                q_at,
                scale_at,
                weight_at,
                weight_scale_at,
                bias_at or weight_scale_at,
                y.data_ptr(),
                *low_at,
                *plan.matmul_numbers,
            ),
        )
        return buffer

    def _starts_by_tensor(self, tile: Tile, m: int) -> bool:
        """Whether the matmul's kernels want tensors for m rows: TMA descriptors, or a split along K."""
        k, multiprocessors = self._k, self._facts[1]
        if tile.split_k and multiprocessors and split_of(tile, m, self._n, k, multiprocessors) is not None:
            return True
        from .int8_matmul_triton import uses_tma

        return uses_tma(tile, True, k, k, self._weight_stride)

    def _first(self, key: tuple, x, weight, weight_scale, bias, y, rows, low: tuple) -> torch.Tensor:
        """Run by tensors, compiling where needed, and keep what a second run with as many rows can use."""
        from . import int8_matmul_triton as matmul
        from . import quantize_rows_triton as quantise

        m, n, k = key[0], self._n, self._k
        tile = pick(self._device, m, n, k)
        # 16 bytes: what Triton compiled the kernels for
        scales_at = -(-m * k // 16) * 16
        buffer = torch.empty(scales_at + 4 * m, dtype=torch.int8, device=self.device) if rows is None else rows
        q, scale = buffer[: m * k].view(m, k), buffer[scales_at:].view(torch.float32)
        quantise_starter = None
        if rows is None:
            x = x if x.stride(1) == 1 else x.contiguous()
            quantise_starter = quantise.quantize_rows_triton(x, q, scale, self._group, self._act)
        weight_scale = weight_scale.view(-1)
        if low:
            from . import int8_matmul_low_rank_triton as with_low_rank

            matmul_starter = with_low_rank.int8_matmul_low_rank_triton(
                q, scale, weight, weight_scale, bias, *low, y, tile
            )
        else:
            matmul_starter = matmul.int8_matmul_triton(q, scale, weight, weight_scale, bias, y, tile, *self._facts)
        by_tensor = not low and self._starts_by_tensor(tile, m)
        quantised = rows is not None or (quantise_starter is not None and x.stride(0) == self.columns)
        if not quantised or (matmul_starter is None and not by_tensor):
            return buffer
        plan = _Plan()
        plan.tile, plan.bytes, plan.scales_at = tile, scales_at + 4 * m, scales_at
        plan.quantise, plan.matmul = quantise_starter, matmul_starter
        plan.quantise_numbers = quantise.numbers(k, self.columns, k, self._group, self._act)
        plan.matmul_programs = matmul.programs(m, n, tile)
        strides, facts = (k, self._weight_stride, n), (self._row_scales, bias is not None, tile)
        if low:
            plan.matmul_numbers = with_low_rank.numbers(m, n, k, strides, key[-1], *facts)
        else:
            plan.matmul_numbers = matmul.numbers(m, n, k, strides, *facts)
        if len(self._plans) >= MAX_PLANS:
            self._plans.clear()
        self._plans[key] = plan
        return buffer
