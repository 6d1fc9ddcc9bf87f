"""PreparedLinear: equal to int8_linear bit for bit, however often it is called and whatever the rows look like."""

import ctypes

import pytest
import torch
from native_int8.kernels import LowRank, UnsupportedInput, int8_linear, quantize_rows
from native_int8.kernels.compiled import interpreted
from native_int8.kernels.launch import Launcher, Starter
from native_int8.kernels.prepared_linear import MAX_PLANS, PreparedLinear
from packtest.checks import assert_same
from packtest.shapes import generator

K, N = 128, 48


def layer(device, group=0):
    w = torch.randn((N, K), generator=generator(7, str(device)), device=device)
    q, scale = quantize_rows(w, rotation_group=group, implementation="torch")
    return q, scale, torch.randn((N,), generator=generator(8, str(device)), device=device)


def rows(shape, device, dtype=torch.float16):
    return torch.randn(shape, generator=generator(4, str(device)), device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_equals_int8_linear_on_the_first_call_and_later(dtype, group, bias, impl, device):
    q, scale, b = layer(device, group)
    b = b.to(dtype) if bias else None
    prepared = PreparedLinear(q, scale, rotation_group=group, implementation=impl)
    for m in (5, 3, 5, 5):
        x = rows((1, m, K), device, dtype)
        expected = int8_linear(x, q, scale, b, rotation_group=group, implementation=impl)
        assert_same(prepared(x, q, scale, b), expected, "y")
    assert prepared.implementation == impl


@pytest.mark.parametrize("shape", [(K,), (0, K), (2, 3, K), (1, 2, 1, 3, K)], ids=str)
def test_keeps_the_leading_dimensions(shape, impl, device):
    q, scale, b = layer(device)
    x = rows(shape, device)
    y = PreparedLinear(q, scale, implementation=impl)(x, q, scale, b)
    assert y.shape == (*shape[:-1], N) and y.is_contiguous()
    assert_same(y, int8_linear(x, q, scale, b, implementation=impl), "y")


def test_takes_strided_and_unaligned_rows_after_plain_ones(impl, device):
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation=impl)
    wide = rows((6, 2 * K + 1), device)
    for x in (wide[:, :K].contiguous(), wide[:, :K], wide[:, 1 : K + 1], wide[:, ::2][:, :K], wide[0, 1 : K + 1]):
        assert_same(prepared(x, q, scale, b), int8_linear(x, q, scale, b, implementation=impl), "y")


def test_uses_the_weight_of_the_call(impl, device):
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation=impl)
    x = rows((4, K), device)
    prepared(x, q, scale, b)
    other = q.flip(0).contiguous()
    assert_same(prepared(x, other, scale * 2, b), int8_linear(x, other, scale * 2, b, implementation=impl), "y")


@pytest.mark.parametrize("group", [0, 64])
def test_another_layer_takes_the_rows_and_quantises_nothing(group, impl, device):
    q, scale, b = layer(device, group)
    other, other_scale = q[:16].contiguous(), scale[:16].contiguous() * 2
    one = PreparedLinear(q, scale, rotation_group=group, implementation=impl)
    two = PreparedLinear(other, other_scale, rotation_group=group, implementation=impl)
    assert one.rows_kind is two.rows_kind
    wide = rows((3, 2 * K), device)
    for x in (rows((2, 5, K), device), wide[:, :K], wide[:, ::2], rows((2, 5, K), device)):
        y, shared = one.with_rows(x, q, scale, b)
        assert_same(y, int8_linear(x, q, scale, b, rotation_group=group, implementation=impl), "y")
        expected = int8_linear(x, other, other_scale, rotation_group=group, implementation=impl)
        # x itself is not read any more
        y, passed_on = two.with_rows(torch.full_like(x, float("nan")), other, other_scale, rows=shared)
        assert passed_on is shared
        assert_same(y, expected, "y of the second")
        assert_same(two(x, other, other_scale), expected, "y of the second on its own")


def test_rows_of_another_kind_are_told_apart(device):
    q, scale, _ = layer(device)
    swiglu = PreparedLinear(q, scale, input_act="swiglu", implementation="torch")
    kinds = {
        id(PreparedLinear(q, scale, rotation_group=group, implementation="torch").rows_kind) for group in (0, 16, 64)
    }
    assert len(kinds | {id(swiglu.rows_kind)}) == 4
    y, shared = PreparedLinear(q, scale, implementation="torch").with_rows(rows((0, K), device), q, scale)
    assert y.shape == (0, N) and shared is None


