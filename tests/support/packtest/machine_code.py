"""Compile the pack's kernels ahead of time, without a GPU, and read the machine code.

Run as a program it prints one JSON object per kernel variant:

    python machine_code.py --sm 80 86 89 90 [--form trans usual]

Triton must not be interpreting (TRITON_INTERPRET unset or 0). To check another Triton than the installed one, put
its folder first on PYTHONPATH. `usual` compiles the textbook form of the matmul (weight loaded as [BLOCK_K, BLOCK_N]),
to show that the checks catch what it turns into on Triton 3.8 and later.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

INT8 = "*i8"
FP32 = "*fp32"
# what kernels do not specialise on
UNSPECIALISED = ("m", "whole", "rest", "pieces")


@triton.jit
def usual_form_kernel(
    x_ptr, w_ptr, y_ptr, k, stride_xm, stride_wn, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The textbook INT8 matmul on a [N, K] weight: pointers as [BLOCK_K, BLOCK_N], advanced as tensors."""
    offs_m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + offs_m[:, None] * stride_xm + offs_k[None, :]
    w_ptrs = w_ptr + offs_k[:, None] + offs_n[None, :] * stride_wn
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for _ in range(0, k, BLOCK_K):
        acc = tl.dot(tl.load(x_ptrs), tl.load(w_ptrs), acc, out_dtype=tl.int32)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K
    tl.store(y_ptr + offs_m[:, None] * stride_ym + offs_n[None, :], acc.to(tl.bfloat16))


@dataclass(frozen=True)
class Report:
    """What the compiler made of one variant. Loop counts are instructions per warp and loop pass."""

    kernel: str
    variant: str
    sm: int
    triton: str
    registers: int
    stack_bytes: int
    shared_bytes: int
    loop_instructions: int
    loop_mma: int
    loop_permutes: int
    loop_local_memory: int
    wgmma: int
    bf16_multiply_adds: int

    @property
    def mma_share(self) -> float:
        """Tensor-core instructions over all instructions of the loop."""
        return self.loop_mma / self.loop_instructions if self.loop_instructions else 0.0


def _compile(fn, types: dict[str, str], constants: dict, sm: int, warps: int, stages: int, options: dict | None = None):
    """Compile a jit function with 16-divisible pointers and sizes, as a layer of a real model gives it."""
    names = fn.arg_names
    signature = {name: types.get(name, "constexpr") for name in names}
    attrs = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(names)
        if name in types and name not in UNSPECIALISED and not types[name].startswith("tensordesc")
    }
    source = ASTSource(fn, signature, constants, attrs)
    options = {"num_warps": warps, "num_stages": stages, **(options or {})}
    return triton.compile(source, GPUTarget("cuda", sm, 32), options)


def _tool(name: str) -> Path:
    return Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage of a cubin."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = str(_tool("cuobjdump"))
        sass = subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout
        usage = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    return sass, usage.stdout + usage.stderr


def _main_loop(sass: str) -> list[str]:
    """Opcodes of the shortest backward branch that holds a tensor-core instruction; [] when there is none."""
    code = [(int(a, 16), op) for a, op in re.findall(r"/\*([0-9a-f]{4,})\*/\s+((?:@!?U?P\d+ )?[A-Z][^;]*);", sass)]
    best: list[str] = []
    for address, text in code:
        target = re.search(r"BRA.*?(?:`\(\.L_x_\d+\)|0x([0-9a-f]+))", text)
        if not target or not target.group(1) or int(target.group(1), 16) >= address:
            continue
        body = [t for a, t in code if int(target.group(1), 16) <= a <= address]
        opcodes = [re.sub(r"^@!?U?P\d+ ", "", t).split()[0] for t in body]
        if any("MMA" in op for op in opcodes) and (not best or len(opcodes) < len(best)):
            best = opcodes
    return best


