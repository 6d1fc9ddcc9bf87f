"""What the capability check says of each kind of device: the words in brackets, the verdict, the sentence, the path."""

import re

import pytest
from native_int8.kernels.capability import device_from
from native_int8.nodes.int8 import advice, deployment
from native_int8.nodes.int8.surroundings import Surroundings
from packtest import ROOT

READY = {"torch": "2.9.1+cu130", "cuda": "13.0", "driver": "580.95.05", "triton": "3.5.1"}
KITCHEN = Surroundings(kitchen="0.2.26", backends=(("eager", "on"), ("cuda", "off: needs cu130")))

# written out here, so that another wording or another map is noticed
SENTENCES = {
    "most": "INT8 wins most on this card.",
    "half": "INT8 helps, but about half as much as on a GeForce RTX 30.",
    "unnamed": "Not known: this Ampere device is sold neither as GeForce nor as a workstation or data-centre card.",
    "A100": "Expect little or no speed; INT8 saves memory.",
    "turing": "INT8 runs through torch, without the fused kernel; measure before relying on it.",
    "none": "No speed to gain; INT8 only saves memory here.",
    "ada": "INT8 wins clearly; a good FP8 path is the one to compare with.",
    "ada pro": "INT8 helps somewhat; FP8 does about the same on this card.",
    "hopper": "INT8 wins moderately; FP8 is at least as fast here.",
    "blackwell": "INT8 wins; prefer NVFP4 or FP8 files where a model has them.",
    "blackwell pro": "INT8 helps somewhat; prefer FP8 or NVFP4 files where a model has them.",
    "B200": "Do not use INT8 for speed here; it is slower than bf16.",
    "AMD": "Not tested; INT8 runs through torch, and other software got slower on some cards.",
    "Intel": "Not tested; INT8 runs through torch.",
    "no GPU": "INT8 works and saves memory, but it is not faster here.",
    "newer": "Not known: this card is newer than this version of the pack.",
}
FUSED, INT_MM, PLAIN = "fused INT8 kernel (Triton)", "torch._int_mm with scales", "plain torch, right but not fast"

