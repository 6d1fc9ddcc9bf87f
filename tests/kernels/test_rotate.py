"""rotate: the matrix of the ConvRot files, its properties, and each group size."""

import pytest
import torch
from native_int8.kernels import UnsupportedInput, reference, rotate
from native_int8.kernels.rotate import hadamard
from packtest.checks import assert_close
from packtest.shapes import activation

GROUPS = [4, 16, 64, 256, 1024]


def test_matrix_of_four_is_the_one_of_the_format():
    rows = [[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]]
    assert (reference.hadamard(4) * 2).tolist() == rows


@pytest.mark.parametrize("group", GROUPS)
def test_matrix_is_regular_symmetric_and_its_own_inverse(group):
    h = reference.hadamard(group)
    assert torch.equal(h, h.T)
    assert torch.allclose(h @ h, torch.eye(group, dtype=torch.float64))
    assert torch.allclose(h.sum(0), torch.ones(group, dtype=torch.float64))
    assert torch.equal(hadamard(group, torch.device("cpu")).double(), h)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("group", GROUPS)
def test_equals_the_reference(group, dtype, impl, device):
    x = activation(3, 3 * 1024, dtype, device)
    y = rotate(x, group, implementation=impl)
    assert y.dtype == dtype
    assert_close(y, reference.rotate(x, group), 5e-4 if dtype == torch.float16 else 1e-5, "rotated")


@pytest.mark.parametrize("group", [16, 256])
def test_twice_gives_the_input_back(group, impl, device):
    x = activation(4, 512, torch.float32, device).reshape(2, 2, 512)
    assert_close(rotate(rotate(x, group, implementation=impl), group, implementation=impl), x, 2e-5, "round trip")


@pytest.mark.parametrize(("k", "group"), [(256, 128), (96, 64), (512, 0), (4096, 4096)])
def test_other_groups_are_refused(k, group):
    with pytest.raises(UnsupportedInput, match=f"group {group}"):
        rotate(torch.zeros(2, k), group)
