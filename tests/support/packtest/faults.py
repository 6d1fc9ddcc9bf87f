"""The faults of INT8 and quantised models that users reported in public, and which tests show that they do not happen here.

Run it to write tests/FAULTS.md anew. A test belongs to a fault by its name (test_b12_...) or by its marker
(@pytest.mark.fault("B12")).
"""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[2]
PAGE = TESTS / "FAULTS.md"

# number: (kinds, what was seen, why it cannot be shown by a test; empty where tests show it)
FAULTS: dict[str, tuple[str, str, str]] = {
    "B01": ("LORA OFFLOAD", "A LoRA was multiplied in the weight's int8 type: an error on some runs, or wrapped numbers.", ""),
    "B02": ("LORA OFFLOAD", "A weight with a LoRA was quantised again without its row scales and rotation once it was offloaded.", ""),
    "B04": ("LORA OFFLOAD", "An error for each layer was only logged, and the picture came out without its LoRA.", ""),
    "B05": ("LORA", "A LoRA on a file of quantised and float layers stopped with a type error.", ""),
    "B09": ("LORA", "The LoRA loader stumbled over modules that are no Linear.", ""),
    "B10": ("LORA INSTALL", "LoRA before and after quantising differed, or one of them failed.", ""),
    "B11": ("LORA NUM", "Rounding to int8 ate LoRA deltas smaller than half a step: the likeness was too weak.", ""),
    "B13": ("LORA COMPILE", "A LoRA for a layer of an odd size printed a shape error each step.", ""),
    "B14": ("OFFLOAD LORA", "A partial unload brought back the float way of patching.", ""),
    "B15": ("OFFLOAD LORA", "Only one of the host's three ways to load was covered.", ""),
    "B16": ("OFFLOAD LIFE", "The LoRA acted on the first picture only, after the VAE had pushed layers out.", ""),
    "B17": ("OFFLOAD LORA", "On a small card the LoRA had less effect, since offloaded layers had none.", ""),
    "B18": ("OFFLOAD LORA", "A larger batch led to another code path with type errors.", ""),
    "B19": ("OFFLOAD PERF", "Offloaded layers with a LoRA left INT8 without a word.", ""),
    "B20": ("OFFLOAD PERF", "A baked LoRA was baked again at each step.", ""),
    "B22": ("OFFLOAD SHAPE", "Illegal access while weights moved on another stream.", ""),
    "B24": ("OFFLOAD GPU", "A kernel was launched on another GPU than that of its tensors.", ""),
    "B25": ("OFFLOAD SCALE", "The scale stayed behind when a layer moved.", ""),
    "B26": ("OFFLOAD GPU", "Quantising needed a GPU although everything was on the CPU.", ""),
    "B27": ("OFFLOAD", "Float copies of offloaded weights stayed on the GPU.", ""),
    "B29": ("OFFLOAD LIFE", "A second run took twice the memory, since a move copied without need.", ""),
    "B30": ("LIFE SAVE", "clone() lost attributes that saving needed.", ""),
    "B31": ("LIFE OFFLOAD", "After another model had run, the first had lost its LoRAs.", ""),
    "B32": ("LIFE PERF", "Weights were quantised again with every prompt.", ""),
    "B33": ("LIFE LORA", "It was unclear whether a LoRA was baked in twice.", ""),
    "B34": ("LIFE OFFLOAD", "A LoRA stayed after its loader was deleted, or was applied several times.", ""),
    "B35": ("LIFE LORA", "Pictures got worse with each run: the delta was added again.", ""),
    "B36": ("LIFE OFFLOAD", "Each prompt took more memory.", ""),
    "B37": ("LIFE", "A patch node could not be switched off, and other models ran patched, too.", ""),
    "B39": ("LIFE SHAPE", "A buffer was kept for each size for good.", ""),
    "B40": ("LIFE OFFLOAD", "The patcher's sizes were not those of the weights, which led to lack of memory.", ""),
    "B53": ("META LORA", "A file that was quantised already was quantised again.", ""),
    "B54": ("SCALE OFFLOAD", "A scale that is not one for each row was checked by the wrong rule while weights moved.", ""),
    "B60": ("SCALE NUM", "The scale was rounded after the codes had been made with the exact one.", ""),
    "B70": ("MIXED LORA", "A Linear had no weight, which showed only while sampling.", ""),
    "B72": ("MIXED DTYPE", "A part of the model that runs while the prompt is prepared failed.", ""),
    "B81": ("SHAPE OFFLOAD", "A large video model died with an illegal access.", ""),
    "B82": ("STRIDE", "Views with odd strides or offsets were refused.", ""),
    "B83": ("STRIDE", "A dimension of size 1 with an unusual stride was refused.", ""),
    "B85": ("STRIDE", "The quantiser took rows to be contiguous.", ""),
    "B86": ("STRIDE", "Inputs of three or more dimensions could not be viewed as rows.", ""),
    "B87": ("STRIDE", "Latents of a newer host were not contiguous, and sampling failed.", ""),
    "B88": ("NUM", "A row of zeros became NaN.", ""),
    "B89": ("NUM", "One inf in the input broke other rows, too.", ""),
    "B90": ("NUM DTYPE", "The sum overflowed fp16 before it was scaled.", ""),
    "B92": ("NUM", "An int8 product was summed up in int8 and wrapped.", ""),
    "B93": ("NUM INSTALL", "The interpreter that tests use was itself wrong.", ""),
    "B95": ("NUM GPU", "Halves were rounded otherwise on one backend.", ""),
    "B96": ("NUM SCALE", "Weights were rotated in bf16.", ""),
    "B98": ("NUM MIXED", "Plain int8 of a model with outliers was noisy.", ""),
    "B99": ("DTYPE SHAPE", "A bias of another float type broke the way for few rows.", ""),
    "B100": ("DTYPE GPU", "The compute type was fixed, and layers left in float met another one.", ""),
    "B102": ("DTYPE", "A model casts its input to the type of a weight, which was int8.", ""),
    "B103": ("DTYPE MIXED", "The model's type was read from its first weight, which was int8.", ""),
    "B104": ("DTYPE MIXED", "Layers that were not quantised kept fp32 and met bf16.", ""),
    "B115": (
        "GPU OFFLOAD",
        "A device without an int8 product expanded the whole weight at each call.",
        "CUDA and CPU have `torch._int_mm` in every torch that the host supports. Other devices multiply 1024 columns at a "
        "time in fp32 (`accumulate_torch` in `kernels/int8_matmul.py`), so no float copy of a weight is made.",
    ),
    "B119": ("GPU COMPILE", "fp8 layers of a mixed file met a card without fp8.", ""),
    "B126": (
        "INSTALL LORA",
        "A method of the host's quantised tensor was missing in the version that was installed.",
        "`loader.check_host` stops with the versions needed when the host lacks the format; methods of newer hosts are looked "
        "up, not assumed (`short_way.is_known`). All tests of LoRAs run against the ComfyUI that COMFYUI_PATH names.",
    ),
    "B128": ("INSTALL COMPILE", "A path in the kernel cache grew longer than Windows allows.", ""),
    "B131": ("COMPILE SCALE", "Equal layers were compiled one by one until the limit.", ""),
    "B134": ("COMPILE STRIDE", "A tensor class did not take the arguments that a compiler passes.", ""),
    "B135": ("COMPILE STRIDE", "An op's description for compilers had other strides than its result.", ""),
    "B137": ("COMPILE LORA", "LoRAs made each layer compile again until the limit.", ""),
    "B138": ("COMPILE PERF", "Each length of the prompt and each batch compiled again.", ""),
    "B141": ("PERF COMPILE", "Each new size was tuned for a long time at the first step.", ""),
    "B143": ("PERF COMPILE", "Under a compiler another tile was chosen than without.", ""),
    "B144": ("PERF", "Falling back to float was silent.", ""),
    "B145": ("SAVE LORA", "A file saved with a LoRA gave broken pictures.", ""),
    "B147": ("SAVE OFFLOAD", "Saving with LoRAs ran out of memory.", ""),
    "B148": ("SAVE OFFLOAD", "Saving failed while weights were offloaded.", ""),
    "B149": ("SAVE STRIDE", "Views that are not contiguous could not be saved.", ""),
}  # fmt: skip


