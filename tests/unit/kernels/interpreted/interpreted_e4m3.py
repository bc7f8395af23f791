"""e4m3 codes against torch's own, in Triton's interpreter."""

import torch

from tscale.kernels.gpu import decode_e4m3, encode_e4m3
from tscale.kernels.gpu.builds import ELEMENTS


def torch_codes(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn).view(torch.uint8)


def any_bits(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**31), 2**31, (count,), generator=generator).to(torch.int32).view(torch.float32)


def in_range(count: int) -> torch.Tensor:
    """Signs and mantissas at random, exponents from below half the smallest code to twice the largest one."""
    generator = torch.Generator().manual_seed(2)
    sign_and_mantissa = any_bits(count).view(torch.int32) & ~0x7F800000
    exponents = torch.randint(127 - 12, 127 + 10, (count,), generator=generator).to(torch.int32) << 23
    return (sign_and_mantissa | exponents).view(torch.float32)


def near_ties() -> torch.Tensor:
    """All codes' values, the middles between neighbours, and the float32 on both sides of each; both signs."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    beyond = torch.tensor([464.0, 480.0, 496.0, 512.0, 1e9, 3.4028235e38])
    middles = torch.cat([codes, (codes[1:] + codes[:-1]) / 2, beyond])
    around = torch.cat([middles, middles.nextafter(torch.tensor(1e30)), middles.nextafter(torch.tensor(-1e30))])
    return torch.cat([around, -around])


def special() -> torch.Tensor:
    bits = [
        0,
        -(2**31),
        0x7F800000,
        -0x800000,
        0x7FC00000,
        -0x400000,
        0x7F800001,
        0x7FFFFFFF,
        -1,
        1,
        0x7FFFFF,
        0x800000,
    ]
    return torch.tensor(bits, dtype=torch.int32).view(torch.float32)


def test_encode_gives_torchs_bits_for_half_a_million_values():
    values = torch.cat([near_ties(), special(), in_range(400_000), any_bits(100_000)])
    assert len(values) > 500_000 and len(values) % ELEMENTS  # the last program is a partial one
    different = torch.nonzero(encode_e4m3(values) != torch_codes(values)).flatten()
    assert different.tolist() == []


def test_saturation_nan_and_minus_zero_are_as_torch_casts_them():
    """Said in codes, so that a change of torch's rule is seen: 448 from infinity, NaN with its sign, -0."""
    values = torch.tensor([float("inf"), float("-inf"), float("nan"), -0.0, 448, 464, 465, 2**-10, 2**-9 * 1.5])
    expected = [0x7E, 0xFE, 0x7F, 0x80, 0x7E, 0x7E, 0x7E, 0x00, 0x02]
    assert encode_e4m3(values).tolist() == expected == torch_codes(values).tolist()


def test_decode_gives_torchs_bits_for_all_codes():
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(decode_e4m3(codes).view(torch.int32), expected.view(torch.int32))
    shaped = codes.view(torch.float8_e4m3fn).reshape(16, 16)
    assert decode_e4m3(shaped).shape == (16, 16)


def test_nothing_in_nothing_out():
    assert encode_e4m3(torch.empty(0)).shape == (0,)
    assert decode_e4m3(torch.empty(0, 3, dtype=torch.uint8)).shape == (0, 3)
