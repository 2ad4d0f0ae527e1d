"""FlashInfer's sampling functions: filters against float64, draws by chi-square, and seeds on the device."""

import contextlib
import math

import pytest
import torch

from graphdecode import BucketLadder, GraphManager, Slot, StepBuffers, sampling
from graphdecode.kernels.surfaces.draw_tokens import draw_tokens_triton
from graphdecode.kernels.surfaces.filter_probs import filter_probs_triton
from graphdecode.surfaces.flashinfer import sampling as functions

VOCAB = 300


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # draws by the thousand are of compiled kernels


def logits_of(rows, vocab=VOCAB, seed=0, device="cpu", dtype=torch.float32):
    return (torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2).to(dtype).to(device)


def probs_of(rows, vocab=VOCAB, seed=0, device="cpu"):
    return torch.softmax(logits_of(rows, vocab, seed, device), -1)


def kept_ids(line, top_k=None, top_p=None, min_p=None, joint=False):
    """The tokens of one row that the definition keeps, in float64."""
    line = line.double().cpu()
    above = [line[line > each] for each in line]
    chosen = torch.ones(len(line), dtype=torch.bool)
    if top_k is not None:
        chosen &= torch.tensor([len(each) < top_k for each in above])
    if top_p is not None and top_p < 1:
        whole = 1.0 if joint or top_k is None else line[chosen].sum()
        fits = [each.sum() < torch.tensor(top_p, dtype=torch.float32).double() * whole for each in above]
        chosen &= torch.stack(fits) | (line == line.max())
    if min_p is not None:
        chosen &= line >= (line.max().float() * torch.tensor(min_p, dtype=torch.float32)).double()
    return chosen


def renormed(line, chosen):
    wide = line.double().cpu() * chosen
    return wide / wide.sum()


def misfit(counts, probs):
    """Chi-square of counts against probabilities, and its degrees of freedom; the unlikely are one class."""
    expected = probs.double() * counts.sum()
    rare = expected < 8
    assert not counts[probs == 0].any()
    observed = torch.cat([counts[~rare].double(), counts[rare].sum().double()[None]])
    reference = torch.cat([expected[~rare], expected[rare].sum()[None]])
    observed, reference = observed[reference > 0], reference[reference > 0]
    return float(((observed - reference) ** 2 / reference).sum()), len(reference) - 1


def assert_drawn_from(samples, probs):
    assert samples.min() >= 0
    result, freedom = misfit(samples.cpu().long().bincount(minlength=len(probs)), probs.cpu())
    # the cube root is nearly normal (Wilson and Hilferty, 1931); 3.3 deviations are exceeded once in 2000 times
    deviation = ((result / freedom) ** (1 / 3) - 1 + 2 / (9 * freedom)) / math.sqrt(2 / (9 * freedom))
    assert deviation < 3.3, (result, freedom)


