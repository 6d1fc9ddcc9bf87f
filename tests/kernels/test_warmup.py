"""Warm-up: the list of variants for made-up cards, real (interpreted) launches, and on a GPU what really compiles."""

import itertools

import pytest
import torch
from native_int8.kernels import detect, device_from, int8_linear, quantize_rows, tiles, warmup
from native_int8.kernels.warmup import LinearKind, MatmulVariant, QuantizeVariant, variants
from packtest.shapes import IDEOGRAM4, activation, generator

BF16 = torch.bfloat16
RTX_3090 = device_from(name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), multiprocessors=82, triton="3.6.0")
H200 = device_from(name="NVIDIA H200", compute_capability=(9, 0), multiprocessors=132, triton="3.6.0")


def ideogram4(group=256, dtype=BF16):
    return [
        LinearKind(k, n, dtype, dtype if name == "llm_cond_proj" else None, group) for name, (k, n) in IDEOGRAM4.items()
    ]


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(warmup, "_done", {})
    yield
    tiles._rejected.clear()
    tiles.pick.cache_clear()


def matmuls(found):
    return [variant for variant in found if isinstance(variant, MatmulVariant)]


def quantisers(found):
    return [variant for variant in found if isinstance(variant, QuantizeVariant)]


@pytest.mark.parametrize("device", [RTX_3090, H200], ids=["3090", "h200"])
def test_every_tile_that_any_m_picks_is_listed(device):
    for linear in ideogram4():
        found = {v.tile for v in matmuls(variants(device, [linear]))}
        for m in (*range(1, 300), *range(300, 9000, 61), 100_000):
            assert tiles.pick(device, m, linear.out_features, linear.in_features) in found, m


def test_layers_of_one_kind_share_their_variants():
    once = variants(RTX_3090, ideogram4())
    assert variants(RTX_3090, ideogram4() * 34) == once
    # 4608, 12288 and 53248 columns; six tiles with and without bias
    assert [v.k for v in quantisers(once)] == [4608, 12288, 53248]
    assert len(matmuls(once)) == 12
    assert {v.bias_dtype for v in matmuls(once)} == {None, BF16}
    assert all(v.out_dtype == BF16 and v.row_scales for v in matmuls(once))


def test_the_tiles_of_a_picture_come_first():
    first = matmuls(variants(RTX_3090, ideogram4()))[0]
    assert first.tile in tiles.default_large_tiles(86)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"bias_dtype": torch.float32},
        {"row_scales": False},
        {"in_features": 4600},
        {"in_features": 4592},
        {"out_features": 4601},
    ],
    ids=str,
)
def test_what_changes_the_machine_code_makes_another_variant(change):
    facts = {"in_features": 4608, "out_features": 4608, "dtype": BF16}
    one = set(matmuls(variants(RTX_3090, [LinearKind(**facts)])))
    other = set(matmuls(variants(RTX_3090, [LinearKind(**{**facts, **change})])))
    assert not one & other


def test_sizes_of_one_class_share_machine_code():
    one, other = (matmuls(variants(RTX_3090, [LinearKind(k, n, BF16)])) for k, n in ((4608, 13824), (12288, 3072)))
    assert one == other


@pytest.mark.parametrize(
    "change", [{"rotation_group": 256}, {"input_act": "swiglu"}, {"dtype": torch.float16}], ids=str
)
def test_quantiser_variants(change):
    facts = {"in_features": 4608, "out_features": 4608, "dtype": BF16}
    one = quantisers(variants(RTX_3090, [LinearKind(**facts)]))
    other = quantisers(variants(RTX_3090, [LinearKind(**{**facts, **change})]))
    assert len(one) == len(other) == 1 and one != other


def test_a_tuned_tile_is_compiled_too():
    tuned = tiles.Tile(256, 128, 64, 8, 4)
    tiles.use_tuned(RTX_3090, {(8192, 4608, 4608): tuned})
    try:
        assert tuned in {v.tile for v in matmuls(variants(RTX_3090, ideogram4()))}
    finally:
        tiles.use_tuned(RTX_3090, {})


def test_nothing_is_compiled_where_triton_is_not_used():
    no_triton = device_from(name="NVIDIA GeForce RTX 3090", compute_capability=(8, 6), triton_missing="not installed")
    for device in (
        no_triton,
        device_from(name="CPU", type="cpu"),
        device_from(name="RTX 2080", compute_capability=(7, 5)),
    ):
        assert variants(device, ideogram4()) == ()
        assert warmup.compile_all("cpu", ideogram4(), device=device) == warmup.WarmUp(0, pytest.approx(0, abs=1))


