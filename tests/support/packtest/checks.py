"""How results are compared: one helper per kind of stage, with the worst element in the message."""

import torch

POISON_INT8 = -128


def assert_same(got: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Equal dtype, shape and every element, NaN equal to NaN; else the worst index, got and expected."""
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.cpu(), expected.cpu()
    differ = got != expected
    if got.is_floating_point():
        differ &= ~(got.isnan() & expected.isnan())
    if bool(differ.any()):
        index = tuple(differ.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(differ.sum())} of {differ.numel()} differ, first at {index}: "
            f"got {got[index].item()!r}, expected {expected[index].item()!r}"
        )


def assert_codes_within_one(got: torch.Tensor, expected: torch.Tensor, share: float, what: str) -> None:
    """int8 codes equal, but for at most `share` of them, which may be one step away."""
    distance = (got.cpu().int() - expected.cpu().int()).abs()
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if distance.numel() == 0:
        return
    assert int(distance.max()) <= 1, f"{what}: a code is {int(distance.max())} steps away"
    assert float((distance > 0).float().mean()) <= share, (
        f"{what}: {float((distance > 0).float().mean()):.2%} of codes differ by one step, allowed {share:.2%}"
    )


def assert_close(got: torch.Tensor, expected: torch.Tensor, relative: float, what: str) -> None:
    """RMS error at most `relative` of the RMS of expected, both finite."""
    got, expected = got.double().cpu(), expected.double().cpu()
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    assert bool(torch.isfinite(got).all()), f"{what}: not finite"
    if got.numel() == 0:
        return
    error = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    assert float(error) <= relative, f"{what}: relative RMS error {float(error):.3e}, allowed {relative:.1e}"


def assert_rounded_once(got: torch.Tensor, expected: torch.Tensor, interpreted: bool, what: str) -> None:
    """Equal to the reference rounded once; Triton's interpreter truncates to bf16, so there one ulp is allowed."""
    if interpreted and got.dtype == torch.bfloat16:
        bits = (got.cpu().view(torch.int16).int() - expected.cpu().view(torch.int16).int()).abs()
        bits = bits[~(got.isnan().cpu() & expected.isnan().cpu())]
        assert bits.numel() == 0 or int(bits.max()) <= 1, f"{what}: {int(bits.max())} bf16 steps away, allowed 1"
        return
    assert_same(got, expected, what)


def sqnr_db(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Signal to quantisation noise in dB: 10 log10(|expected|^2 / |got - expected|^2)."""
    got, expected = got.double().cpu(), expected.double().cpu()
    return float(10 * torch.log10(expected.square().sum() / (got - expected).square().sum().clamp(min=1e-300)))