def test_softmax_divides_by_a_temperature_of_all_rows_or_of_each(device):
    logits = logits_of(4, device=device)
    each = torch.tensor([0.5, 1.0, 3.0, 0.0], device=device)
    expected = torch.softmax(logits.double() / torch.tensor([0.5, 1.0, 3.0, math.inf], device=device)[:, None], -1)
    torch.testing.assert_close(sampling.softmax(logits, each).double(), expected, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(sampling.softmax(logits, 3.0)[2], sampling.softmax(logits, each)[2])
    torch.testing.assert_close(sampling.softmax(logits), torch.softmax(logits, -1))
    assert sampling.softmax(logits.half(), enable_pdl=True).dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_top_k_keeps_ties_of_the_last(dtype, backend):
    logits = logits_of(3, device=backend, dtype=dtype)
    logits[1, 40:60] = 3.0
    logits[2, :290] = -math.inf
    for top_k in (1, 7, VOCAB, torch.tensor([3, 10, 400], device=backend), torch.tensor([2, 1, 20], device=backend)):
        masked = sampling.top_k_mask_logits(logits, top_k)
        ks = top_k.tolist() if isinstance(top_k, torch.Tensor) else [top_k] * 3
        chosen = torch.stack([kept_ids(line, k) for line, k in zip(logits, ks, strict=True)]).to(backend)
        assert masked.dtype == dtype
        assert torch.equal(masked, logits.masked_fill(~chosen, -math.inf))
        probs = torch.softmax(logits.float(), -1).to(dtype)
        chosen = torch.stack([kept_ids(line, k) for line, k in zip(probs, ks, strict=True)])
        expected = torch.stack([renormed(line, part) for line, part in zip(probs, chosen, strict=True)])
        result = sampling.top_k_renorm_probs(probs, top_k, is_deterministic=True)
        assert result.dtype == dtype
        close = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(result.double().cpu(), expected, atol=close * 0.1, rtol=close)


def test_top_p_keeps_exactly_the_most_likely_tokens(backend):
    probs = probs_of(6, device=backend)
    probs[1] = torch.tensor([0.5, 0.25, 0.125, 0.125] + [0.0] * (VOCAB - 4), device=backend)
    probs[2] = 1.0 / VOCAB
    for top_p in (0.0, 0.5, 0.75, 0.9, 1.0, torch.tensor([0.1, 0.5, 0.3, 0.99, 0.0, 0.7], device=backend)):
        ps = top_p.tolist() if isinstance(top_p, torch.Tensor) else [top_p] * 6
        chosen = torch.stack([kept_ids(line, top_p=p) for line, p in zip(probs, ps, strict=True)])
        result = sampling.top_p_renorm_probs(probs, top_p)
        expected = torch.stack([renormed(line, part) for line, part in zip(probs, chosen, strict=True)])
        assert torch.equal(result.cpu() > 0, expected > 0)
        torch.testing.assert_close(result.double().cpu(), expected, atol=1e-7, rtol=1e-5)


FILTERS = [
    ("sampling_from_probs", {}),
    ("top_k_sampling_from_probs", {"top_k": 9}),
    ("top_p_sampling_from_probs", {"top_p": 0.6}),
    ("min_p_sampling_from_probs", {"min_p": 0.1}),
    ("top_k_top_p_sampling_from_probs", {"top_k": 9, "top_p": 0.7}),
    ("top_k_top_p_sampling_from_probs", {"top_k": 9, "top_p": 0.7, "filter_apply_order": "joint"}),
]


@pytest.mark.parametrize(("name", "filters"), FILTERS)
@pytest.mark.parametrize("as_tensors", [False, True])
def test_draws_have_the_distribution_that_the_filters_leave(name, filters, as_tensors):
    count = 3000
    probs = probs_of(3, 40, seed=5, device=DEVICE)
    arguments = dict(filters)
    if as_tensors:
        for parameter in set(arguments) - {"filter_apply_order"}:
            arguments[parameter] = torch.tensor([1, arguments[parameter], 1], device=DEVICE)
    indices = torch.ones(count, dtype=torch.int64, device=DEVICE)
    samples, valid = getattr(sampling, name)(probs, **arguments, indices=indices, seed=11, offset=2, return_valid=True)
    assert samples.dtype == torch.int64
    assert valid.all()
    order = {"joint": filters.get("filter_apply_order") == "joint"}
    only = {parameter: value for parameter, value in filters.items() if parameter != "filter_apply_order"}
    assert_drawn_from(samples, renormed(probs[1], kept_ids(probs[1], **only, **order)))


@pytest.mark.parametrize("order", ["top_k_first", "joint"])
def test_draws_from_logits_have_that_of_their_softmax(order):
    count = 3000
    logits = logits_of(2, 40, seed=6, device=DEVICE)
    indices = torch.ones(count, dtype=torch.int32, device=DEVICE)
    seeds = {"seed": 3, "offset": 8}
    probs = torch.softmax(logits[1].double(), -1)
    if order == "joint":
        assert_drawn_from(sampling.sampling_from_logits(logits, indices, **seeds), probs)
    samples = sampling.top_k_top_p_sampling_from_logits(logits, 12, 0.8, indices, order, **seeds)
    assert samples.dtype == torch.int32
    assert_drawn_from(samples, renormed(probs, kept_ids(probs, 12, 0.8, joint=order == "joint")))


def test_interpreted_kernels_sample_the_same_tokens(monkeypatch):
    probs, indices = probs_of(5, seed=9), torch.arange(10) % 5

    def drawn():
        seeds = {"indices": indices, "seed": torch.arange(10) * 2**40 - 7, "offset": torch.arange(10) * 1000}
        tokens = [getattr(sampling, name)(probs, **filters, **seeds).tolist() for name, filters in FILTERS]
        return [*tokens, sampling.sampling_from_logits(logits_of(5), **seeds).tolist()]

    tokens = drawn()
    monkeypatch.setattr(functions, "filter_probs", filter_probs_triton)
    monkeypatch.setattr(functions, "draw_tokens", draw_tokens_triton)
    assert drawn() == tokens


def test_rows_without_a_choice_are_not_valid(backend):
    probs = probs_of(6, 20, device=backend)
    probs[1], probs[2, 3], probs[3, 4], probs[4, :19] = 0.0, math.nan, math.inf, -1.0
    indices = torch.tensor([0, 1, 2, 3, 4, 5, 6, -1], device=backend)
    for name, filters in FILTERS:
        samples, valid = getattr(sampling, name)(probs, **filters, indices=indices, seed=1, offset=1, return_valid=True)
        assert valid.tolist() == [True, False, False, False, True, True, False, False], name
        assert samples[4] == 19
        assert not samples[~valid].any()
    with pytest.raises(ValueError, match="probs.*check_nan"):
        sampling.sampling_from_probs(probs, check_nan=True)
    with pytest.raises(ValueError, match="logits.*check_nan"):
        sampling.sampling_from_logits(probs, check_nan=True)


def test_draws_are_functions_of_seed_offset_output_and_row_alone():
    probs = probs_of(1, device=DEVICE).expand(64, VOCAB)

    def drawn(seed, offset):
        return sampling.sampling_from_probs(probs, seed=seed, offset=offset).tolist()

    def words(*values):
        return torch.tensor(values, device=DEVICE)

    first = drawn(5, 9)
    assert first == drawn(5, 9) == drawn(words(5), words(9)) == drawn(words(*[5] * 64), words(*[9] * 64))
    assert first == drawn(words(5).view(torch.uint64), words(9).view(torch.uint64))
    assert len(set(first)) > 20  # outputs of one seed have noise of their own
    others = [drawn(6, 9), drawn(5, 10), drawn(5, 9 + 2**31), drawn(5, 9 + 2**40), drawn(2**64 - 1, 9)]
    assert len({tuple(each) for each in [first, *others]}) == 6
    assert drawn(2**64 - 1, 9) == drawn(-1, 9)
    mixed = drawn(words(*[5] * 63, 6), words(*[9] * 64))
    assert mixed[:63] == first[:63]


def test_without_a_seed_the_generator_gives_one():
    probs = probs_of(64, device=DEVICE)
    draws = [
        sampling.top_p_sampling_from_probs(
            probs, 0.95, generator=torch.Generator(DEVICE).manual_seed(seed), deterministic=True
        ).tolist()
        for seed in (1, 1, 2)
    ]
    assert draws[0] == draws[1] != draws[2]
    torch.manual_seed(4)
    drawn = [sampling.sampling_from_logits(probs).tolist() for _ in range(2)]
    torch.manual_seed(4)
    assert drawn[0] == sampling.sampling_from_logits(probs).tolist() != drawn[1]


def test_captured_sampling_reads_seeds_and_filters_on_the_device(device):
    slots = [
        Slot("probs", ("batch", VOCAB), torch.float32, pad=0.0),
        Slot("top_k", ("batch",), torch.int32, pad=1),
        Slot("top_p", ("batch",), torch.float32, pad=1.0),
        Slot("seed", ("batch",), torch.int64, pad=0),
        Slot("offset", ("batch",), torch.int64, pad=0),
        Slot("out", ("batch",), torch.int32, pad=0),
    ]
    buffers = StepBuffers(slots, max_batch_size=4, device=device)

    def arguments(batch):
        return batch.probs, batch.top_k, batch.top_p

    def step(batch):
        sampled = sampling.top_k_top_p_sampling_from_probs(*arguments(batch), seed=batch.seed, offset=batch.offset)
        batch.out.copy_(sampled)

    graphs = GraphManager(step, buffers, BucketLadder([4], 4), constants=[])
    with contextlib.closing(graphs):
        graphs.capture(progress=False)
        observed = set()
        for number in range(3):
            buffers.set_live_rows(4)
            buffers.probs.copy_(probs_of(4, seed=number)), buffers.seed.fill_(number)
            buffers.top_k.copy_(torch.tensor([1, 5, 40, 300])), buffers.top_p.copy_(torch.tensor([1, 0.5, 0.9, 1]))
            buffers.offset.copy_(torch.arange(4) * 10 + number)
            graphs.replay(4)
            replayed = buffers.out.tolist()
            expected = sampling.top_k_top_p_sampling_from_probs(
                *arguments(buffers), seed=buffers.seed, offset=buffers.offset
            )
            assert replayed == expected.tolist()
            assert replayed[0] == buffers.probs[0].argmax().item()
            observed.add(tuple(replayed))
        assert len(observed) == 3


def test_accepted_drafts_and_the_token_behind_them_are_distributed_as_the_target():
    count, vocab, drafts = 6000, 12, 2
    draft, target = (probs_of(drafts + 1, vocab, seed=seed, device=DEVICE) for seed in (1, 2))
    draft_ids = torch.multinomial(draft[:drafts], count, True, generator=torch.Generator(DEVICE).manual_seed(5)).T
    accepted, emitted = (torch.full((count,), 3, dtype=torch.int32, device=DEVICE) for _ in range(2))
    tokens, accepted_num, emitted_num = sampling.chain_speculative_sampling(
        draft[:drafts].expand(count, -1, -1), draft_ids, target.expand(count, -1, -1), accepted, emitted, seed=3,
        offset=1,
    )  # fmt: skip
    assert accepted_num is accepted
    assert emitted_num is emitted
    accepted, emitted = accepted - 3, emitted - 3
    assert tokens.dtype == torch.int32
    assert (accepted >= emitted).all()
    assert ((tokens != -1).sum(1) == emitted + 1).all()
    for position in range(drafts):
        chosen = emitted > position
        assert torch.equal(tokens[chosen, position], draft_ids[chosen, position].int())
    for position in range(drafts + 1):
        reached = emitted >= position
        assert_drawn_from(tokens[reached, position], target[position])
    # a draft is accepted by itself with the probability that the distributions share
    share = torch.minimum(draft[:drafts], target[:drafts]).sum(-1).sum().item()
    assert abs(accepted.float().mean().item() - share) < 5 * math.sqrt(drafts / 4 / count)


def test_equal_distributions_accept_every_draft(device):
    probs = probs_of(3, 9, device=device).unsqueeze(0)
    ids = torch.tensor([[2, 5]], device=device)
    tokens, accepted, emitted = sampling.chain_speculative_sampling(probs[:, :2], ids, probs, seed=1, offset=0)
    assert tokens[0, :2].tolist() == [2, 5]
    assert accepted.tolist() == emitted.tolist() == [2]


PROBS = probs_of(3, 10)


@pytest.mark.parametrize(
    ("call", "names"),
    [
        (lambda s: s.sampling_from_probs(PROBS[0]), "probs must be .*rows, vocab"),
        (lambda s: s.sampling_from_probs(PROBS.double()), "probs must be"),
        (lambda s: s.sampling_from_probs([[0.5, 0.5]]), "probs must be a tensor"),
        (lambda s: s.sampling_from_logits(PROBS[:, :0]), "logits must have at least one token"),
        (lambda s: s.sampling_from_probs(PROBS, torch.zeros(2)), "indices"),
        (lambda s: s.sampling_from_probs(PROBS, seed=1, offset=torch.zeros(1).long()), "seed and offset must both"),
        (lambda s: s.sampling_from_probs(PROBS, seed=torch.zeros(2).long(), offset=torch.zeros(1).long()), "seed"),
        (lambda s: s.sampling_from_probs(PROBS, seed=torch.zeros(1), offset=torch.zeros(1)), "seed must be int64"),
        (lambda s: s.sampling_from_probs(PROBS, seed=2**64, offset=0), "seed must be an integer of 64 bits"),
        (lambda s: s.sampling_from_probs(PROBS, seed=1, offset=0.5), "offset must be an integer"),
        (lambda s: s.top_k_sampling_from_probs(PROBS, 0), "top_k must be in 1.*0"),
        (lambda s: s.top_k_renorm_probs(PROBS, 2.5), "top_k"),
        (lambda s: s.top_k_mask_logits(PROBS, torch.ones(2).int()), r"top_k must be .*\[3\]"),
        (lambda s: s.top_k_mask_logits(PROBS, torch.ones(3)), "top_k must be int32"),
        (lambda s: s.top_p_sampling_from_probs(PROBS, 1.5), "top_p must be in 0..1, got 1.5"),
        (lambda s: s.top_p_renorm_probs(PROBS, math.nan), "top_p"),
        (lambda s: s.top_p_renorm_probs(PROBS, torch.ones(3, 1)), "top_p"),
        (lambda s: s.min_p_sampling_from_probs(PROBS, -0.1), "min_p must be in 0..1"),
        (lambda s: s.top_k_top_p_sampling_from_probs(PROBS, 1, 1.0, filter_apply_order="both"), "filter_apply_order"),
        (lambda s: s.top_k_top_p_sampling_from_logits(PROBS, 1, 2.0), "top_p must be in 0..1, got 2.0"),
        (lambda s: s.softmax(PROBS, torch.ones(2)), "temperature"),
        (lambda s: s.softmax(PROBS, "1"), "temperature"),
        (lambda s: s.chain_speculative_sampling(PROBS, None, PROBS), "draft_probs"),
        (lambda s: s.chain_speculative_sampling(PROBS[None, :2], PROBS[None, :2, 0], PROBS[None]), "draft_token_ids"),
        (lambda s: s.chain_speculative_sampling(PROBS[None], torch.zeros(1, 3).long(), PROBS[None]), "target_probs"),
    ],
)  # fmt: skip
def test_invalid_arguments_raise_by_name(call, names):
    with pytest.raises(ValueError, match=names):
        call(sampling)
