"""Split-K: the same bits as one program per tile, however the last tiles are split."""

import pytest
import torch
from native_int8.kernels import int8_matmul_split_k_triton as split_k
from native_int8.kernels import reference
from native_int8.kernels.tiles import MAX_PIECES, Split, Tile, split_of
from packtest.checks import assert_same
from packtest.shapes import generator, int8_in_dirty_buffer

SMALL = Tile(32, 32, 32, 4, 2, 2, split_k=True)
LARGE = Tile(128, 128, 128, 4, 3, 16, split_k=True)


def run(m, k, n, split, device, with_bias=True, row_scales=True):
    g = generator(5, str(device))
    q_x, q_w = int8_in_dirty_buffer(m, k, device, 2), int8_in_dirty_buffer(n, k, device, 3)
    x_scale = torch.rand((m,), device=device, generator=g) * 0.1 + 1e-3
    w_scale = torch.rand((n if row_scales else 1,), device=device, generator=g) * 0.01 + 1e-4
    bias = torch.randn((n,), device=device, generator=g) if with_bias else None
    y = torch.full((m, n), float("nan"), dtype=torch.float32, device=device)
    split_k.int8_matmul_split_k_triton(q_x, x_scale, q_w, w_scale, bias, y, SMALL, split)
    expected = reference.int8_matmul(q_x, x_scale[:, None], q_w, w_scale, bias, torch.float32)
    assert_same(y, expected, f"{m}x{k}x{n} with {split}")


@pytest.mark.parametrize("whole", [0, 1, 11])
@pytest.mark.parametrize("pieces", [1, 2, 3, 7])
def test_equals_the_reference_for_any_split(whole, pieces, device):
    """12 tiles of 7 steps; the last step is not a full one."""
    run(96, 200, 128, Split(whole, pieces), device)


@pytest.mark.parametrize(("m", "k", "n"), [(33, 33, 65), (95, 96, 97), (64, 320, 64), (130, 64, 40)])
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no_bias"])
def test_edges(m, k, n, with_bias, device):
    run(m, k, n, Split(1, 2), device, with_bias=with_bias, row_scales=with_bias)


def test_a_split_fills_the_last_round():
    """2304 x 3840 outputs are two waves of 264 tiles and 12 more, which in 8 pieces fill 96 of 132 SMs for a short while."""
    split = split_of(LARGE, 2304, 3840, 3840, 132)
    assert (split.whole, split.pieces) == (528, 8) and split.gain > 0
    # no whole wave at all: 48 tiles in 5 pieces
    split = split_of(LARGE, 256, 3072, 12288, 132)
    assert (split.whole, split.pieces) == (0, 5)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(264 * 128, 128, 4096), (250 * 128, 128, 4096), (2304, 3072, 3072), (2304, 3840, 512), (12 * 128, 128, 128)],
    ids=["full wave", "nearly full", "more than one tile an SM", "few steps", "one step"],
)
def test_nothing_is_split_where_that_gains_nothing(m, n, k):
    assert split_of(LARGE, m, n, k, 132) is None


def test_a_split_needs_little_memory_and_never_more_pieces_than_steps():
    for multiprocessors in (28, 82, 132, 170):
        for m in range(128, 9000, 640):
            for n in (1024, 3840, 12288):
                for k in (256, 1024, 15360):
                    split = split_of(LARGE, m, n, k, multiprocessors)
                    if split is None:
                        continue
                    rest = -(-m // 128) * -(-n // 128) - split.whole
                    assert 0 < rest <= multiprocessors and split.whole % (2 * multiprocessors) == 0
                    assert 2 <= split.pieces <= min(MAX_PIECES, k // 128)
                    assert rest * split.pieces <= 2 * multiprocessors
