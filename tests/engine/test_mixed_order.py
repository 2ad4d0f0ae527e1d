"""Steps that take prompts along, on a device that runs late: the tokens are those of an engine that waits.

More orders than these are tried by `GRAPHDECODE_LAZY_SEEDS=200 pytest tests/engine/test_mixed_order.py -k queued`.
"""

from __future__ import annotations

import os
import random
from functools import partial
from typing import Any

import pytest
from lazy_device import installed, lazy_runner
from lazy_visit import SHARED, Answer, Visit, answered, assert_found
from planted import Fault

from graphdecode import BucketConfig, Engine, EngineConfig, Request, SamplingParams
from graphdecode.buckets import StepShape
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.loop import EngineLoop
from graphdecode.engine.prompt_scheduler import PromptScheduler
from graphdecode.engine.prompts import Prompts
from graphdecode.engine.runner import Launch, LaunchPlan, Runner
from graphdecode.engine.steps import StepTokens
from graphdecode.engine.steps import step as step_module
from graphdecode.models import Model, load_model

SEEDS = 6
SEEDS_FOR_A_FAULT = 25
REQUESTS = 20
ROWS, LENGTH, PAGE = 4, 48, 4
PAGES = 17  # of 48 for four full rows: some have to give way
FEW_TOKENS = (8, 16)  # of the graphs; some chunks are more than that


def made_requests() -> list[Request]:
    chosen, requests = random.Random(4), []
    for number in range(REQUESTS):
        prompt = SHARED[: chosen.choice([0, 8])] + [chosen.randrange(97, 123) for _ in range(chosen.randint(1, 18))]
        options: dict = {"temperature": chosen.choice([0.0, 1.5]), "seed": number}
        if number % 3 == 0:
            options |= {"repetition_penalty": 1.4}
        params = SamplingParams(max_tokens=chosen.randint(1, 20), ignore_eos=True, **options)
        requests.append(Request(prompt, params, grammar="a letter" if number % 8 == 3 else None))
    return requests


REQUESTED = made_requests()


def settings(chosen: random.Random) -> EngineConfig:
    buckets = BucketConfig(
        max_batch_size=ROWS,
        max_sequence_length=LENGTH,
        page_size=PAGE,
        total_num_pages=chosen.choice([PAGES, 4 * LENGTH // PAGE]),
        batch_sizes=(1, 2, ROWS),
        steps_per_launch=chosen.choice([1, 1, 3]),
    )
    return EngineConfig(buckets, max_prefill_tokens=chosen.choice([5, 64]), prefix_cache=chosen.random() < 0.5)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo", device="cpu", dtype="float32")


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Answer]:
    """What each request is answered with on a CPU, where prompts go by themselves and nothing runs late."""
    buckets = BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH, page_size=PAGE)
    engine = Engine(make_runner(model, buckets))
    answers = answered(engine, REQUESTED)
    assert not engine.stats.mixed_steps
    return answers


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step_module.MIXED_TOKENS, "cuda", FEW_TOKENS)


def ready(runner: Runner) -> Engine:
    engine = Engine(runner)
    runner.graphs.capture(progress=False)
    assert "mixed" in runner.reports()
    return engine


def serve(model: Model, expected: list[Answer], seed: int) -> int:
    """Serve requests that come and go as a seed says, and compare every answer; return how many steps were mixed."""
    chosen = random.Random(seed)
    with (
        installed(seed, has_while_nodes=chosen.random() < 0.5) as streams,
        lazy_runner(streams, model, settings(chosen)) as runner,
    ):
        engine = ready(runner)
        Visit(engine, REQUESTED, expected, chosen).run_on(streams)
        return engine.stats.mixed_steps


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRAPHDECODE_LAZY_SEEDS", SEEDS))))
def test_whenever_the_device_runs_what_is_queued_the_tokens_are_the_same(model, expected, seed):
    assert serve(model, expected, seed)


def test_a_chunk_goes_along_while_the_step_with_the_last_one_is_under_way(model, monkeypatch):
    unread: list[bool] = []  # of each launch whether it takes chunks along
    config = EngineConfig(BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH), max_prefill_tokens=5)
    with installed(0) as streams, lazy_runner(streams, model, config) as runner:
        launch, read, both_mixed = runner.launch, runner.read, []

        def noting_launch(plan: LaunchPlan, meanwhile: Any = None) -> Launch:
            both_mixed.append(bool(plan.chunks) and unread == [True])
            unread.append(bool(plan.chunks))
            return launch(plan, meanwhile)

        def noting_read(*arguments: Any, **options: Any) -> list[StepTokens]:
            unread.pop(0)
            return read(*arguments, **options)

        monkeypatch.setattr(runner, "launch", noting_launch)
        monkeypatch.setattr(runner, "read", noting_read)
        engine = ready(runner)
        for prompt, answer in ((1, 40), (20, 1)):
            engine.add(Request([100] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        engine.close()
    assert any(both_mixed)


FAULTS = [
    # chunks
    Fault(Prompts, "stage", "self.buffers.staging(_CHUNKS)", "self.buffers._blocks[_CHUNKS].arrays"),
    Fault(Prompts, "stage", 'staged["rows"][span] = row', 'staged["rows"][span] = 0'),
    Fault(Runner, "stage", "self.prompts.stage", "with torch.cuda.stream(torch.cuda.Stream()): self.prompts.stage"),
    # the engine's loop
    Fault(LaunchPlan, "of_chunks", ", 1, chunks", ", 3, chunks"),  # the rings have one entry of a mixed step
    Fault(EngineLoop, "_plan_launch", "return LaunchPlan", "if not self._in_flight: return LaunchPlan"),
    Fault(
        PromptScheduler,
        "stage_mixed",
        "self._mixed, self.chunks = self.chunks, []",
        "self._mixed, self.chunks = [], []",
    ),
    # the passes
    Fault(StepShape, "holds", "and self.prompt_tokens >= wanted.prompt_tokens", ""),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(model, expected, monkeypatch, fault):
    fault.plant(monkeypatch)
    assert_found(partial(serve, model, expected), SEEDS_FOR_A_FAULT)
