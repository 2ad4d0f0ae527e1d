"""The Runner, its rings and the engine's loop on a device that runs late: the tokens are those of an eager engine.

More orders than these are tried by `GRAPHDECODE_LAZY_SEEDS=200 pytest tests/engine/test_stream_order.py -k queued`.
"""

from __future__ import annotations

import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from faults import Fault, dropped
from lazy_device import installed, lazy_runner
from lazy_stream import Event, LazyStreams
from lazy_visit import REFUSAL_SHARE, SHARED, Answer, Visit, answered

from graphdecode import BucketConfig, Engine, EngineConfig, Request, SamplingParams
from graphdecode.buckets import StepShape
from graphdecode.buffers import StagingBlock
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.grammar_masks import GrammarMasks
from graphdecode.engine.loop import EngineLoop
from graphdecode.engine.page_reservation import PageReservation
from graphdecode.engine.prompt_scheduler import PromptScheduler
from graphdecode.engine.prompts import PromptChunk, Prompts
from graphdecode.engine.runner import Launch, LaunchPlan, Runner
from graphdecode.engine.scheduler import Scheduler
from graphdecode.engine.steps import DecodeStep, decode, step
from graphdecode.graphs import step_graph
from graphdecode.graphs.cuda import CudaCapture
from graphdecode.models import Model, load_model

SEEDS = 7
SEEDS_FOR_A_FAULT = 25
ROWS, LENGTH, PAGE = 4, 48, 4
BUCKETS = (1, 2, ROWS)
FEW_TOKENS = (8, 16)  # of the graphs of mixed steps; some chunks are more than that


def make_requests(seed: int, count: int, longest: int, *, has_more_options: bool) -> list[Request]:
    rng, requests = random.Random(seed), []
    for number in range(count):
        prompt = SHARED[: rng.choice([0, 0, 8] if has_more_options else [0, 8])] + [
            rng.randrange(97, 123) for _ in range(rng.randint(1, longest))
        ]
        options: dict = {"temperature": rng.choice([0.0, 1.5]), "seed": number}
        if number % 3 == 0:
            options |= {"repetition_penalty": 1.4}
        bad_words: tuple = ()
        if has_more_options:
            options |= {"frequency_penalty": 0.5} if number % 3 == 0 else {}
            options |= {"logprobs": 3} if number % 4 == 0 else {}
            options |= {"logit_bias": {101: 4.0, 110: 4.0}} if number % 5 == 0 else {}
            options |= {"stop_token_ids": [101, 111, 116]} if number % 7 == 0 else {}
            bad_words = ((101,), (110, 101), (118, 118)) if number % 6 == 1 else ()
        params = SamplingParams(max_tokens=rng.randint(1, 20), ignore_eos=True, **options)
        grammar = "a letter" if number % 8 == 3 else None
        requests.append(Request(prompt, params, bad_words_token_ids=bad_words, grammar=grammar))
    return requests