def test_a_small_operand_is_of_the_same_class_as_the_real_one():
    for (n, k), tile in itertools.product(
        ((4608, 4608), (13824, 4592), (33, 4600), (1, 1), (7, 100), (16, 48)), tiles.all_tiles(86) | tiles.all_tiles(90)
    ):
        small_n, small_k = warmup._small_n(n, tile), warmup._small_k(k, tile)
        assert (small_n % 16 == 0, small_n == 1) == (n % 16 == 0, n == 1)
        assert (small_k % 16 == 0, small_k == 1) == (k % 16 == 0, k == 1)
        assert (small_k % tile.block_k == 0) == (k % tile.block_k == 0)


def tiny(device):
    """A Linear of every kind, small enough for the interpreter; on an architecture with few tiles."""
    return [
        LinearKind(48, 32, torch.float32, torch.float16, 16),
        LinearKind(33, 7, torch.float16, row_scales=False),
        LinearKind(64, 16, torch.float16, input_act="swiglu"),
    ]


def ampere_here(device):
    """The machine's device when it compiles kernels, else a made-up card whose kernels the interpreter runs."""
    return detect(device) if device.type == "cuda" else RTX_3090


def test_variants_really_run_once_and_report_progress(device):
    seen = []
    facts = ampere_here(device)
    linears = tiny(device)[:1]
    expected = variants(facts, linears)
    result = warmup.compile_all(device, linears, progress=lambda *step: seen.append(step), device=facts)
    assert result.variants == len(expected) == len(seen) - 1
    assert [step[0] for step in seen] == list(range(len(expected) + 1))
    assert seen[0][2].startswith("quantize_rows 48 rotation 16") and seen[-1][2] == "done"
    assert not tiles.rejected(tiles.sm_of(facts))
    assert warmup.compile_all(device, linears, device=facts).variants == 0


def test_interruption_ends_the_work(device):
    answers = iter([False, False, True])
    result = warmup.compile_all(
        device, tiny(device), interrupted=lambda: next(answers), device=ampere_here(device)
    )  # fmt: skip
    assert result.interrupted and result.variants == 2


def test_a_tile_that_does_not_run_is_rejected_and_the_next_one_is_tried(monkeypatch):
    linear = LinearKind(4608, 4608, BF16)
    broken = tiles.pick(RTX_3090, 20, 4608, 4608), tiles.pick(RTX_3090, 10, 4608, 4608)
    ran = []

    def run(q_x, x_scale, q_w, w_scale, bias, out_dtype, implementation, device, tile):
        ran.append(tile)
        if tile in broken:
            raise RuntimeError("out of resource: shared memory\nand more")

    monkeypatch.setattr(warmup, "matmul_2d", run)
    monkeypatch.setattr(warmup, "quantize_2d", lambda *_: None)
    warmup.compile_all("cpu", [linear], device=RTX_3090)
    assert tiles.rejected(86) == {tile.name: "RuntimeError: out of resource: shared memory" for tile in broken}
    for m in (1, 10, 20, 100, 4352):
        assert tiles.pick(RTX_3090, m, 4608, 4608) in ran
        # the only tile of its row stays, there is no other
        assert tiles.pick(RTX_3090, m, 4608, 4608) not in broken[1:]


# ---- on a GPU


def compiled_variants():
    """Machine codes that Triton holds in this process for the kernels of a Linear."""
    from native_int8.kernels import int8_matmul_tma_triton, int8_matmul_triton, quantize_rows_triton

    kernels = (
        quantize_rows_triton._quantize_rows_kernel,
        int8_matmul_triton._int8_matmul_kernel,
        int8_matmul_tma_triton._int8_matmul_tma_kernel,
    )
    return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("group", [0, 256])
def test_after_warm_up_no_m_compiles_anything(device, group, bias):
    k, n = IDEOGRAM4["o"]
    q_w, w_scale = quantize_rows(
        torch.randn((n, k), device=device, generator=generator(1, str(device))), rotation_group=group
    )
    b = torch.zeros((n,), device=device, dtype=BF16) if bias else None
    warmup.compile_all(device, [LinearKind(k, n, BF16, BF16 if bias else None, group)])
    before = compiled_variants()
    assert before > 0
    for m in (4096, 4097, 4173, 8192, 1, 2, 16, 17, 50, 77, 256, 300, 1000, 2304):
        int8_linear(activation(m, k, BF16, device), q_w, w_scale, b, rotation_group=group)
    torch.cuda.synchronize()
    assert compiled_variants() == before


@pytest.mark.gpu
def test_warm_up_of_a_model_takes_seconds(device):
    result = warmup.compile_all(device, ideogram4())
    assert result.variants > 10 and result.seconds <= 30