def test_swiglu_and_one_scale(impl, device):
    q, _, b = layer(device)
    scale = torch.tensor(0.01, device=device)
    prepared = PreparedLinear(q, scale, input_act="swiglu", implementation=impl)
    x = rows((3, 2 * K), device)
    for _ in range(2):
        expected = int8_linear(x, q, scale, b, input_act="swiglu", implementation=impl)
        assert_same(prepared(x, q, scale, b), expected, "y")


def test_holds_no_tensor_and_few_plans(impl, device):
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation=impl)
    for m in range(1, MAX_PLANS + 3 if device.type == "cuda" else 3):
        prepared(rows((m, K), device), q, scale, b)
    assert len(prepared._plans) <= MAX_PLANS
    assert not any(isinstance(getattr(prepared, name, None), torch.Tensor) for name in PreparedLinear.__slots__)


@pytest.mark.parametrize(
    "change", [lambda q, s: (q, s.half()), lambda q, s: (q.t().contiguous().t(), s), lambda q, s: (q, s[1:])]
)
def test_refuses_what_it_would_have_to_convert(change, device):
    q, scale, _ = layer(device)
    with pytest.raises(UnsupportedInput, match=r"Needed"):
        PreparedLinear(*change(q, scale))


class Recorder:
    """Stands for what Triton returns from a launch: keeps the arguments of later launches. No GPU is here to take them."""

    function, packed_metadata = "function", "metadata"

    def __init__(self):
        self.direct, self.through_triton = [], []

    def run(self, *arguments):
        self.direct.append(arguments)

    def __getitem__(self, grid):
        return lambda *arguments: self.through_triton.append((grid, arguments))


@pytest.fixture
def recorder(monkeypatch):
    from types import SimpleNamespace

    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_stream=lambda index: f"stream {index}"), False)
    monkeypatch.setattr(driver, "_default", SimpleNamespace(get_current_stream=lambda index: f"stream {index}"), False)
    return Recorder()


def test_starter_passes_what_tritons_own_launch_passes(recorder):
    pytest.importorskip("triton.knobs", reason="this Triton is older than its knobs and takes its own launch")
    Starter(recorder, 1)(7, (10, 20, 30))
    assert recorder.direct == [(7, 1, 1, "stream 1", "function", "metadata", None, None, None, 10, 20, 30)]
    assert recorder.through_triton == []


def test_starter_leaves_the_launch_to_triton_while_a_profiler_listens(recorder):
    knobs = pytest.importorskip("triton.knobs")

    def hook(_):
        return None

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        Starter(recorder, 0)(7, (10,))
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    assert recorder.direct == []
    assert recorder.through_triton == [((7, 1, 1), (10,))]


def test_launcher_keeps_aligned_kernels_only(recorder):
    pytest.importorskip("triton.knobs", reason="this Triton is older than its knobs and takes its own launch")

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **options: recorder

    launcher, first = Launcher(Kernel()), []
    assert launcher(2, (0, "key"), False, (1,), {}, first.append) is None
    assert launcher(2, (0, "key"), True, (1,), {}, first.append) is launcher(
        3, (0, "key"), True, (1,), {}, first.append
    )
    assert first == [recorder]
    assert [call[0] for call in recorder.direct] == [3]


class ByAddress:
    """Starts an interpreted kernel from addresses, as the driver does: sizes and dtypes are those of the first launch."""

    def __init__(self, launcher, arguments, options):
        self.launcher, self.first, self.options, self.starts = launcher, arguments, options, 0

    def __call__(self, programs, arguments):
        self.starts += 1
        tensors = [
            self.tensor_at(now, first) if isinstance(first, torch.Tensor) else now
            for first, now in zip(self.first, arguments, strict=True)
        ]
        self.launcher.kernel[(programs, 1, 1)](*tensors, **self.options)

    @staticmethod
    def tensor_at(address, like):
        size = like.numel() * like.element_size()
        return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=like.dtype)