@dataclass(frozen=True)
class Served:
    """Requests, the engines that serve them, and the answers of an engine that waits for each step.

    `mixes`: steps take prompts along; else the bits do not depend on the batch.
    """

    mixes: bool
    model: Model
    requests: Sequence[Request]
    expected: Sequence[Answer]

    @classmethod
    def of(cls, *, mixes: bool) -> Served:
        model = load_model("demo", device="cpu", dtype="float32", batch_invariant=not mixes)
        requests = (
            make_requests(4, 20, 18, has_more_options=False)
            if mixes
            else make_requests(0, 24, 9, has_more_options=True)
        )
        buckets = BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH, page_size=PAGE, max_logprobs=4)
        engine = Engine(make_runner(model, EngineConfig(buckets, batch_invariant=not mixes)))
        expected = answered(engine, requests)
        assert not engine.stats.mixed_steps
        return cls(mixes, model, requests, expected)

    def config(self, rng: random.Random) -> EngineConfig:
        buckets = BucketConfig(
            max_batch_size=ROWS,
            max_sequence_length=LENGTH,
            page_size=PAGE,
            # of 48 for four full rows: some have to give way
            total_num_pages=rng.choice([17 if self.mixes else 13, 4 * LENGTH // PAGE]),
            batch_sizes=BUCKETS,
            capture_when="startup" if self.mixes else rng.choice(["startup", "idle", "first-use"]),
            steps_per_launch=rng.choice([1, 1, 3]),
            max_logprobs=4,
        )
        tokens = rng.choice([5, 64] if self.mixes else [8, 64])
        has_prefixes = rng.random() < 0.5
        return EngineConfig(
            buckets, max_prefill_tokens=tokens, prefix_cache=has_prefixes, batch_invariant=not self.mixes
        )

    def run(self, seed: int) -> LazyStreams:
        """Serve requests that come and go as a seed says, and compare every answer; then close in mid-step."""
        rng = random.Random(seed)
        with (
            installed(seed, has_while_nodes=rng.random() < 0.5) as streams,
            lazy_runner(streams, self.model, self.config(rng)) as runner,
            warnings.catch_warnings(),
        ):
            warnings.filterwarnings("ignore", "bucket . stays eager:")
            engine = Engine(runner)
            if self.mixes:
                capture_mixed(runner)
            else:
                engine.graphs.capture(progress=False, kinds=["steps"])
                if rng.random() < REFUSAL_SHARE:
                    streams.refused_bucket = rng.choice(BUCKETS)
            Visit(engine, self.requests, self.expected, rng).run_on(streams)
            assert bool(engine.stats.mixed_steps) == self.mixes
            return streams


def capture_mixed(runner: Runner) -> None:
    runner.graphs.capture(progress=False)
    assert "mixed" in runner.reports()


@pytest.fixture(scope="module")
def served() -> Callable[[bool], Served]:
    made: dict[bool, Served] = {}
    return lambda mixes: made.setdefault(mixes, made.get(mixes) or Served.of(mixes=mixes))


@pytest.fixture(autouse=True)
def few_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(step.MIXED_TOKENS, "cuda", FEW_TOKENS)


@pytest.mark.parametrize("mixes", [False, True], ids=["alone", "mixed"])
@pytest.mark.parametrize("seed", range(int(os.environ.get("GRAPHDECODE_LAZY_SEEDS", SEEDS))))
def test_whenever_the_device_runs_what_is_queued_the_tokens_are_the_same(served, seed, mixes):
    assert served(mixes).run(seed).ran > 100


def test_on_the_device_a_launch_is_read_while_the_next_one_runs(served) -> None:
    case = served(False)
    with installed(0) as streams, lazy_runner(streams, case.model, case.config(random.Random(0))) as runner:
        assert Engine(runner).loop.lookahead == 1


def test_a_chunk_goes_along_while_the_step_with_the_last_one_is_in_flight(served, monkeypatch):
    in_flight: list[bool] = []  # of each launch whether it takes chunks along
    both_mixed: list[bool] = []
    config = EngineConfig(BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH), max_prefill_tokens=5)
    with installed(0) as streams, lazy_runner(streams, served(True).model, config) as runner:
        launch, read = runner.launch, runner.read

        def noting_launch(plan: LaunchPlan, meanwhile: Any = None) -> Launch:
            both_mixed.append(bool(plan.chunks) and in_flight == [True])
            in_flight.append(bool(plan.chunks))
            return launch(plan, meanwhile)

        def noting_read(*arguments: Any, **options: Any) -> Any:
            in_flight.pop(0)
            return read(*arguments, **options)

        monkeypatch.setattr(runner, "launch", noting_launch)
        monkeypatch.setattr(runner, "read", noting_read)
        engine = Engine(runner)
        capture_mixed(runner)
        for prompt, answer in ((1, 40), (20, 1)):
            engine.add(Request([100] * prompt, SamplingParams(max_tokens=answer, ignore_eos=True)))
        while engine.has_work:
            engine.step()
        engine.close()
    assert any(both_mixed)


def read_the_launch_before(right: Callable[..., Any], runner: Runner, launch: Launch, **options: Any) -> Any:
    steps = range(launch.steps.start - len(launch.steps), launch.steps.start)
    return right(runner, launch._replace(steps=steps) if steps.start >= 0 else launch, **options)


def look_far_ahead(right: Callable[..., None], loop: EngineLoop, *given: Any, **options: Any) -> None:
    right(loop, *given, **options)
    loop.lookahead = 4  # more than the rings hold


def record_first(right: Callable[..., Launch], *given: Any) -> Launch:
    event = torch.cuda.Event()
    event.record()
    return right(*given)._replace(done=event)


@contextmanager
def without_order(_right: Callable[..., Any], capture: CudaCapture) -> Iterator[None]:
    with torch.cuda.stream(capture.stream):
        yield


@contextmanager
def restore_nothing(_right: Callable[..., Any], buffers: Any) -> Iterator[None]:
    live = buffers.live_row_count
    yield
    buffers.set_live_rows(live)


def stage_into_first_pages(right: Callable[..., None], prompts: Prompts, chunks: Sequence[PromptChunk]) -> None:
    right(prompts, [replace(chunk, memory=chunks[0].memory) for chunk in chunks])


def stage_on_another_stream(right: Callable[..., None], *given: Any) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        right(*given)


def lose_chunks(right: Callable[..., list[PromptChunk]], prompts: PromptScheduler) -> list[PromptChunk]:
    prompts.chunks = []
    return right(prompts)


def during_exception(is_wrong: bool) -> Callable[..., None]:
    """Do nothing while an exception is handled, or while none is."""
    return lambda right, loop: None if (sys.exception() is not None) == is_wrong else right(loop)


PLAN = (EngineLoop, "_plan_launch")
FAULTS = {
    # the engine's loop
    "rows change while launches are in flight": Fault(EngineLoop, "_drain", during_exception(False), during=PLAN),
    "pages are freed while launches are in flight": Fault(EngineLoop, "_drain", during_exception(True), during=PLAN),
    "pages are reserved without launches in flight": Fault(
        PageReservation, "reserve", lambda right, self, count, _in_flight, **given: right(self, count, (), **given)
    ),
    "more pages are taken for reserved": Fault(
        Scheduler, "steps_with_pages", lambda right, self: right(self) + PAGE, during=(PageReservation, "reserve")
    ),
    "new pages are not staged": Fault(EngineLoop, "_stage_pages", dropped),
    "masks are those of the token before": Fault(GrammarMasks, "fill", dropped),
    "more launches are in flight than rings hold": Fault(EngineLoop, "__init__", look_far_ahead),
    # the Runner
    "a launch is not waited for": Fault(
        Runner, "read", lambda right, self, launch, **given: right(self, launch._replace(done=None), **given)
    ),
    "the ring entries of the launch before are read": Fault(Runner, "read", read_the_launch_before),
    "an event is recorded before its launch": Fault(Runner, "launch", record_first),
    "rings are not rewound": Fault(DecodeStep, "rewind", dropped),
    "a runner closes before its last launch has run": Fault(Runner, "_synchronize", dropped),
    # staging
    "the host writes what is being uploaded": Fault(StagingBlock, "wait", dropped),
    "an upload is recorded on another stream": Fault(
        torch.cuda, "current_stream", lambda *_: torch.cuda.Stream(), during=(StagingBlock, "upload")
    ),
    "an upload is not recorded": Fault(Event, "record", dropped, during=(StagingBlock, "upload")),
    "chunks are written while the last ones are uploaded": Fault(
        StagingBlock, "wait", dropped, during=(Prompts, "stage")
    ),
    # the rings
    "rings hold one launch": Fault(step, "ring_length", lambda _right, config: config.steps_per_launch),
    "rings hold no warm-up": Fault(step, "ring_length", lambda _right, config: 2 * config.steps_per_launch),
    "entries of steps that did not run are not skipped": Fault(decode, "skip_steps", dropped),
    # captures at a first use
    "slots are not restored": Fault(step_graph, "slots_restored", restore_nothing),
    "the capture stream waits for no other": Fault(CudaCapture, "on_stream", without_order),
}
MIXED_FAULTS = {
    "chunks are written while the last ones are uploaded": Fault(
        StagingBlock, "wait", dropped, during=(Prompts, "stage")
    ),
    "all chunks are written to the pages of the first": Fault(Prompts, "stage", stage_into_first_pages),
    "chunks are staged on another stream": Fault(Prompts, "stage", stage_on_another_stream),
    "a mixed step is launched three times": Fault(  # the rings have one entry of it
        LaunchPlan, "of_chunks", lambda right, *given, **options: right(*given, **options)._replace(steps=3)
    ),
    "chunks are not computed": Fault(PromptScheduler, "compute", dropped),
    "chunks of a mixed step are lost": Fault(PromptScheduler, "stage_mixed", lose_chunks),
    "a graph holds more prompt tokens than it has": Fault(
        StepShape, "holds", lambda right, self, wanted: right(self, wanted._replace(prompt_tokens=min(
            wanted.prompt_tokens, self.prompt_tokens
        )))
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mixes", "fault"),
    [*((False, name) for name in FAULTS), *((True, name) for name in MIXED_FAULTS)],
)
def test_a_fault_is_caught(served, monkeypatch, mixes, fault):
    (MIXED_FAULTS if mixes else FAULTS)[fault].plant(monkeypatch)
    case = served(mixes)
    for seed in range(SEEDS_FOR_A_FAULT):
        try:
            case.run(seed)
        except (NameError, AttributeError, TypeError):  # no fault, but nonsense
            raise
        except Exception:
            return
    pytest.fail(f"{SEEDS_FOR_A_FAULT} seeds gave the right tokens all the same")
