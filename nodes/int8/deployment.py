"""What INT8 is worth on each kind of card, and how we know.

Every claim carries its evidence class: "measured here" (by this project's benchmarks), "published" (somebody
else's measurement, with its source), "modelled" (from peak rates and a model of the kernel). Ratios are against
bf16 in the same software unless the claim says otherwise.
"""

from dataclasses import dataclass

from ...kernels.capability import CONSUMER, DATA_CENTRE, PROFESSIONAL, Device

MEASURED, PUBLISHED, MODELLED = "measured here", "published", "modelled"


@dataclass(frozen=True)
class Claim:
    """One statement about speed or memory with its evidence class and where it comes from."""

    text: str
    evidence: str
    source: str


@dataclass(frozen=True)
class Outlook:
    """What to expect on a device: one sentence, the reason, and the evidence."""

    verdict: str
    why: str
    claims: tuple[Claim, ...]


_MEMORY = Claim(
    "The INT8 model takes about half the memory of bf16.", MODELLED, "one byte a weight plus one scale a row"
)

CONSUMER_AMPERE = Outlook(
    "INT8 wins most on this card.",
    "GeForce Ampere multiplies int8 four times as fast as bf16 with fp32 accumulation, and it has no FP8.",
    (
        Claim("One big Linear: 3.0 to 3.3x.", MODELLED, "RTX 3090 at 225 TOPS, activation quantisation included"),
        Claim("One big Linear on an RTX 3090: 2.8 to 4.2x.", PUBLISHED, "arXiv 2606.14598"),
        Claim("One Ideogram 4 step at 1024 px: 2.1 to 2.4x.", MODELLED, "RTX 3090, attention without a mask"),
        Claim(
            "Flux.2 Klein 9B on an RTX 3090 with another pack: 1.26x, with torch.compile 1.99x.",
            PUBLISHED,
            "ComfyUI-INT8-Fast",
        ),
    ),
)
OTHER_AMPERE = Outlook(
    "INT8 helps, but about half as much as on a GeForce RTX 30.",
    "Professional and data-centre Ampere runs bf16 at full rate, so int8 is twice as fast, not four times.",
    (
        Claim("Matrix product on an A40: 220 to 232 TOPS int8, 104 to 116 TFLOPS fp16.", PUBLISHED, "octomul"),
        Claim("Z-Image Turbo, 9 steps, on an A40: 5.45 s to 4.13 s.", PUBLISHED, "xDiT, with torch.compile"),
    ),
)
UNNAMED_AMPERE = Outlook(
    "Not known: this Ampere device is sold neither as GeForce nor as a workstation or data-centre card.",
    "Embedded, mining and unnamed cards differ in clocks and in how much of the tensor cores is switched on.",
    (),
)
A100 = Outlook(
    "Expect little or no speed; INT8 saves memory.",
    "The A100's bf16 is so fast that everything around the matrix product decides.",
    (
        Claim("A100: 1.38x slower than bf16 with one fused kernel.", PUBLISHED, "authors of arXiv 2606.14598"),
        Claim("A100: 460 to 507 TOPS int8 in tuned kernels, 267 TFLOPS bf16.", PUBLISHED, "sglang #2752, gn-kernels"),
    ),
)
TURING = Outlook(
    "INT8 runs through torch, without the fused kernel; measure before relying on it.",
    "Triton cannot compile an int8 dot for sm_75, so this card needs another kernel. It has no bf16 either.",
    (
        Claim("Triton 3.7 and 3.9 stop at the int8 dot for sm_75.", MEASURED, "ahead-of-time compilation"),
        Claim("RTX 2060, another program, while offloading: about 1.4x of Q4_K_M.", PUBLISHED, "koboldcpp #2309"),
    ),
)
NO_INT8_UNITS = Outlook(
    "No speed to gain; INT8 only saves memory here.",
    "This card has no tensor cores for int8.",
    (Claim("GTX 16 cards became slower with int8 tensor-core kernels.", PUBLISHED, "comfy-kitchen d1128b0"),),
)
CONSUMER_ADA = Outlook(
    "INT8 wins clearly; a good FP8 path is the one to compare with.",
    "GeForce Ada multiplies int8 four times as fast as bf16, and FP8 with fp32 accumulation twice as fast.",
    (
        Claim("Matrix product on an RTX 4090: 545 to 640 TOPS int8, 178 TFLOPS fp16.", PUBLISHED, "octomul"),
        Claim("Anima 1024 px on an RTX 4060 Ti, other software: 1.12x to 1.44x.", PUBLISHED, "Forge #1289"),
    ),
)
OTHER_ADA = Outlook(
    "INT8 helps somewhat; FP8 does about the same on this card.",
    "Professional and data-centre Ada runs bf16 at half the rate of int8 and FP8 at the same rate.",
    (Claim("Matrix product on an L40: 416 to 423 TOPS int8.", PUBLISHED, "sglang #2774"),),
)
HOPPER = Outlook(
    "INT8 wins moderately; FP8 is at least as fast here.",
    "bf16 is fast on Hopper, so attention and the small operations take most of a step.",
    (
        Claim(
            "Ideogram 4 class, one forward at 1024 px: 177.4 ms bf16, 117.3 ms INT8 and fused (1.51x).",
            MEASURED,
            "H200",
        ),
        Claim("The same at 768 px: 94.7 ms bf16, 61.3 ms INT8 and fused (1.54x).", MEASURED, "H200"),
        Claim(
            "One step of Flux.2 Klein 9B 1.54x, Krea 2 1.56x, Z-Image 1.41x, Wan 2.2 14B 1.13x; Qwen-Image 1.00x, or 1.39x "
            "in a CUDA graph.",
            MEASURED,
            "H200, fused, against bf16",
        ),
        Claim(
            "Linears of large models with 2048 rows or more: INT8 1.53x, worst 1.18; FP8 1.67x (geometric means, 90 shapes).",
            MEASURED,
            "H200, input quantisation included",
        ),
        Claim("Linears with 256 to 1024 rows: INT8 1.18x, worst 0.89.", MEASURED, "H200, 33 shapes"),
    ),
)
CONSUMER_BLACKWELL = Outlook(
    "INT8 wins; prefer NVFP4 or FP8 files where a model has them.",
    "GeForce Blackwell runs int8 about three times as fast as bf16 and has faster FP4.",
    (
        Claim("RTX 5090: 726 TOPS int8, 246 TFLOPS bf16.", PUBLISHED, "gn-kernels"),
        Claim("Z-Image, 30 steps, on an RTX 5090 with another pack: 18.9 s to 15.3 s.", PUBLISHED, "ZImage-Triton"),
    ),
)
OTHER_BLACKWELL = Outlook(
    "INT8 helps somewhat; prefer FP8 or NVFP4 files where a model has them.",
    "The tensor cores of this card are faster in FP8 and FP4.",
    (Claim("RTX PRO 6000: 796 TOPS int8.", PUBLISHED, "gn-kernels"),),
)
B200 = Outlook(
    "Do not use INT8 for speed here; it is slower than bf16.",
    "Triton reaches int8 only through the older tensor-core instructions here, bf16 through the new ones.",
    (
        Claim("B200: 3.49x slower than bf16 with one fused kernel.", PUBLISHED, "authors of arXiv 2606.14598"),
        Claim("GB200 class: another int8 kernel at 0.29 to 0.38x of bf16.", PUBLISHED, "sglang #38040"),
    ),
)
AMD = Outlook(
    "Not tested; INT8 runs through torch, and other software got slower on some cards.",
    "The fused kernel is written and measured for NVIDIA cards only.",
    (
        Claim("RX 7900 XTX: 80 TFLOPS bf16, 103 TOPS int8 in another kernel.", PUBLISHED, "sdnq benchmarks"),
        Claim("RDNA3 2 to 3x slower in the host's own INT8.", PUBLISHED, "ComfyUI #14777"),
    ),
)
INTEL = Outlook(
    "Not tested; INT8 runs through torch.",
    "The fused kernel is written and measured for NVIDIA cards only.",
    (Claim("Arc B580: 101 TFLOPS bf16, 176 TOPS int8 in another kernel.", PUBLISHED, "sdnq benchmarks"),),
)
WITHOUT_GPU = Outlook(
    "INT8 works and saves memory, but it is not faster here.",
    "torch has no fast int8 matrix product for this device; use it to try a graph, not to save time.",
    (),
)
UNKNOWN = Outlook(
    "Not known: this card is newer than this version of the pack.",
    "The kernels are compiled for it on first use; compare a few steps with and without INT8.",
    (),
)

