"""What the capability check says of attention, for made-up cards and hosts; and what it reads from a real one."""

import sys
import types

import pytest
from native_int8.kernels.capability import device_from
from native_int8.nodes.int8 import advice, attention
from native_int8.nodes.int8.attention import FLASH, INT8, KITCHEN, OPTION, PYTORCH, SAGE, XFORMERS, Attention
from native_int8.nodes.int8.surroundings import PORTABLE, Surroundings

READY = {"torch": "2.9.1+cu130", "cuda": "13.0", "driver": "580.95.05", "triton": "3.5.1"}
AROUND = Surroundings(python="/opt/comfy/bin/python", kitchen="0.2.40")


def card(name, compute_capability, **facts):
    return device_from(name=name, compute_capability=compute_capability, **{**READY, **facts})


RTX_3090 = card("NVIDIA GeForce RTX 3090", (8, 6))
H200 = card("NVIDIA H200", (9, 0))
CPU = device_from(name="AMD Ryzen 9 7950X", type="cpu")
RADEON = card("AMD Radeon RX 7900 XTX", None, hip="6.4", cuda=None)


def said(device, chosen, *installed, around=AROUND, offered=(), option=None):
    return attention.lines(device, around, Attention(chosen, installed, offered, option))


def test_sage_is_named_with_its_command_where_it_was_measured():
    chosen, sage = said(RTX_3090, PYTORCH)
    assert chosen == "ComfyUI uses PyTorch's own; installed besides: nothing."
    assert "/opt/comfy/bin/python -m pip install sageattention, then start ComfyUI with --use-sage-attention" in sage
    assert "[published: SageAttention's chart for an RTX 3090" in sage
    # what it costs and where it does nothing
    assert "changes pictures a little" in sage and "Ideogram 4" in sage


def test_an_installed_sage_needs_the_option_alone():
    _, sage = said(RTX_3090, PYTORCH, "sageattention")
    assert sage.startswith("Faster here: start ComfyUI with --use-sage-attention: ")


def test_the_command_is_the_platform_s():
    python = "C:\\ComfyUI_windows_portable\\python_embeded\\python.exe"
    around = Surroundings(install=PORTABLE, python=python, kitchen="0.2.40")
    assert ".\\python_embeded\\python.exe -m pip install sageattention," in said(RTX_3090, PYTORCH, around=around)[1]


@pytest.mark.parametrize(
    ("device", "chosen"),
    [
        (card("NVIDIA GeForce RTX 3090", (8, 6), triton=None, triton_missing="no Triton"), PYTORCH),
        (card("NVIDIA GeForce RTX 2080 Ti", (7, 5)), PYTORCH),
        (card("NVIDIA A40", (8, 6)), PYTORCH),
        (card("NVIDIA GeForce RTX 4090", (8, 9)), PYTORCH),
        (card("NVIDIA GeForce RTX 5090", (12, 0)), PYTORCH),
        (H200, PYTORCH),
        (RADEON, "attention_sub_quad"),
        (RADEON, PYTORCH),
        (CPU, "attention_sub_quad"),
    ],
    ids=lambda value: getattr(value, "name", value),
)
def test_nothing_is_recommended_without_evidence(device, chosen):
    assert len(said(device, chosen)) == 1


@pytest.mark.parametrize("device", [RTX_3090, H200], ids=lambda device: device.name)
@pytest.mark.parametrize(
    ("chosen", "evidence"),
    [(XFORMERS, "published"), ("attention_sub_quad", "modelled"), ("attention_split", "modelled")],
)
def test_older_ways_are_told_of_pytorch_s_own(device, chosen, evidence):
    _, advised = said(device, chosen)
    assert "--use-pytorch-cross-attention" in advised and f"[{evidence}: " in advised


def test_what_a_chosen_option_means_is_said():
    _, sage = said(RTX_3090, SAGE, "sageattention")
    assert "changes pictures a little" in sage and "fall back to PyTorch" in sage
    _, flash = said(H200, FLASH, "flash-attn")
    assert "without this option" in flash


def test_int8_attention_is_named_where_no_option_turns_it_on():
    *_, kitchen = said(RTX_3090, PYTORCH, KITCHEN)
    assert "this ComfyUI has no option for it" in kitchen and "[modelled: RTX 3090" in kitchen
    assert not any("no option" in line for line in said(RTX_3090, PYTORCH, KITCHEN, offered=("pytorch", "int8")))
    assert not any("no option" in line for line in said(H200, PYTORCH, KITCHEN))


def test_int8_attention_is_named_with_the_host_s_option():
    facts = {"offered": ("pytorch", "comfy_kitchen_int8"), "option": OPTION}
    *_, kitchen = said(RTX_3090, PYTORCH, KITCHEN, **facts)
    assert f"start ComfyUI with {OPTION}: " in kitchen and "[modelled: RTX 3090" in kitchen
    assert "changes pictures a little" in kitchen
    assert not any(OPTION in line for line in said(H200, PYTORCH, KITCHEN, **facts))
    # not without the kernel
    assert not any(OPTION in line for line in said(RTX_3090, PYTORCH, **facts))


def test_int8_attention_that_is_chosen_is_named():
    chosen, quality = said(RTX_3090, INT8, KITCHEN, offered=("comfy_kitchen_int8",), option=OPTION)
    assert chosen.startswith("ComfyUI uses comfy-kitchen's INT8 attention") and "changes pictures a little" in quality


def test_an_unknown_function_is_shown_by_its_name():
    assert said(RTX_3090, "attention_of_a_later_host") == [
        "ComfyUI uses attention_of_a_later_host; installed besides: nothing."
    ]


@pytest.mark.parametrize("device", [RTX_3090, H200, CPU], ids=lambda device: device.name)
def test_the_report_has_the_section_and_stays_short(device):
    without = advice.report(device, AROUND)
    assert "\nAttention\n" not in without
    text = advice.report(device, AROUND, attention=Attention(PYTORCH, (KITCHEN,)))
    assert "\nAttention\n- ComfyUI uses PyTorch's own" in text
    assert len(text.splitlines()) - len(without.splitlines()) <= 5


@pytest.mark.comfy
def test_a_real_host_is_asked(monkeypatch):
    from packtest.host import import_comfy

    import_comfy("comfy.ldm.modules.attention", "comfy.quant_ops")
    import comfy.ldm.modules.attention as host

    found = attention.look()
    assert found.chosen == host.optimized_attention.__name__ and found.chosen in attention._NAMES
    assert "pytorch" in found.offered
    # every name that is known here is a function of the host, but for the one that older hosts have not
    assert {name for name in attention._NAMES if not hasattr(host, name)} <= {INT8}
    assert (found.option is None) == (not hasattr(host, INT8))
    monkeypatch.setattr(host, "optimized_attention", host.attention_sage)
    # what another pack put there for a package that is missing
    monkeypatch.setitem(sys.modules, "xformers", types.ModuleType("xformers"))
    found = attention.look()
    assert found.chosen == SAGE and "xformers" not in found.installed
