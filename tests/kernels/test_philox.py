import pytest
import torch

from graphdecode.kernels.native.optional_triton import tl, triton
from graphdecode.kernels.sampling.philox import philox_words, uniform_bits, uniform_bits_of

# Random123's known answers for philox4x32, 10 rounds: counter, key, output.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, 0xFFFFFFFF_FFFFFFFF, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        0x299F31D0_A4093822,
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_philox_gives_the_published_words(counter, key, words):
    assert philox_words(key, counter) == words


@triton.jit
def _draw_kernel(out, seeds, positions):
    row = tl.program_id(0)
    tl.store(out + row, uniform_bits_of(tl.load(seeds + row), tl.load(positions + row)))


def test_the_kernel_draws_the_same_bits_as_the_host(device):
    seeds = [0, 1, -1, 2**63 - 1, -(2**63), 0x299F31D0A4093822]
    positions = [0, 1, 77, 2**31 - 1, 5, 0x243F6A88]
    out = torch.zeros(len(seeds), dtype=torch.int64, device=device)
    _draw_kernel[(len(seeds),)](
        out, torch.tensor(seeds, device=device), torch.tensor(positions, dtype=torch.int32, device=device)
    )
    assert out.tolist() == [uniform_bits(seed, position) for seed, position in zip(seeds, positions, strict=True)]
    assert out[0] == 0x6627E8D5 >> 8


def test_draws_fill_the_unit_interval_evenly():
    draws = torch.tensor([uniform_bits(12345, position) for position in range(20_000)]).double() / 2**24
    counts = torch.histc(draws, bins=50, min=0, max=1)
    statistic = ((counts - 400) ** 2 / 400).sum()
    assert torch.special.gammaincc(torch.tensor(24.5), statistic / 2) > 1e-4