@pytest.fixture
def starters(monkeypatch):
    """The starters that launches of interpreted kernels left behind, in order."""
    real, made = Launcher.__call__, []

    def launch(self, programs, key, aligned, arguments, options, on_first=None):
        real(self, programs, key, aligned, arguments, options, on_first)
        made.append(ByAddress(self, arguments, options))
        return made[-1]

    monkeypatch.setattr(Launcher, "__call__", launch)
    return made


@pytest.mark.skipif(not interpreted(), reason="on a GPU every second call goes this way")
@pytest.mark.parametrize("group", [0, 64])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
@pytest.mark.parametrize("m", [1, 5, 33])
def test_later_calls_pass_the_right_addresses(starters, group, bias, m, device):
    q, scale, b = layer(device, group)
    b = b if bias else None
    first, later = rows((1, m, K), device), rows((1, m, K), device).flip(-1).contiguous()
    expected = int8_linear(later, q, scale, b, rotation_group=group, implementation="triton")
    starters.clear()
    prepared = PreparedLinear(q, scale, rotation_group=group, implementation="triton")
    prepared(first, q, scale, b)
    assert_same(prepared(later, q, scale, b), expected, "y")
    assert [starter.starts for starter in starters] == [1, 1]


@pytest.mark.skipif(not interpreted(), reason="on a GPU every second call goes this way")
def test_later_calls_with_given_rows_start_the_matmul_alone(starters, device):
    q, scale, b = layer(device)
    x = rows((5, K), device)
    expected = int8_linear(x, q, scale, b, implementation="triton")
    one, two = (PreparedLinear(q, scale, implementation="triton") for _ in range(2))
    _, shared = one.with_rows(x, q, scale, b)
    starters.clear()
    for _ in range(3):
        assert_same(two.with_rows(x, q, scale, b, shared)[0], expected, "y")
    assert [starter.starts for starter in starters] == [2]
    # its first call without rows learns to quantise; later calls of both kinds use the same plan
    for given in (None, None, shared):
        assert_same(two.with_rows(x, q, scale, b, given)[0], expected, "y")
    assert [starter.starts for starter in starters] == [2, 1, 2]


@pytest.mark.skipif(not interpreted(), reason="needs stand-ins for compiled kernels")
def test_a_new_tile_makes_a_new_plan(monkeypatch, device):
    from native_int8.kernels import prepared_linear
    from native_int8.kernels.tiles import Tile

    tile, launches, real = Tile(32, 32, 32, 4, 2), [], Launcher.__call__

    def launch(self, programs, key, aligned, arguments, options, on_first=None):
        launches.append(key)
        real(self, programs, key, aligned, arguments, options, on_first)
        return ByAddress(self, arguments, options)

    monkeypatch.setattr(Launcher, "__call__", launch)
    q, scale, b = layer(device)
    prepared = PreparedLinear(q, scale, implementation="triton")
    x = rows((4, K), device)
    before = prepared(x, q, scale, b)
    monkeypatch.setattr(prepared_linear, "pick", lambda *_: tile)
    assert_same(prepared(x, q, scale, b), before, "y")
    assert sum(tile in key for key in launches) == 1
    prepared(x, q, scale, b)
    assert sum(tile in key for key in launches) == 1


@pytest.mark.skipif(not interpreted(), reason="on a GPU every second call goes this way")
@pytest.mark.parametrize("rank", [32, 96])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no_bias"])
def test_later_calls_pass_the_addresses_of_a_low_rank_product(starters, bias, rank, device):
    q, scale, b = layer(device)
    b = b if bias else None
    low_ranks = [LowRank(rows((rank, K), device), rows((N, rank), device) * sign) for sign in (1, -0.5)]
    first, later = rows((1, 5, K), device), rows((1, 5, K), device).flip(-1).contiguous()
    fresh = PreparedLinear(q, scale, implementation="triton")
    expected = fresh.with_rows(later, q, scale, b, None, low_ranks[1])[0]
    starters.clear()
    prepared = PreparedLinear(q, scale, implementation="triton")
    prepared.with_rows(first, q, scale, b, None, low_ranks[0])
    y, kept = prepared.with_rows(later, q, scale, b, None, low_ranks[1])
    assert_same(y, expected, "y")
    assert [starter.starts for starter in starters] == [1, 1]
    assert_same(prepared.with_rows(later, q, scale, b, kept, low_ranks[1])[0], expected, "y")
