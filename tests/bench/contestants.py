"""Who runs against whom: every way to compute one Linear, as a call without arguments over the same inputs.

Each maker takes the inputs of one shape and returns the call. When it cannot run here it raises, and the reason is
kept in the results: nobody is left out silently.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from cases import Case
from exact import quantise_rows

FP8_MAX = 448.0
ROTATION = 256


class Unavailable(Exception):
    """This contestant cannot run this shape on this machine; the text says why."""


class Inputs:
    """Tensors of one shape, made when first asked for. Gaussian: zeros or small integers would draw less power."""

    def __init__(self, case: Case, kernels, seed: int = 0):
        self.case, self.kernels = case, kernels
        generator = torch.Generator("cuda").manual_seed(seed)
        make = functools.partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
        self.x = make((case.m, case.k))
        self.w = make((case.n, case.k)) * case.k**-0.5
        self.bias = make((case.n,)) if case.bias else None

    @functools.cached_property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor]:
        """INT8 weight [N, K] and scale [N, 1]."""
        return self.kernels.quantize_rows(self.w)

    @functools.cached_property
    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The same of the rotated weight W H^T."""
        if self.case.k % ROTATION:
            raise Unavailable(f"K = {self.case.k} is not a multiple of {ROTATION}")
        return self.kernels.quantize_rows(self.w, rotation_group=ROTATION)

    @functools.cached_property
    def q_x(self) -> tuple[torch.Tensor, torch.Tensor]:
        """INT8 input [M, K] and scale [M, 1]."""
        return self.kernels.quantize_rows(self.x)

    @functools.cached_property
    def half(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """x, weight and bias in float16."""
        return self.x.half(), self.w.half(), None if self.bias is None else self.bias.half()

    @functools.cached_property
    def fp8_weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        """fp8 weight [N, K] and scale [1, N]."""
        q, scale = quantise_fp8(self.w)
        return q, scale.t().contiguous()


@triton.jit
def _quantise_fp8_kernel(x_ptr, q_ptr, scale_ptr, k, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    v = tl.load(x_ptr + row * k + offs, mask=offs < k, other=0.0).to(tl.float32)
    amax = tl.maximum(tl.max(tl.abs(v), axis=0), 1e-12)
    tl.store(scale_ptr + row, amax / 448.0)
    tl.store(q_ptr + row * k + offs, (v * (448.0 / amax)).to(tl.float8e4nv), mask=offs < k)


def quantise_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] contiguous -> fp8 e4m3 [M, K] and fp32 scale [M, 1], in one pass, so that fp8 is not held back by eager code."""
    m, k = x.shape
    q = torch.empty((m, k), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((m, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(k)
    _quantise_fp8_kernel[(m,)](
        x, q, scale, k, BLOCK=block, num_warps=4 if block <= 4096 else 8 if block <= 16384 else 16
    )
    return q, scale


def _linear_bf16(i: Inputs):
    return lambda: torch.nn.functional.linear(i.x, i.w, i.bias)


def _linear_fp16_accumulation(i: Inputs):
    switch = torch.backends.cuda.matmul
    if not hasattr(switch, "allow_fp16_accumulation"):
        raise Unavailable(f"torch {torch.__version__} has no allow_fp16_accumulation")
    x, w, bias = i.half

    def call():
        switch.allow_fp16_accumulation = True
        try:
            return torch.nn.functional.linear(x, w, bias)
        finally:
            switch.allow_fp16_accumulation = False

    return call


def fp8_missing() -> str | None:
    """Why fp8 cannot run here, None when it can."""
    if torch.cuda.get_device_capability() < (8, 9):
        return "fp8 needs compute capability 8.9"
    path = os.environ.get("TRITON_OVERRIDE_ARCH", "")
    return f"{path} has no fp8" if path and int(path.removeprefix("sm")) < 89 else None


def _check_fp8(i: Inputs) -> None:
    missing = fp8_missing()
    if missing:
        raise Unavailable(missing)
    if i.case.k % 16 or i.case.n % 16:
        raise Unavailable("torch._scaled_mm needs K and N in multiples of 16")


def _fp8_matmul(i: Inputs):
    _check_fp8(i)
    one = torch.ones((), device="cuda")
    x, w = i.x.to(torch.float8_e4m3fn), i.w.to(torch.float8_e4m3fn)
    return lambda: torch._scaled_mm(x, w.t(), one, one, bias=i.bias, out_dtype=torch.bfloat16, use_fast_accum=True)


def _fp8_dynamic(i: Inputs):
    _check_fp8(i)
    w, w_scale = i.fp8_weight

    def call():
        q, scale = quantise_fp8(i.x)
        return torch._scaled_mm(q, w.t(), scale, w_scale, bias=i.bias, out_dtype=torch.bfloat16, use_fast_accum=True)

    return call


def _check_int_mm(i: Inputs) -> None:
    if i.case.m <= 16 or i.case.k % 8 or i.case.n % 8:
        raise Unavailable("torch._int_mm needs M > 16, and K and N in multiples of 8")


def _int_mm_only(i: Inputs):
    _check_int_mm(i)
    q_x, w = i.q_x[0], i.plain[0]
    return lambda: torch._int_mm(q_x, w.t())


def _int_mm_eager(i: Inputs):
    _check_int_mm(i)
    w, w_scale = i.plain
    row_scale = w_scale.reshape(1, -1)

    def call():
        q, scale = quantise_rows(i.x)
        y = torch._int_mm(q, w.t()).float() * scale * row_scale
        return (y if i.bias is None else y + i.bias).to(torch.bfloat16)

    return call


def _fake_int8(i: Inputs):
    w, w_scale = i.plain
    scale = w_scale.bfloat16()
    return lambda: torch.nn.functional.linear(i.x, w.to(torch.bfloat16) * scale, i.bias)


def _kitchen(backend: str, convrot: bool, i: Inputs):
    try:
        from comfy_kitchen.registry import registry
    except ImportError as error:
        raise Unavailable(f"comfy_kitchen is not importable: {error}") from error
    weight, scale = i.rotated if convrot else i.plain
    arguments = {
        "x": i.x,
        "weight": weight,
        "weight_scale": scale,
        "bias": i.bias,
        "out_dtype": torch.bfloat16,
        "convrot": convrot,
        "convrot_groupsize": ROTATION,
    }
    op = registry.get_implementation("int8_linear", backend=backend, kwargs=arguments)
    return lambda: op(**arguments)


def _ours(rotation: int, i: Inputs):
    weight, scale = i.rotated if rotation else i.plain
    op = i.kernels.int8_linear
    return lambda: op(i.x, weight, scale, i.bias, rotation_group=rotation, implementation="triton")


def _ours_prepared(i: Inputs):
    weight, scale = i.plain
    prepared = i.kernels.PreparedLinear(weight, scale, implementation="triton")
    return lambda: prepared(i.x, weight, scale, i.bias)


def _ours_matmul(i: Inputs):
    (q_x, x_scale), (weight, scale) = i.q_x, i.plain
    op = i.kernels.int8_matmul
    return lambda: op(q_x, x_scale, weight, scale, i.bias, out_dtype=torch.bfloat16, implementation="triton")


def _ours_quantise(rotation: int, i: Inputs):
    if rotation and i.case.k % rotation:
        raise Unavailable(f"K = {i.case.k} is not a multiple of {rotation}")
    op = i.kernels.quantize_rows
    return lambda: op(i.x, rotation_group=rotation, implementation="triton")


def quantise_bytes(case: Case) -> int:
    """Bytes that row quantisation of bf16 must move: 2 read and 1 written per value, and the scales."""
    return 3 * case.m * case.k + 4 * case.m


def _copy(i: Inputs):
    source = torch.empty(quantise_bytes(i.case) // 2, dtype=torch.int8, device="cuda").fill_(1)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


# name -> (what it is, maker). A "linear" includes the quantisation of the input; "part" is a piece of one.
CONTESTANTS: dict[str, tuple[str, str, Callable]] = {
    "bf16": ("linear", "F.linear in bf16 (cuBLAS)", _linear_bf16),
    "fp16_acc": ("linear", "F.linear in fp16 with fp16 accumulation", _linear_fp16_accumulation),
    "fp8_dynamic": ("linear", "fp8 torch._scaled_mm, row scales, input quantised by one Triton pass", _fp8_dynamic),
    "fp8_matmul": ("part", "fp8 torch._scaled_mm alone, one scale, fast accumulation", _fp8_matmul),
    "int_mm_eager": ("linear", "torch._int_mm with eager quantisation and scaling", _int_mm_eager),
    "int_mm": ("part", "torch._int_mm alone, int32 output", _int_mm_only),
    "fake_int8": ("linear", "INT8 weight dequantised to bf16, then F.linear", _fake_int8),
    "kitchen_cuda": ("linear", "comfy_kitchen int8_linear, CUDA backend", functools.partial(_kitchen, "cuda", False)),
    "kitchen_cuda_rot": ("linear", "the same with ConvRot 256", functools.partial(_kitchen, "cuda", True)),
    "kitchen_triton": (
        "linear",
        "comfy_kitchen int8_linear, Triton backend",
        functools.partial(_kitchen, "triton", False),
    ),
    "kitchen_triton_rot": ("linear", "the same with ConvRot 256", functools.partial(_kitchen, "triton", True)),
    "ours": ("linear", "native_int8 int8_linear", functools.partial(_ours, 0)),
    "ours_rot": ("linear", "the same with ConvRot 256", functools.partial(_ours, ROTATION)),
    "ours_prepared": ("linear", "native_int8 PreparedLinear: the same kernels, less host time", _ours_prepared),
    "ours_matmul": ("part", "native_int8 int8_matmul alone", _ours_matmul),
    "ours_quantise": ("part", "native_int8 quantize_rows alone", functools.partial(_ours_quantise, 0)),
    "ours_quantise_rot": ("part", "the same with ConvRot 256", functools.partial(_ours_quantise, ROTATION)),
    "copy": ("part", "a copy that moves as many bytes as row quantisation", _copy),
}
KITCHEN_TRITON = ("kitchen_triton", "kitchen_triton_rot")