def tests_of_faults() -> dict[str, list[str]]:
    """Number of a fault -> "file::test" of the tests that bear it in their name or marker."""
    found: dict[str, list[str]] = {}
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                for number in numbers(node):
                    found.setdefault(number, []).append(f"{path.relative_to(TESTS).as_posix()}::{node.name}")
    return found


def numbers(node: ast.FunctionDef) -> list[str]:
    """The faults in a test's name, such as test_b12_b13_words, and in its markers."""
    name = re.match(r"test((?:_b\d+)+)_", node.name)
    listed = re.findall(r"b(\d+)", name.group(1)) if name else []
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.fault":
            listed += [argument.value.removeprefix("B") for argument in decorator.args]
    return [f"B{int(number):02d}" for number in listed]


def page() -> str:
    """The text of FAULTS.md."""
    tests = tests_of_faults()
    lines = [
        "# Faults that users reported of INT8 and quantised models, and the tests that they do not happen here",
        "",
        "Written by `tests/support/packtest/faults.py`; the list of faults is there. Tests are named after a fault",
        '(`test_b12_...`) or marked with it (`@pytest.mark.fault("B12")`), so `pytest -k b12` or a search finds them.',
        "",
        "| fault | kinds | what was seen | here |",
        "|---|---|---|---|",
    ]
    for number, (kinds, seen, cannot) in FAULTS.items():
        here = cannot or "<br>".join(f"`{test}`" for test in tests.get(number, []))
        lines.append(f"| {number} | {kinds} | {seen} | {here} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
