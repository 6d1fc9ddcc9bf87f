"""Shapes and inputs that the kernel tests share."""

import torch

# (M, K, N): odd ones, block edges, and the smallest
EDGE_SHAPES = [
    (0, 64, 32),
    (1, 64, 48),
    (1, 33, 7),
    (7, 15, 33),
    (15, 96, 17),
    (16, 16, 16),
    (17, 129, 63),
    (33, 127, 129),
    (63, 1000, 24),
    (127, 256, 65),
    (129, 63, 127),
]
# M of a GPU run over the real layers: tokens of Ideogram 4 at 768 and 1024 px, and odd ones around block edges
GPU_M = [1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 129, 255, 257, 513, 1023, 2304, 2560, 4095, 4097, 4352]
# (K, N) of Ideogram 4's block Linears and of its text projection
IDEOGRAM4 = {
    "qkv": (4608, 13824),
    "o": (4608, 4608),
    "w1_w3": (4608, 12288),
    "w2": (12288, 4608),
    "llm_cond_proj": (53248, 4608),
}


def shape_id(shape) -> str:
    """Readable id of an (M, K, N) or a (K, N)."""
    return "x".join(str(size) for size in shape)


def generator(seed: int = 0, device: str = "cpu") -> torch.Generator:
    """A seeded generator of the test's own; global state stays alone."""
    return torch.Generator(device=device).manual_seed(seed)


def int8_in_dirty_buffer(rows: int, columns: int, device, seed: int = 0) -> torch.Tensor:
    """int8 [rows, columns] with codes from -128 to 127: a slice of a larger buffer of other random codes.

    A kernel that reads past an edge without a mask reads those, not zeros.
    """
    g = generator(seed, str(device))
    dirty = torch.randint(-128, 128, (rows + 5, columns + 19), dtype=torch.int8, device=device, generator=g)
    return dirty[2 : 2 + rows, 3 : 3 + columns]


def activation(rows: int, columns: int, dtype: torch.dtype, device, seed: int = 0) -> torch.Tensor:
    """Activations as transformers have them: Gaussian rows of different size, and a few channels 30 times larger."""
    g = generator(seed, str(device))
    x = torch.randn((rows, columns), device=device, generator=g)
    x *= torch.rand((rows, 1), device=device, generator=g) * 3 + 0.1
    x[:, :: max(columns // 3, 1)] *= 30
    return x.to(dtype)