# name, compute capability, words in brackets, sentence, path
NVIDIA = [
    ("NVIDIA GeForce GTX 1060 6GB", (6, 1), "sm_61, Pascal, consumer", "none", INT_MM),
    ("NVIDIA GeForce GTX 1080 Ti", (6, 1), "sm_61, Pascal, consumer", "none", INT_MM),
    ("Tesla P40", (6, 1), "sm_61, Pascal, data-centre", "none", INT_MM),
    ("Tesla V100-SXM2-32GB", (7, 0), "sm_70, Volta, data-centre", "none", INT_MM),
    ("NVIDIA TITAN V", (7, 0), "sm_70, Volta, consumer", "none", INT_MM),
    ("NVIDIA GeForce GTX 1650", (7, 5), "sm_75, Turing, consumer", "none", INT_MM),
    ("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", (7, 5), "sm_75, Turing, consumer", "none", INT_MM),
    ("NVIDIA T1000 8GB", (7, 5), "sm_75, Turing, professional", "none", INT_MM),
    ("NVIDIA GeForce RTX 2060", (7, 5), "sm_75, Turing, consumer", "turing", INT_MM),
    ("NVIDIA GeForce RTX 2080 Super with Max-Q Design", (7, 5), "sm_75, Turing, consumer", "turing", INT_MM),
    ("Quadro RTX 5000", (7, 5), "sm_75, Turing, professional", "turing", INT_MM),
    ("Tesla T4", (7, 5), "sm_75, Turing, data-centre", "turing", INT_MM),
    ("NVIDIA A100-SXM4-80GB", (8, 0), "sm_80, Ampere, data-centre", "A100", FUSED),
    ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", (8, 0), "sm_80, Ampere, data-centre", "A100", FUSED),
    ("NVIDIA A30", (8, 0), "sm_80, Ampere, data-centre", "A100", FUSED),
    ("NVIDIA CMP 170HX", (8, 0), "sm_80, Ampere, market unknown", "unnamed", FUSED),
    ("NVIDIA GeForce RTX 2050", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce MX570", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3050 6GB Laptop GPU", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3060", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3070 Ti Laptop GPU", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3080 12GB", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3090", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA GeForce RTX 3090 Ti", (8, 6), "sm_86, Ampere, consumer", "most", FUSED),
    ("NVIDIA A2", (8, 6), "sm_86, Ampere, data-centre", "half", FUSED),
    ("NVIDIA A10G", (8, 6), "sm_86, Ampere, data-centre", "half", FUSED),
    ("NVIDIA A40-48Q", (8, 6), "sm_86, Ampere, data-centre", "half", FUSED),
    ("NVIDIA RTX A6000", (8, 6), "sm_86, Ampere, professional", "half", FUSED),
    ("NVIDIA RTX A2000 12GB", (8, 6), "sm_86, Ampere, professional", "half", FUSED),
    ("NVIDIA RTX A3000 12GB Laptop GPU", (8, 6), "sm_86, Ampere, professional", "half", FUSED),
    ("NVIDIA CMP 90HX", (8, 6), "sm_86, Ampere, market unknown", "unnamed", FUSED),
    ("Orin", (8, 7), "sm_87, Ampere, market unknown", "unnamed", FUSED),
    ("NVIDIA GeForce RTX 4060 Laptop GPU", (8, 9), "sm_89, Ada, consumer", "ada", FUSED),
    ("NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), "sm_89, Ada, consumer", "ada", FUSED),
    ("NVIDIA GeForce RTX 4090 D", (8, 9), "sm_89, Ada, consumer", "ada", FUSED),
    ("NVIDIA RTX 6000 Ada Generation", (8, 9), "sm_89, Ada, professional", "ada pro", FUSED),
    ("NVIDIA L4", (8, 9), "sm_89, Ada, data-centre", "ada pro", FUSED),
    ("NVIDIA L40S", (8, 9), "sm_89, Ada, data-centre", "ada pro", FUSED),
    ("NVIDIA H100 80GB HBM3", (9, 0), "sm_90, Hopper, data-centre", "hopper", FUSED),
    ("NVIDIA H100 80GB HBM3 MIG 2g.20gb", (9, 0), "sm_90, Hopper, data-centre", "hopper", FUSED),
    ("NVIDIA H200", (9, 0), "sm_90, Hopper, data-centre", "hopper", FUSED),
    ("NVIDIA H200 MIG 1g.18gb", (9, 0), "sm_90, Hopper, data-centre", "hopper", FUSED),
    ("NVIDIA GH200 480GB", (9, 0), "sm_90, Hopper, data-centre", "hopper", FUSED),
    ("NVIDIA B200", (10, 0), "sm_100, Blackwell, data-centre", "B200", FUSED),
    ("NVIDIA B300 SXM6 AC", (10, 3), "sm_103, Blackwell, data-centre", "B200", FUSED),
    ("NVIDIA Thor", (11, 0), "sm_110, Blackwell, market unknown", "blackwell pro", FUSED),
    ("NVIDIA GeForce RTX 5060 Ti", (12, 0), "sm_120, Blackwell, consumer", "blackwell", FUSED),
    ("NVIDIA GeForce RTX 5090 Laptop GPU", (12, 0), "sm_120, Blackwell, consumer", "blackwell", FUSED),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), "sm_120, Blackwell, professional", "blackwell pro", FUSED),
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", (12, 0), "sm_120, Blackwell, data-centre", "blackwell pro", FUSED),
    ("NVIDIA GB10", (12, 1), "sm_121, Blackwell, professional", "blackwell pro", FUSED),
    ("NVIDIA GeForce RTX 9090", (99, 0), "sm_990, unknown family, consumer", "newer", FUSED),
]  # fmt: skip
AMD = {"hip": "6.4", "cuda": None, "driver": None}
OTHERS = [
    ({"name": "AMD Radeon RX 7900 XTX", "gcn_arch": "gfx1100", **AMD}, "gfx1100, unknown family, consumer", "AMD", INT_MM),
    ({"name": "AMD Radeon RX 9070 XT", "gcn_arch": "gfx1201", **AMD}, "gfx1201, unknown family, consumer", "AMD", INT_MM),
    ({"name": "AMD Radeon Pro W7900", "gcn_arch": "gfx1100", **AMD}, "gfx1100, unknown family, professional", "AMD", INT_MM),
    ({"name": "AMD Instinct MI300X", "gcn_arch": "gfx942", **AMD}, "gfx942, unknown family, data-centre", "AMD", INT_MM),
    ({"name": "AMD Radeon RX 6800 [ZLUDA]", "compute_capability": (8, 6)}, "cuda, unknown family, consumer", "AMD", INT_MM),
    ({"name": "Intel(R) Arc(TM) B580 Graphics", "type": "xpu"}, "xpu", "Intel", PLAIN),
    ({"name": "Intel(R) Data Center GPU Max 1550", "type": "xpu"}, "xpu", "Intel", PLAIN),
    ({"name": "Apple GPU", "type": "mps", "platform": "darwin"}, "mps", "no GPU", PLAIN),
    ({"name": "AMD Ryzen 9 7950X 16-Core Processor", "type": "cpu"}, "cpu", "no GPU", PLAIN),
]  # fmt: skip
TABLE = [({"name": name, "compute_capability": cc}, *rest) for name, cc, *rest in NVIDIA] + OTHERS


