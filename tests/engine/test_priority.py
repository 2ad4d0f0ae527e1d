"""Priority: the lowest is admitted first and gives way last; equals are served as they came."""

import random
from collections.abc import Callable

import pytest

from graphdecode import LLM, ArgumentError, Request, SamplingParams

MakeLLM = Callable[..., LLM]


def finishing_order(llm: LLM, priorities: list[int]) -> list[int]:
    """Hand in requests with room for one at a time; return the order in which they ended."""
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    ids = [
        llm.engine.add(Request([97 + place], params, priority=priority)) for place, priority in enumerate(priorities)
    ]
    ended = []
    while llm.engine.has_work:
        ended += [event.request_id for event in llm.engine.step() if event.finish_reason is not None]
    return [ids.index(request_id) for request_id in ended]


def test_the_lowest_is_admitted_first_and_equals_as_they_came(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=1)
    assert finishing_order(llm, [0, 0, 0]) == [0, 1, 2]
    assert finishing_order(llm, [3, 0, -1, 0, -(2**63), 2**63 - 1]) == [4, 2, 1, 3, 0, 5]


def test_when_pages_run_out_the_highest_gives_way_though_it_came_first(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=3, page_size=4, total_num_pages=12, prefix_cache=False)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate([[97], [98], [99]], params, use_tqdm=False, priority=[5, 0, 0])
    gave_way = [output.metrics.num_preemptions for output in outputs]
    assert gave_way[0] > 0
    assert gave_way[1:] == [0, 0]
    outputs = llm.generate([[97], [98], [99]], params, use_tqdm=False)
    assert outputs[2].metrics.num_preemptions > 0
    assert outputs[0].metrics.num_preemptions == 0


def test_law_9_priorities_change_no_answer(make_llm: MakeLLM) -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(97, 123) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=20, ignore_eos=True) for i in range(12)]
    llm = make_llm(max_batch_size=6, page_size=4, total_num_pages=40)

    def tokens(priority: list[int] | None) -> list[list[int]]:
        outputs = llm.generate(prompts, params, use_tqdm=False, priority=priority)
        return [output.outputs[0].token_ids for output in outputs]

    expected = tokens(None)
    for _ in range(3):
        assert tokens([rng.randint(-2, 2) for _ in prompts]) == expected
    assert llm.num_preemptions > 0


def test_a_stream_with_a_low_priority_overtakes(make_llm: MakeLLM) -> None:
    llm = make_llm(max_batch_size=1)
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    slow, fast = llm.stream([97], params), llm.stream([98], params, priority=-1)
    "".join(fast)
    assert slow.request.outputs[0].finish_reason is None
    assert len("".join(slow)) == 3


@pytest.mark.parametrize("priority", [[1, 2], [1.5], ["a"], [True], [2**63]], ids=str)
def test_what_is_no_priority_is_refused(make_llm: MakeLLM, priority: list) -> None:
    llm = make_llm(max_batch_size=1, backend="eager")
    with pytest.raises(ArgumentError, match=r"1 prompts and 2 priorities|priority must be a 64-bit integer"):
        llm.generate("a", priority=priority)
    assert not llm.engine.has_work
