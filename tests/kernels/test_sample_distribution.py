"""Chi-square tests of what is drawn: each filter, their combination, penalties and biases."""

import pytest
import torch
from sampling_rows import kept_probabilities, neutral_slots, set_row

from graphdecode.kernels.sampling.sample import sample
from graphdecode.kernels.sampling.sampling_slots import PROMPT_BIT, SamplingSlots

SAMPLERS = {
    "temperature": {"temperature": 0.7},
    "hot": {"temperature": 1.8},
    "top_k": {"temperature": 1.0, "top_k": 6},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.1},
    "all": {"temperature": 1.2, "top_k": 12, "top_p": 0.9, "min_p": 0.03},
}


def chi_square_p_value(wish: dict[str, float], draws: int, by_position: bool) -> float:
    vocab = 30
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(8)) * 1.5
    slots = neutral_slots(draws)
    for name, value in wish.items():
        getattr(slots, name)[:] = value
    slots.sampling_flags[:] = 1
    numbers = torch.arange(draws)
    if not by_position:
        slots.seed[:] = numbers * 7919
    positions = numbers.int() if by_position else torch.zeros(draws, dtype=torch.int32)
    sampled = torch.zeros(draws, dtype=torch.int64)
    sample(sampled, logits.repeat(draws, 1), positions, torch.tensor([draws], dtype=torch.int32), slots)
    p = kept_probabilities(logits, **wish)
    assert torch.bincount(sampled, minlength=vocab)[p == 0].sum() == 0, "a token was drawn that the filters drop"
    return fit_p_value(sampled, p)


def fit_p_value(sampled: torch.Tensor, p: torch.Tensor) -> float:
    """How likely draws so far from the probabilities `p` are: Pearson's chi-square test. Impossible draws: 0."""
    counts = torch.bincount(sampled, minlength=len(p)).double()
    if counts[p == 0].sum() > 0:
        return 0.0
    expected = p[p > 0] * len(sampled)
    statistic = ((counts[p > 0] - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return torch.special.gammaincc(freedom, statistic / 2).item()


@pytest.mark.parametrize("name", SAMPLERS)
def test_draws_of_many_seeds_follow_the_distribution(name):
    assert chi_square_p_value(SAMPLERS[name], 5000, by_position=False) > 1e-4


@pytest.mark.parametrize("name", SAMPLERS)
def test_100k_draws_of_one_seed_follow_the_distribution(name):
    assert chi_square_p_value(SAMPLERS[name], 100_000, by_position=True) > 1e-4


PENALTIES = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 0.8},
    "frequency": {"frequency_penalty": 0.3},
    "all": {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.4, "top_p": 0.9},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_100k_draws_under_penalties_and_bias_follow_the_distribution(name):
    """Tokens 0..5 were in the prompt; 4..9 were generated, each once more than the one before; 10 has a bias."""
    vocab, draws, wish = 30, 100_000, PENALTIES[name]
    top_p = wish.get("top_p", 1.0)
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(12)) * 1.5
    generated = torch.zeros(vocab, dtype=torch.int32)
    generated[4:10] = torch.arange(1, 7)
    counts = generated.clone()
    counts[:6] |= PROMPT_BIT
    one = neutral_slots(1)
    set_row(one, 0, temperature=0.9, seed=21, biases={10: 0.7}, **wish)
    slots = SamplingSlots(*(slot.repeat(draws, *[1] * (slot.dim() - 1)) for slot in one))
    sampled = torch.zeros(draws, dtype=torch.int64)
    live = torch.tensor([draws], dtype=torch.int32)
    sample(
        sampled, logits.repeat(draws, 1), torch.arange(draws, dtype=torch.int32), live, slots, counts.expand(draws, -1)
    )
    exact = logits.double()
    exact[10] += 0.7
    for token in range(10):
        repetition = wish.get("repetition_penalty", 1.0)
        exact[token] = exact[token] / repetition if exact[token] > 0 else exact[token] * repetition
        times = int(generated[token])
        exact[token] -= wish.get("presence_penalty", 0.0) * (times > 0) + wish.get("frequency_penalty", 0.0) * times
    p = kept_probabilities(exact, 0.9, top_p=top_p)
    assert fit_p_value(sampled, p) > 1e-4
    assert fit_p_value(sampled, kept_probabilities(logits, 0.9, top_p=top_p)) < 1e-9  # as if nothing was asked
