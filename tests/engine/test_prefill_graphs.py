"""Short prompts replay graphs: the same answers, and no graph where there can be none."""

import pytest

from graphdecode import LLM, BucketConfig, Engine, Request, SamplingParams
from graphdecode.engine.loading import make_runner
from graphdecode.engine.runner import Runner
from graphdecode.graphs import CaptureError
from graphdecode.graphs.backend import Backend
from graphdecode.models import load_model

LENGTHS = (1, 2, 3, 8, 9, 10, 16, 17, 33, 63, 64, 65, 66, 90)  # of prompts, whose last token no pass takes
CONFIG = BucketConfig(max_batch_size=4, max_sequence_length=128, page_size=8)


def runner_with(**keywords: object) -> Runner:
    return make_runner(load_model("demo", device="cpu"), CONFIG, **keywords)


def answers_of(runner: Runner) -> list[list[int]]:
    """The tokens of prompts that come together, so that passes hold chunks of several."""
    engine = Engine(runner)
    engine.graphs.capture(progress=False, kinds=["steps"])
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    prompts = [[97 + (7 * index + length) % 26 for index in range(length)] for length in LENGTHS]
    told: dict[int, list[int]] = {engine.add(Request(prompt, params)): [] for prompt in prompts}
    while engine.has_work:
        for event in engine.step():
            told[event.request_id] += event.token_ids
    return list(told.values())


def replays_of(runner: Runner) -> int:
    return sum(bucket.replays for bucket in runner.graphs.report("prompts").buckets)


def captured_for_prompts(runner: Runner) -> list[int]:
    """The tokens of passes that have graphs."""
    return [bucket.bucket for bucket in runner.graphs.report("prompts").buckets if bucket.state == "captured"]


@pytest.mark.parametrize("budget", [20, 64, 512])
def test_answers_are_the_same_with_graphs_and_without(budget: int) -> None:
    without, runner = (runner_with(max_prefill_tokens=budget) for _ in range(2))
    expected = answers_of(without)
    runner.graphs.capture(progress=False, kinds=["prompts"])
    assert answers_of(runner) == expected
    assert replays_of(without) == 0
    assert replays_of(runner) > 0
    assert captured_for_prompts(runner)[-1] == min(budget, 64)
    runner.close()
    assert captured_for_prompts(runner) == []


def test_a_prompt_that_is_scored_is_computed_without_a_graph() -> None:
    with LLM("demo", max_batch_size=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate(["12+30="], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        assert replays_of(llm.engine.runner) == 0
        assert llm.engine.runner.reports()["prompts"].buckets[-1].eager_runs == 1
        llm.generate(["12+31="], SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        assert replays_of(llm.engine.runner) == 1


@pytest.mark.parametrize("keywords", [{"batch_invariant": True}, {"backend": "eager"}])
def test_there_are_no_graphs_where_nothing_is_captured(keywords: dict[str, object]) -> None:
    runner = runner_with(**keywords)
    runner.graphs.capture(progress=False)
    assert captured_for_prompts(runner) == []


def test_prompts_are_served_without_graphs_where_these_cannot_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers_of(runner_with())
    runner = runner_with()

    def refused(*_arguments: object) -> None:
        raise CaptureError("failed", "aten.mm", "not today")

    with monkeypatch.context() as patch:
        patch.setattr(Backend, "captured", refused)
        with pytest.warns(RuntimeWarning, match="prompts are computed without graphs: .*not today"):
            runner.graphs.capture(progress=False, kinds=["prompts"])
    assert captured_for_prompts(runner) == []
    assert answers_of(runner) == expected