_BY_FAMILY_AND_MARKET = {
    ("ampere", CONSUMER): CONSUMER_AMPERE,
    ("ampere", PROFESSIONAL): OTHER_AMPERE,
    ("ampere", DATA_CENTRE): OTHER_AMPERE,
    ("ampere", None): UNNAMED_AMPERE,
    ("ada", CONSUMER): CONSUMER_ADA,
    ("blackwell", CONSUMER): CONSUMER_BLACKWELL,
}
_BY_FAMILY = {"turing": TURING, "ada": OTHER_ADA, "hopper": HOPPER, "blackwell": OTHER_BLACKWELL}

# The whole map, best first; the help page of the capability check shows it.
MAP = (
    ("GeForce RTX 30, RTX 2050, MX570", CONSUMER_AMPERE),
    ("GeForce RTX 40", CONSUMER_ADA),
    ("GeForce RTX 50", CONSUMER_BLACKWELL),
    ("RTX A2000 to A6000, A2, A10, A16, A40", OTHER_AMPERE),
    ("RTX Ada, L4, L40, L40S", OTHER_ADA),
    ("RTX PRO Blackwell, GB10", OTHER_BLACKWELL),
    ("H100, H200, GH200", HOPPER),
    ("GeForce RTX 20, Quadro RTX, T4", TURING),
    ("A100, A30, A800", A100),
    ("B200, B300", B200),
    ("GeForce GTX 10 and 16, P40, V100", NO_INT8_UNITS),
    ("Jetson Orin, mining cards", UNNAMED_AMPERE),
    ("AMD Radeon and Instinct, ZLUDA", AMD),
    ("Intel Arc and Data Center GPU", INTEL),
    ("Apple GPU, CPU", WITHOUT_GPU),
    ("newer than this pack", UNKNOWN),
)


def evidence(found: Outlook) -> str:
    """The evidence classes of an outlook's claims, strongest first; "none" without claims."""
    classes = {claim.evidence for claim in found.claims}
    return ", ".join(kind for kind in (MEASURED, PUBLISHED, MODELLED) if kind in classes) or "none"


def outlook(device: Device) -> Outlook:
    """What INT8 is worth on `device`; every device has an answer."""
    found = _outlook(device)
    return Outlook(found.verdict, found.why, (*found.claims, _MEMORY))


def _outlook(device: Device) -> Outlook:
    if device.type == "xpu":
        return INTEL
    if device.hip is not None or (device.type == "cuda" and device.compute_capability is None):
        return AMD
    if device.type != "cuda":
        return WITHOUT_GPU
    if not device.int8_tensor_cores:
        return NO_INT8_UNITS
    if device.market == DATA_CENTRE and device.compute_capability == (8, 0):
        return A100
    if device.family == "blackwell" and device.compute_capability[0] == 10:
        return B200
    special = _BY_FAMILY_AND_MARKET.get((device.family, device.market))
    return special or _BY_FAMILY.get(device.family, UNKNOWN)