@pytest.mark.parametrize(("facts", "words", "sentence", "path"), TABLE, ids=[row[0]["name"] for row in TABLE])
def test_verdict_sentence_and_path(facts, words, sentence, path):
    device = device_from(**{**READY, **facts})
    text = advice.report(device, KITCHEN)
    verdict = "consumer Ampere" if sentence == "most" else "not consumer Ampere"
    assert text.splitlines()[:2] == [f"{device.name} ({words}): {verdict}", SENTENCES[sentence]]
    assert device.is_consumer_ampere == (sentence == "most")
    assert all(way.startswith(path) for _, way in advice.layer_paths(device))
    expected = deployment.outlook(device)
    assert expected.why in text
    assert all(f"[{claim.evidence}: {claim.source}]" in text for claim in expected.claims)
    assert ("MIG slice" in text) == ("MIG" in device.name)
    assert len(text.splitlines()) < 40


def test_the_table_has_every_sentence_and_enough_devices():
    assert len(TABLE) >= 40
    assert {row[2] for row in TABLE} == set(SENTENCES)


def test_two_mixed_cards_are_told_apart():
    ours = device_from(name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), **READY)
    other = device_from(name="NVIDIA RTX A6000", compute_capability=(8, 6), **READY)
    text = advice.report(ours, KITCHEN, others=[("cuda:1", other)])
    assert text.startswith("NVIDIA GeForce RTX 3090 (sm_86, Ampere, consumer): consumer Ampere\n")
    line = f"- cuda:1: NVIDIA RTX A6000 (sm_86, Ampere, professional): not consumer Ampere. {SENTENCES['half']}"
    assert f"\nOther GPUs of this machine\n{line}\n" in text
    assert "Other GPUs" not in advice.report(ours, KITCHEN)


def test_the_map_of_the_help_page_is_the_reports():
    page = (ROOT / "nodes/web/docs/INT8CapabilityCheck.md").read_text(encoding="utf-8")
    section = re.search(r"^## Deployment map\n(.*?)(?=^## )", page, re.M | re.S).group(1)
    items = re.sub(r"\n  +", " ", section).splitlines()
    shown = [
        list(re.fullmatch(r"- \*\*(.+?)\*\*: (.+) \((.+)\)", item).groups()) for item in items if item.startswith("- ")
    ]
    assert shown == [[cards, found.verdict, deployment.evidence(found)] for cards, found in deployment.MAP]
    outlooks = [found for found in vars(deployment).values() if isinstance(found, deployment.Outlook)]
    assert {found.verdict for _, found in deployment.MAP} == {found.verdict for found in outlooks}