def report(kernel: str, variant: str, sm: int, compiled) -> Report:
    """Read registers, stack, shared memory and the main loop of a compiled kernel."""
    sass, usage = _disassemble(compiled.asm["cubin"])
    loop = _main_loop(sass)
    numbers = {key: int(value) for key, value in re.findall(r"\b(REG|STACK):(\d+)", usage)}
    return Report(
        kernel=kernel,
        variant=variant,
        sm=sm,
        triton=triton.__version__,
        registers=numbers["REG"],
        stack_bytes=numbers["STACK"],
        shared_bytes=compiled.metadata.shared,
        loop_instructions=len(loop),
        loop_mma=sum("MMA" in op for op in loop),
        loop_permutes=sum(op.startswith("PRMT") for op in loop),
        loop_local_memory=sum(op.startswith(("LDL", "STL")) for op in loop),
        wgmma=len(re.findall(r"\b[IHQ]GMMA\b", sass)),
        bf16_multiply_adds=len(re.findall(r"\bfma\.\S*bf16", compiled.asm["ptx"])),
    )


def matmul_reports(kernels, sm: int):
    """Every tile of an architecture's table, with bf16 output, row scales and bias; TMA tiles in their pointer form."""
    module = kernels["int8_matmul_triton"]
    types = {
        "x_ptr": INT8, "x_scale_ptr": FP32, "w_ptr": INT8, "w_scale_ptr": FP32, "bias_ptr": "*bf16", "y_ptr": "*bf16",
        "m": "i32", "n": "i32", "k": "i32", "stride_xm": "i32", "stride_wn": "i32", "stride_ym": "i32",
    }  # fmt: skip
    for tile in sorted(kernels["tiles"].all_tiles(sm), key=str):
        constants = {
            "ROW_SCALES": True, "HAS_BIAS": True, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "EVEN_K": True,
        }  # fmt: skip
        options = {"enable_fp_fusion": False}
        compiled = _compile(module._int8_matmul_kernel, types, constants, sm, tile.warps, tile.stages, options)
        yield report("int8_matmul", tile.name, sm, compiled)


def boxes(tile) -> dict[str, str]:
    """Types of the two operands as TMA descriptors."""
    return {
        name: f"tensordesc<i8[{rows}, {tile.block_k}]>" for name, rows in (("x", tile.block_m), ("w", tile.block_n))
    }


def tma_reports(kernels, sm: int):
    """Every tile of a table that asks for TMA, fetched that way."""
    module = kernels["int8_matmul_tma_triton"]
    types = {
        "x_scale_ptr": FP32, "w_scale_ptr": FP32, "bias_ptr": "*bf16", "y_ptr": "*bf16",
        **dict.fromkeys(("m", "n", "k", "stride_ym"), "i32"),
    }  # fmt: skip
    for tile in sorted((t for t in kernels["tiles"].all_tiles(sm) if t.tma and not t.split_k), key=str):
        constants = {
            "ROW_SCALES": True, "HAS_BIAS": True, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m,
        }  # fmt: skip
        descriptors = {f"{name}_desc": kind for name, kind in boxes(tile).items()}
        fn, options = module._int8_matmul_tma_kernel, {"enable_fp_fusion": False}
        compiled = _compile(fn, types | descriptors, constants, sm, tile.warps, tile.stages, options)
        yield report("int8_matmul_tma", tile.name, sm, compiled)


def split_k_reports(kernels, sm: int):
    """The split-K form of the default large tiles; on Hopper with operands fetched by TMA where the tile asks for it."""
    module = kernels["int8_matmul_split_k_triton"]
    numbers = ("m", "n", "k", "stride_xm", "stride_wn", "stride_ym", "whole", "rest", "pieces")
    types = {
        "x": INT8, "x_scale_ptr": FP32, "w": INT8, "w_scale_ptr": FP32, "bias_ptr": "*bf16", "y_ptr": "*bf16",
        "partial_ptr": "*i32", **dict.fromkeys(numbers, "i32"),
    }  # fmt: skip
    for tile in sorted((t for t in kernels["tiles"].all_tiles(sm) if t.split_k), key=str):
        constants = {
            "ROW_SCALES": True, "HAS_BIAS": True, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_K": tile.block_k,
            "GROUP_M": tile.group_m, "EVEN_K": True, "TMA": tile.tma,
        }  # fmt: skip
        fn = module._int8_matmul_split_k_kernel
        compiled = _compile(
            fn,
            types | (boxes(tile) if tile.tma else {}),
            constants,
            sm,
            tile.warps,
            tile.stages,
            {"enable_fp_fusion": False},
        )
        yield report("int8_matmul_split_k", tile.name, sm, compiled)


