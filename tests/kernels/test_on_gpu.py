"""What only a GPU can show: real layer shapes bit for bit, large offsets, capture, and the path that was compiled."""

import os

import pytest
import torch
from native_int8.kernels import detect, int8_linear, int8_matmul, quantize_rows, tiles
from native_int8.kernels import int8_matmul_triton as pointer_form
from packtest.checks import assert_same
from packtest.shapes import GPU_M, IDEOGRAM4, activation, generator, int8_in_dirty_buffer

pytestmark = pytest.mark.gpu


def codes(rows, columns, device, seed):
    """int8 codes as quantised Gaussians have them, with -128 among them."""
    g = generator(seed, str(device))
    return (torch.randn((rows, columns), device=device, generator=g) * 40).clamp(-128, 127).to(torch.int8)


def int_mm(q_x, q_w):
    """torch._int_mm with M padded to what CUDA asks for."""
    m = q_x.shape[0]
    return torch._int_mm(torch.nn.functional.pad(q_x, (0, 0, 0, max(0, 32 - m))), q_w.t())[:m]


@pytest.mark.parametrize("layer", IDEOGRAM4)
def test_ideogram4_layers_equal_int_mm(layer, device):
    k, n = IDEOGRAM4[layer]
    q_w = codes(n, k, device, 1)
    w_scale = torch.rand((n, 1), device=device, generator=generator(2, str(device))) * 1e-2
    bias = torch.randn((n,), device=device, generator=generator(3, str(device)))
    # the sums fit fp32 exactly only below 2**24, so they are read in two halves of the weight's columns
    for m in GPU_M if k < 20_000 else GPU_M[:12]:
        q_x = codes(m, k, device, m)
        x_scale = torch.rand((m, 1), device=device, generator=generator(4, str(device))) * 1e-2
        acc = int_mm(q_x, q_w)
        expected = acc.float() * x_scale * w_scale.reshape(1, -1) + bias
        for dtype in (torch.bfloat16, torch.float32):
            y = int8_matmul(q_x, x_scale, q_w, w_scale, bias, out_dtype=dtype, implementation="triton")
            assert_same(y, expected.to(dtype), f"M={m} {dtype}")


@pytest.mark.parametrize("layer", ["qkv", "w2"])
@pytest.mark.parametrize("m", GPU_M)
def test_int32_sums_equal_int_mm_bit_for_bit(layer, m, device):
    """With scales of one half of a power of two, fp32 shows the low and the high bits of each sum in turn."""
    k, n = IDEOGRAM4[layer]
    q_x, q_w = codes(m, k, device, 5), codes(n, k, device, 6)
    acc = int_mm(q_x, q_w)
    assert int(acc.abs().max()) < 1 << 24
    ones = torch.ones((m, 1), device=device)
    got = int8_matmul(q_x, ones, q_w, ones[:1], out_dtype=torch.float32, implementation="triton")
    assert_same(got.to(torch.int32), acc, "int32 sums")


@pytest.mark.parametrize("tile", sorted((t for t in tiles.all_tiles(90) if t.tma), key=str), ids=str)
@pytest.mark.parametrize(("m", "k", "n"), [(1, 16, 8), (130, 272, 72), (4097, 4608, 4608), (65, 48, 129)])
def test_tma_form_equals_the_pointer_form(tile, m, k, n, device):
    if detect(device).compute_capability != (9, 0) or tiles.sm_of(detect(device)) != 90:
        pytest.skip("TMA tiles are for sm_90")
    q_x, q_w = codes(m, k, device, 7), codes(n, k, device, 8)
    x_scale, w_scale = torch.rand((m, 1), device=device), torch.rand((n, 1), device=device)
    plain = tiles.Tile(tile.block_m, tile.block_n, tile.block_k, tile.warps, tile.stages)
    run = {t: int8_matmul(q_x, x_scale, q_w, w_scale, out_dtype=torch.bfloat16, tile=t) for t in (tile, plain)}
    assert_same(run[tile], run[plain], "y")


@pytest.mark.fault("B81")
def test_output_larger_than_2_to_31_elements(device):
    m, k, n = 32_769, 16, 65_536
    if torch.cuda.mem_get_info(device)[0] < 8 << 30:
        pytest.skip("needs 8 GB of free GPU memory")
    q_x, q_w = codes(m, k, device, 9), codes(n, k, device, 10)
    ones = torch.ones((m, 1), device=device)
    y = int8_matmul(q_x, ones, q_w, ones[:1], out_dtype=torch.float16, implementation="triton")
    last = q_x[-40:].float() @ q_w.float().t()
    assert_same(y[-40:].float(), last.half().float(), "last rows")


@pytest.mark.fault("B81")
def test_input_larger_than_2_to_31_elements(device):
    m, k = 524_289, 4096 + 256
    if torch.cuda.mem_get_info(device)[0] < 12 << 30:
        pytest.skip("needs 12 GB of free GPU memory")
    x = torch.ones((m, k), dtype=torch.bfloat16, device=device)
    x[-1] = torch.linspace(-1, 1, k, device=device)
    q, scale = quantize_rows(x, implementation="triton")
    assert int(q[-1, 0]) == -127 and int(q[-1, -1]) == 127 and int(q[-2].min()) == 127
    assert float(scale[-2]) == float(torch.tensor(1.0) / 127)


def test_captured_in_a_cuda_graph(device):
    """No synchronisation, tuning or foreign allocation: a captured Linear replays with new inputs."""
    w = codes(256, 512, device, 11)
    scale = torch.rand((256, 1), device=device)
    x = activation(100, 512, torch.bfloat16, device)
    int8_linear(x, w, scale, rotation_group=256)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = int8_linear(x, w, scale, rotation_group=256)
    x.copy_(activation(100, 512, torch.bfloat16, device, seed=1))
    graph.replay()
    assert_same(y, int8_linear(x, w, scale, rotation_group=256), "replayed output")


def test_two_streams_do_not_disturb_each_other(device):
    w, scale = codes(512, 512, device, 12), torch.rand((512, 1), device=device)
    inputs = [activation(300, 512, torch.float16, device, seed=i) for i in range(8)]
    expected = [int8_linear(x, w, scale) for x in inputs]
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize()
    results = []
    for i, x in enumerate(inputs):
        with torch.cuda.stream(streams[i % 2]):
            results.append(int8_linear(x, w, scale))
    torch.cuda.synchronize()
    for got, want in zip(results, expected, strict=True):
        assert_same(got, want, "y")


def test_machine_code_is_the_one_that_was_asked_for(device):
    """On the mma.sync path (TRITON_OVERRIDE_ARCH=sm80 or older GPUs) no wgmma appears, and the loop uses IMMA."""
    q = int8_in_dirty_buffer(256, 256, device)[:, :256].contiguous()
    tile = tiles.Tile(128, 128, 64, 4, 4)
    ones = torch.ones((256, 1), device=device)
    int8_matmul(q, ones, q, ones[:1], out_dtype=torch.bfloat16, implementation="triton", tile=tile)
    compiled = next(kernel for key, kernel in pointer_form._launch.compiled.items() if tile in key)
    native = "wgmma" in compiled.asm["ptx"]
    assert native == (tiles.sm_of(detect(device)) == 90)
    if not native:
        assert "mma.sync" in compiled.asm["ptx"] and "cp.async" in compiled.asm["ptx"]
    if os.environ.get("TRITON_OVERRIDE_ARCH"):
        assert not native
