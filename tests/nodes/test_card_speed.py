"""The capability check's measurement: what it says of numbers, and why it does not measure where it would mislead."""

import pytest
import torch
from native_int8.kernels import tuning
from native_int8.kernels.capability import device_from
from native_int8.nodes.int8 import advice
from native_int8.nodes.int8.surroundings import Surroundings
from packtest.host import import_comfy

pytestmark = pytest.mark.comfy


@pytest.fixture(scope="module")
def card_speed():
    import_comfy("comfy.sd", "comfy.utils")
    from native_int8.nodes.int8 import card_speed

    return card_speed


@pytest.fixture
def times(card_speed):
    """A function (float_us, int8_us, fp8_us) of each Linear -> what a measurement of them would have found."""
    from native_int8.nodes.int8.benchmark_result import ShapeTime

    def make(*rows):
        return [
            ShapeTime(shape, *row, "triton", shape.m)
            for shape, row in zip(card_speed.TYPICAL[: len(rows)], rows, strict=True)
        ]

    return make


def test_the_first_line_is_the_mean_and_each_linear_has_its_times(card_speed, times):
    text = card_speed.lines(times((600.0, 300.0, None), (400.0, 50.0, 200.0)), "", 0, "bf16")
    assert text[0] == "INT8 Linears run 4.00 times as fast as bf16 here (geometric mean); a step gains less."
    assert text[1] == "- 4608x13824x4608 (rows x out x in): bf16 600 us, INT8 300 us by triton, 2.00x"
    assert text[2].endswith("INT8 50 us by triton, 8.00x, fp8 200 us") and len(text) == 3


def test_no_gain_is_called_no_gain(card_speed, times):
    assert card_speed.lines(times((300.0, 310.0, None)), "", 0, "fp16")[0].endswith(
        "(geometric mean): no gain in time."
    )


def test_a_throttled_card_is_named_first_and_keeps_its_numbers(card_speed, times):
    text = card_speed.lines(times((600.0, 300.0, None)), "THROTTLED: NVIDIA GeForce RTX 3090 runs", 2, "bf16")
    assert text[0].startswith("THROTTLED: ") and "2.00x" in text[1]
    assert text[2].startswith("- 2 more were left out")
    ours = device_from(name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6))
    report = advice.report(ours, Surroundings(kitchen="0.2.26"), text).splitlines()
    assert report[3:5] == ["Measured now", text[0]]


def test_the_published_throttled_card_fails_the_gate_and_a_healthy_one_passes():
    # an RTX 3090 that measured 8 TFLOPS; a healthy one does about 65
    ours = device_from(name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), multiprocessors=82)
    rated = tuning.rated_bf16_tflops(ours)
    tuning.check_health(65.0, rated, ours.name)
    with pytest.raises(tuning.ThrottledCard, match=r"RTX 3090 runs bf16 at 8\.0 TFLOPS"):
        tuning.check_health(8.0, rated, ours.name)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"name": "AMD Ryzen 9 7950X", "type": "cpu"}, "no CUDA device"),
        ({"name": "Apple GPU", "type": "mps"}, "no CUDA device"),
        ({"name": "AMD Radeon RX 7900 XTX", "hip": "6.4", "gcn_arch": "gfx1100"}, "no NVIDIA card"),
        ({"name": "NVIDIA GeForce GTX 1660", "compute_capability": (7, 5)}, "no tensor cores for int8"),
    ],
    ids=["CPU", "Apple", "AMD", "GTX 16"],
)
def test_it_says_why_a_device_is_not_measured(card_speed, facts, words):
    reason = card_speed.reason_not_to(device_from(**facts))
    assert reason.startswith(facts["name"]) and words in reason


def test_cards_with_int8_units_are_measured(card_speed):
    for name, capability in (("NVIDIA GeForce RTX 2060", (7, 5)), ("NVIDIA GeForce RTX 3060", (8, 6))):
        assert card_speed.reason_not_to(device_from(name=name, compute_capability=capability)) is None


def test_nothing_is_measured_on_a_cpu(card_speed):
    (line,) = card_speed.measure(torch.device("cpu"))
    assert line.startswith("Nothing was measured: ") and "no CUDA device" in line


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_is_measured_in_the_time_given(card_speed):
    text = card_speed.measure(torch.device("cuda", torch.cuda.current_device()))
    assert text[0].startswith(("INT8 Linears run ", "THROTTLED: ")) and "x" in text[1]