def fused_reports(kernels, sm: int):
    """The default large tiles with the SwiGLU and the residual epilogue."""
    module = kernels["int8_matmul_fused_triton"]
    common = {"x_ptr": INT8, "x_scale_ptr": FP32, "y_ptr": "*bf16", "m": "i32", "n": "i32", "k": "i32"}
    common |= {"stride_xm": "i32", "stride_wn": "i32", "stride_ym": "i32"}
    swiglu = common | {"gate_w_ptr": INT8, "up_w_ptr": INT8, "gate_scale_ptr": FP32, "up_scale_ptr": FP32}
    swiglu |= {"gate_bias_ptr": FP32, "up_bias_ptr": FP32, "rank": "i32"}
    swiglu |= {f"{linear}_{part}_ptr": "*bf16" for linear in ("gate", "up") for part in ("inner", "factor")}
    residual = common | {"w_ptr": INT8, "w_scale_ptr": FP32, "bias_ptr": "*bf16", "gate_ptr": "*bf16"}
    residual |= {"residual_ptr": "*bf16", "stride_rm": "i32", "stride_gate": "i32", "rows_per_gate": "i32"}
    for tile in sorted(kernels["tiles"].default_large_tiles(sm), key=str):
        constants = {
            "ROW_SCALES": True, "HAS_BIAS": False, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "EVEN_K": True,
        }  # fmt: skip
        options = {"enable_fp_fusion": False}
        fn = module._int8_matmul_swiglu_kernel
        for name, block_r in (("int8_matmul_swiglu", 0), ("int8_matmul_swiglu_low_rank", module.RANK_STEP)):
            steps = {"STEPS": True, "CUDA_EXP": True, "BLOCK_R": block_r}
            compiled = _compile(fn, swiglu, constants | steps, sm, tile.warps, tile.stages, options)
            yield report(name, tile.name, sm, compiled)
        fn = module._int8_matmul_residual_kernel
        compiled = _compile(fn, residual, {**constants, "GATES": 1}, sm, tile.warps, tile.stages, options)
        yield report("int8_matmul_residual", tile.name, sm, compiled)


def low_rank_reports(kernels, sm: int):
    """The default large tiles with a low-rank product in the epilogue."""
    module = kernels["int8_matmul_low_rank_triton"]
    types = {
        "x_ptr": INT8, "x_scale_ptr": FP32, "w_ptr": INT8, "w_scale_ptr": FP32, "bias_ptr": "*bf16", "y_ptr": "*bf16",
        "inner_ptr": "*bf16", "up_ptr": "*bf16", "m": "i32", "n": "i32", "k": "i32", "stride_xm": "i32",
        "stride_wn": "i32", "stride_ym": "i32", "rank": "i32",
    }  # fmt: skip
    for tile in sorted(kernels["tiles"].default_large_tiles(sm), key=str):
        constants = {
            "ROW_SCALES": True, "HAS_BIAS": True, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_K": tile.block_k, "GROUP_M": tile.group_m, "EVEN_K": True, "BLOCK_R": module.RANK_STEP,
        }  # fmt: skip
        options = {"enable_fp_fusion": False}
        compiled = _compile(module._int8_matmul_low_rank_kernel, types, constants, sm, tile.warps, tile.stages, options)
        yield report("int8_matmul_low_rank", tile.name, sm, compiled)


def usual_form_reports(sm: int):
    """The textbook form on the default large tile."""
    types = {"x_ptr": INT8, "w_ptr": INT8, "y_ptr": "*bf16", "k": "i32"}
    types |= {"stride_xm": "i32", "stride_wn": "i32", "stride_ym": "i32"}
    compiled = _compile(usual_form_kernel, types, {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}, sm, 4, 4)
    yield report("usual_form", "128x128x64 w4 s4", sm, compiled)


