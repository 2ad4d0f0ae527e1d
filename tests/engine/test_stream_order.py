"""The Runner, its rings and the engine's loop on a device that runs late: the tokens are those of an eager engine.

More orders than these are tried by `GRAPHDECODE_LAZY_SEEDS=200 pytest tests/engine/test_stream_order.py -k queued`.
"""

from __future__ import annotations

import os
import random
import warnings
from functools import partial

import pytest
from lazy_device import installed, lazy_runner
from lazy_stream import LazyStreams
from lazy_visit import REFUSAL_SHARE, SHARED, Answer, Visit, answered, assert_found
from planted import Fault

from graphdecode import BucketConfig, Engine, Request, SamplingParams
from graphdecode.buffers import StagingBlock
from graphdecode.config import EngineConfig
from graphdecode.engine.assembly import make_runner
from graphdecode.engine.loop import EngineLoop
from graphdecode.engine.page_reservation import PageReservation
from graphdecode.engine.prompts import Prompts
from graphdecode.engine.runner import Runner
from graphdecode.engine.steps import DecodeStep, step
from graphdecode.graphs import step_graph
from graphdecode.graphs.cuda import CudaCapture
from graphdecode.models import Model, load_model

SEEDS = 8
SEEDS_FOR_A_FAULT = 25
REQUESTS = 24
ROWS, LENGTH, PAGE = 4, 48, 4
PAGES = 13  # of 48 for four full rows: some have to give way
BUCKETS = (1, 2, ROWS)


def made_requests() -> list[Request]:
    chosen, requests = random.Random(0), []
    for number in range(REQUESTS):
        prompt = SHARED[: chosen.choice([0, 0, 8])] + [chosen.randrange(97, 123) for _ in range(chosen.randint(1, 9))]
        options: dict = {"temperature": chosen.choice([0.0, 1.5]), "seed": number}
        if number % 3 == 0:
            options |= {"repetition_penalty": 1.4, "frequency_penalty": 0.5}
        if number % 4 == 0:
            options |= {"logprobs": 3}
        if number % 5 == 0:
            options |= {"logit_bias": {101: 4.0, 110: 4.0}}
        if number % 7 == 0:
            options |= {"stop_token_ids": [101, 111, 116]}
        bad_words = ((101,), (110, 101), (118, 118)) if number % 6 == 1 else ()
        params = SamplingParams(max_tokens=chosen.randint(1, 20), ignore_eos=True, **options)
        grammar = "a letter" if number % 8 == 3 else None
        requests.append(Request(prompt, params, bad_words_token_ids=bad_words, grammar=grammar))
    return requests


REQUESTED = made_requests()


def settings(chosen: random.Random) -> EngineConfig:
    buckets = BucketConfig(
        max_batch_size=ROWS,
        max_sequence_length=LENGTH,
        page_size=PAGE,
        total_num_pages=chosen.choice([PAGES, 4 * LENGTH // PAGE]),
        batch_sizes=BUCKETS,
        capture_when=chosen.choice(["startup", "idle", "first-use"]),
        steps_per_launch=chosen.choice([1, 1, 3]),
        max_logprobs=4,
    )
    tokens = chosen.choice([8, 64])
    return EngineConfig(buckets, max_prefill_tokens=tokens, prefix_cache=chosen.random() < 0.5, batch_invariant=True)


@pytest.fixture(scope="module")
def model() -> Model:
    return load_model("demo", device="cpu", dtype="float32", batch_invariant=True)


@pytest.fixture(scope="module")
def expected(model: Model) -> list[Answer]:
    """What each request is answered with on a CPU, where nothing is under way while the host goes on."""
    buckets = BucketConfig(max_batch_size=ROWS, max_sequence_length=LENGTH, page_size=PAGE, max_logprobs=4)
    return answered(Engine(make_runner(model, EngineConfig(buckets, batch_invariant=True))), REQUESTED)


def serve(model: Model, expected: list[Answer], seed: int) -> LazyStreams:
    """Serve requests that come and go as a seed says, and compare every answer; then close in the middle of a step."""
    chosen = random.Random(seed)
    with (
        installed(seed, has_while_nodes=chosen.random() < 0.5) as streams,
        lazy_runner(streams, model, settings(chosen)) as runner,
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "bucket . stays eager:")
        engine = Engine(runner)
        engine.graphs.capture(progress=False, kinds=["steps"])
        if chosen.random() < REFUSAL_SHARE:
            streams.refused_bucket = chosen.choice(BUCKETS)
        Visit(engine, REQUESTED, expected, chosen).run_on(streams)
        return streams


@pytest.mark.parametrize("seed", range(int(os.environ.get("GRAPHDECODE_LAZY_SEEDS", SEEDS))))
def test_whenever_the_device_runs_what_is_queued_the_tokens_are_the_same(model, expected, seed):
    assert serve(model, expected, seed).ran > 100


def test_on_the_device_a_launch_is_read_while_the_next_one_runs(model: Model) -> None:
    with installed(0) as streams, lazy_runner(streams, model, settings(random.Random(0))) as runner:
        assert Engine(runner).loop.lookahead == 1


FAULTS = [
    # the engine's loop
    Fault(EngineLoop, "_plan_launch", "self._drain()  # launches", "pass  # launches"),
    Fault(EngineLoop, "_plan_launch", "self._drain()  # before", "pass  # before"),
    Fault(PageReservation, "reserve", "reserve(ahead)", "reserve(num_tokens)"),
    Fault(PageReservation, "reserve", "steps_with_pages() - ahead", "steps_with_pages()"),
    Fault(EngineLoop, "_plan_launch", "if pages_changed:", "if False:"),
    Fault(EngineLoop, "_plan_launch", "has_masked_rows = bool(self.masks.rows)", "has_masked_rows = False"),
    Fault(EngineLoop, "step", " and not self.masks.rows", ""),
    Fault(EngineLoop, "_read_oldest", "popleft()", "pop()"),
    Fault(EngineLoop, "__init__", "1 if runner.model", "4 if runner.model"),  # more than the rings hold
    # the Runner
    Fault(Runner, "read", "launch.done.synchronize()", "pass"),
    Fault(Runner, "launch", "done.record()", "pass"),
    Fault(Runner, "launch", "self.step.rewind(first)", "pass"),
    Fault(Runner, "close", "self._synchronize()", "pass"),
    # staging
    Fault(StagingBlock, "wait", "self._copied.synchronize()", "pass"),
    Fault(StagingBlock, "upload", "current_stream(self.device.device)", "Stream(self.device.device)"),
    Fault(StagingBlock, "upload", "self._copied.record(", "str("),
    Fault(Prompts, "stage", "self.buffers.staging(_CHUNKS)", "self.buffers._blocks[_CHUNKS].arrays"),
    # the rings
    Fault(step, "ring_length", "2 * config.steps_per_launch + config.warmup_steps + 2", "config.steps_per_launch"),
    Fault(step, "ring_length", " + config.warmup_steps + 2", ""),
    Fault(DecodeStep, "_end_launch", "skip_steps(", "print and ("),
    # captures at a first use
    Fault(step_graph, "slots_restored", "tensor.copy_(values)", "pass"),
    Fault(CudaCapture, "on_stream", "self.stream.wait_stream(outer)", "pass"),
]


@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_planted_fault_is_found(model, expected, monkeypatch, fault):
    fault.plant(monkeypatch)
    assert_found(partial(serve, model, expected), SEEDS_FOR_A_FAULT)
