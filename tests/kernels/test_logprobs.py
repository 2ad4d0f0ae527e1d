import pytest
import torch
from compiled_kernels import NATIVE
from sampling_rows import CAPACITY, logprob_outputs

from graphdecode.kernels.native.registration import versions
from graphdecode.kernels.sampling.logprobs import token_logprobs_triton
from graphdecode.kernels.sampling.sampling_slots import FLAG_LOGPROBS, FLAG_SAMPLE, LogprobOutputs

MOST = CAPACITY.max_logprobs
native_token_logprobs = versions("token_logprobs").native
token_logprobs_torch = versions("token_logprobs").torch


@pytest.fixture(params=["torch", NATIVE, "triton"])
def compute(request, device):
    """Log-probabilities by one of the versions; a vocabulary of more than 16 ids takes several of Triton's blocks."""

    def run(logits, sampled, flags, live=None, wanted=None):
        rows = logits.shape[0]
        live_rows = torch.tensor([rows if live is None else live], dtype=torch.int32)
        wanted = torch.full((rows,), MOST, dtype=torch.int32) if wanted is None else wanted
        where = device if request.param == "triton" else "cpu"
        given = [t.to(where) for t in (logits, sampled, live_rows, torch.tensor(flags, dtype=torch.int32), wanted)]
        outputs = [t.to(where) for t in logprob_outputs(rows)]
        if request.param == "triton":
            token_logprobs_triton(LogprobOutputs(*outputs), *given, block=16)
        elif request.param == "native":
            native_token_logprobs(*outputs, *given)()
        else:
            token_logprobs_torch(*outputs, *given)
        return [t.cpu() for t in outputs]

    return run


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_they_are_the_log_softmax_of_the_raw_logits(compute, dtype):
    logits = (torch.randn(3, 50, generator=torch.Generator().manual_seed(1)) * 4).to(dtype)
    sampled = torch.tensor([0, 49, 17])
    chosen, _, top, ids = compute(logits, sampled, [FLAG_LOGPROBS] * 3)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(chosen.double(), expected[torch.arange(3), sampled], rtol=1e-5, atol=1e-5)
    values, _ = expected.sort(descending=True, stable=True)
    torch.testing.assert_close(top.double(), values[:, :MOST], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(expected.gather(1, ids.long()), values[:, :MOST])
    assert all(len(set(row)) == MOST for row in ids.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_rank_is_the_place_among_all_tokens_the_lower_id_first_on_ties(compute, dtype):
    logits = (torch.randn(6, 83, generator=torch.Generator().manual_seed(5)) * 2).round().to(dtype)
    logits[5] = 1.0
    sampled = torch.tensor([0, 82, 17, 40, 81, 33])
    _, ranks, _, _ = compute(logits, sampled, [FLAG_LOGPROBS] * 6)
    order = logits.double().sort(descending=True, stable=True).indices
    assert ranks.tolist() == [order[row].tolist().index(int(token)) + 1 for row, token in enumerate(sampled)]
    assert ranks[5] == 34


def test_each_row_gets_as_many_as_it_wants_and_what_is_behind_them_stays(compute):
    logits = torch.randn(5, 60, generator=torch.Generator().manual_seed(6))
    wanted = torch.tensor([0, 1, 7, MOST, MOST + 5], dtype=torch.int32)
    _, _, top, ids = compute(logits, torch.arange(5), [FLAG_LOGPROBS] * 5, wanted=wanted)
    order = logits.sort(descending=True, stable=True).indices
    for row, count in enumerate([0, 1, 7, MOST, MOST]):
        assert ids[row].tolist() == [*order[row, :count].tolist(), *[-7] * (MOST - count)]
        assert (top[row, :count] < 0).all()
        assert (top[row, count:] == 7.0).all()


def test_one_of_many_is_the_same_float_as_in_a_list(compute):
    logits = torch.randn(3, 100, generator=torch.Generator().manual_seed(7)) * 5
    sampled = logits.argmax(1)
    alone, *_ = compute(logits, sampled, [FLAG_LOGPROBS] * 3, wanted=torch.zeros(3, dtype=torch.int32))
    listed, ranks, top, _ = compute(logits, sampled, [FLAG_LOGPROBS] * 3)
    assert alone.tolist() == listed.tolist() == top[:, 0].tolist()
    assert ranks.tolist() == [1, 1, 1]


def test_only_rows_that_want_them_are_written(compute):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2))
    logits[3] = torch.nan
    outputs = compute(logits, torch.tensor([1, 2, 3, 2**40]), [0, FLAG_LOGPROBS, FLAG_SAMPLE, -1], live=3)
    for output, untouched in zip(outputs, logprob_outputs(4), strict=True):
        assert torch.equal(output[[0, 2, 3]], untouched[[0, 2, 3]])
        assert not torch.equal(output[1], untouched[1])


def test_ties_go_to_the_lower_id(compute):
    logits = torch.zeros(1, 60)
    logits[0, [50, 3, 33, 18]] = 2.0
    _, _, _, ids = compute(logits, torch.tensor([0]), [FLAG_LOGPROBS])
    others = [token for token in range(60) if token not in (3, 18, 33, 50)]
    assert ids[0].tolist() == [3, 18, 33, 50] + others[:16]


def test_the_tail_is_marked_where_fewer_tokens_are_possible(compute):
    small = torch.randn(1, 12, generator=torch.Generator().manual_seed(3))
    _, _, top, ids = compute(small, torch.tensor([4]), [FLAG_LOGPROBS])
    assert sorted(ids[0, :12].tolist()) == list(range(12))
    assert (top[0, 12:] == -torch.inf).all()
    assert (ids[0, 12:] == -1).all()
    masked = torch.full((1, 40), -torch.inf)
    masked[0, [35, 2]] = torch.tensor([1.0, 0.0])
    chosen, _, top, ids = compute(masked, torch.tensor([35]), [FLAG_LOGPROBS])
    assert ids[0].tolist() == [35, 2] + [-1] * 18
    assert (top[0, 2:] == -torch.inf).all()
    torch.testing.assert_close(chosen[0].item(), masked[0].log_softmax(-1)[35].item())


@pytest.mark.parametrize("wrong", [-4, -1, 50, 2**40])
def test_what_is_no_token_has_no_probability_and_its_neighbours_keep_theirs(compute, wrong):
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(5))
    calm = compute(logits, torch.tensor([7, 8, 9]), [FLAG_LOGPROBS] * 3)
    logits[1, 20:] = torch.nan
    outputs = compute(logits, torch.tensor([7, wrong, 9]), [FLAG_LOGPROBS] * 3)
    assert (outputs[0][1], outputs[1][1]) == (-torch.inf, 0)
    for mine, before in zip(outputs, calm, strict=True):
        assert torch.equal(mine[[0, 2]], before[[0, 2]])


def test_the_operator_passes_opcheck(device):
    logits = torch.randn(2, 30, generator=torch.Generator().manual_seed(4))
    flags = torch.tensor([FLAG_LOGPROBS, 0], dtype=torch.int32)
    live = torch.tensor([2], dtype=torch.int32)
    arguments = (*logprob_outputs(2), logits, torch.tensor([3, 4]), live, flags, torch.full((2,), 3).int())
    torch.library.opcheck(torch.ops.graphdecode.token_logprobs.default, tuple(t.to(device) for t in arguments))