def quantize_reports(kernels, sm: int):
    """quantize_rows on the widths of real models: plain, rotated, and with an activation."""
    module = kernels["quantize_rows_triton"]
    types = {"x_ptr": "*bf16", "q_ptr": INT8, "scale_ptr": FP32, "k": "i32", "stride_xm": "i32", "stride_qm": "i32"}
    for k, group, act in ((3072, 0, 0), (4608, 0, 0), (12288, 0, 2), (53248, 0, 0), (4608, 256, 0), (12288, 256, 2),
                          (24576, 256, 0), (4096, 1024, 0), (3840, 64, 1), (2048, 16, 0)):  # fmt: skip
        block_a, block_b = module.row_blocks(k, group)
        constants = {"ACT": act, "GROUP": group, "BLOCK_A": block_a, "BLOCK_B": block_b}
        compiled = _compile(module._quantize_rows_kernel, types, constants, sm, module.row_warps(k, group), 3)
        yield report("quantize_rows", f"k{k} group{group} act{act}", sm, compiled)


def block_reports(kernels, sm: int):
    """What stands between the Linears of a block: residual_norm as the known blocks need it, activations, rope."""
    module = kernels["residual_norm_triton"]
    vectors = ("branch_weight_ptr", "gate_ptr", "norm_weight_ptr", "bias_ptr", "mod_ptr", "shift_ptr")
    names = ("x_ptr", "y_ptr", "out_ptr", *vectors)
    types = dict.fromkeys(names, "*bf16") | {
        "q_ptr": INT8,
        "scale_ptr": FP32,
        "kept_ptr": "*bf16",
        "branch_eps": "fp32",
        "norm_eps": "fp32",
    }
    types |= dict.fromkeys(("rows_per_gate", "rows_per_scale", "stride_gate", "stride_mod", "stride_shift"), "i32")
    flags = (
        "HAS_BRANCH",
        "BRANCH_NORM",
        "GATE",
        "HAS_NORM",
        "CENTRED",
        "WEIGHT",
        "BIAS",
        "MODULATION",
        "SHIFT",
        "KEPT",
    )
    # what a block has: branch, its norm, gate; norm, LayerNorm, weight, bias, modulation, shift; a LoRA that reads the input
    for name, k, group, has in (
        ("sandwich", 4608, 0, (1, 1, 1, 1, 0, 1, 0, 1, 0)), ("sandwich", 4608, 256, (1, 1, 1, 1, 0, 1, 0, 1, 0)),
        ("sandwich", 3840, 256, (1, 1, 1, 1, 0, 1, 0, 1, 0)), ("sandwich, kept", 3840, 256, (1, 1, 1, 1, 0, 1, 0, 1, 0, 1)), ("begin", 4608, 0, (0, 0, 0, 1, 0, 1, 0, 1, 0)),
        ("end", 4608, 0, (1, 1, 1, 0, 0, 0, 0, 0, 0)), ("shift", 6144, 0, (1, 0, 1, 1, 0, 1, 0, 1, 1)),
        ("shift", 6144, 256, (1, 0, 1, 1, 0, 1, 0, 1, 1)), ("begin centred", 5120, 0, (0, 0, 0, 1, 1, 0, 0, 2, 1)),
        ("gate, affine", 5120, 0, (1, 0, 2, 1, 1, 1, 1, 0, 0)), ("end in one", 5120, 0, (1, 0, 2, 0, 0, 0, 0, 0, 0)),
        ("gate, centred", 4096, 256, (1, 0, 1, 1, 1, 0, 0, 2, 1)),
    ):  # fmt: skip
        block_a, block_b = module.row_blocks(k, group)
        kinds = [
            n if flag in ("GATE", "MODULATION") else bool(n)
            for flag, n in zip(flags, (*has, 0)[: len(flags)], strict=True)
        ]
        constants = dict(zip(flags, kinds, strict=True)) | {"K": k, "GROUP": group}
        constants |= {"BLOCK_A": block_a, "BLOCK_B": block_b}
        options = {"enable_fp_fusion": group > 0}
        compiled = _compile(module._residual_norm_kernel, types, constants, sm, module.warps(k), 3, options)
        yield report("residual_norm", f"{name} k{k} group{group}", sm, compiled)
    module = kernels["quantize_activation_triton"]
    types = dict.fromkeys(("before_ptr", "gate_ptr", "up_ptr"), "*bf16") | {
        "q_ptr": INT8,
        "scale_ptr": FP32,
        "kept_ptr": "*bf16",
        "stride": "i32",
    }
    # columns that come before, GELU or SwiGLU, all columns
    for before, gelu, k, group in ((0, False, 12288, 0), (0, False, 12288, 256), (0, False, 10240, 256),
                                   (0, False, 16384, 0), (0, False, 16384, 256), (0, True, 12288, 0), (0, True, 13824, 256),
                                   (4096, False, 16384, 0), (4096, False, 16384, 256), (6144, False, 24576, 256),
                                   (3072, True, 15360, 0), (3072, True, 15360, 256)):  # fmt: skip
        block_a, block_b = module.row_blocks(k, group)
        constants = {"BEFORE": before, "GELU": gelu, "CUDA_MATH": True, "KEPT": before > 0, "K": k, "GROUP": group}
        constants |= {"BLOCK_A": block_a, "BLOCK_B": block_b}
        options = {"enable_fp_fusion": group > 0}
        compiled = _compile(module._quantize_activation_kernel, types, constants, sm, module.warps(k), 3, options)
        yield report("quantize_activation", f"before{before} gelu{gelu} k{k} group{group}", sm, compiled)
    module = kernels["rms_rope_triton"]
    names = ("q_ptr", "k_ptr", "q_weight_ptr", "k_weight_ptr", "q_out_ptr", "k_out_ptr")
    types = dict.fromkeys(names, "*bf16") | {"freqs_ptr": FP32, "eps": "fp32"}
    numbers = ("length", "q_heads", "k_heads", "stride_freqs")
    strides = (f"stride_{x}{d}" for x in ("q", "k", "q_out", "k_out") for d in "blh")
    types |= dict.fromkeys((*numbers, *strides), "i32")
    for dim, split_half in ((256, True), (128, False)):
        constants = {
            "SPLIT_HALF": split_half,
            "BY_LANE": split_half,
            "ROTATE_BY_LANE": True,
            "D": dim,
            "HALF": dim // 2,
            "HEADS": module.HEADS_PER_PROGRAM,
        }
        compiled = _compile(module._rms_rope_kernel, types, constants, sm, 1, 3, options)
        yield report("rms_rope", f"d{dim} split_half{split_half}", sm, compiled)


def all_reports(sms, forms):
    """Every variant that the pack uses by default on these architectures."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import packtest

    packtest.load_pack()
    import importlib

    names = (
        "int8_matmul_triton",
        "int8_matmul_tma_triton",
        "int8_matmul_split_k_triton",
        "int8_matmul_fused_triton",
        "int8_matmul_low_rank_triton",
        "quantize_activation_triton",
        "quantize_rows_triton",
        "residual_norm_triton",
        "rms_rope_triton",
        "tiles",
    )
    kernels = {name: importlib.import_module(f"{packtest.NAME}.kernels.{name}") for name in names}
    for sm in sms:
        if "trans" in forms:
            yield from matmul_reports(kernels, sm)
            yield from tma_reports(kernels, sm)
            yield from split_k_reports(kernels, sm)
            yield from fused_reports(kernels, sm)
            yield from low_rank_reports(kernels, sm)
            yield from quantize_reports(kernels, sm)
            yield from block_reports(kernels, sm)
        if "usual" in forms:
            yield from usual_form_reports(sm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sm", type=int, nargs="+", default=[80, 86, 89, 90])
    parser.add_argument("--form", nargs="+", choices=["trans", "usual"], default=["trans"])
    arguments = parser.parse_args()
    for result in all_reports(arguments.sm, arguments.form):
        print(json.dumps({**asdict(result), "mma_share": round(result.mma_share, 3)}), flush=True)


if __name__ == "__main__":
    main()
