"""An open-loop load on the engine, in process: what users would see at a given rate of arrivals."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tqdm import tqdm

from graphdecode.engine import LLM, SamplingParams
from graphdecode.engine.stream import Stream
from graphdecode.profiling.percentiles import Percentiles

_IDLE_SECONDS = 0.0005  # how long to sleep when nothing runs and nobody has arrived


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and how long its prompt and its answer are, in tokens."""

    at: float
    prompt_tokens: int
    answer_tokens: int


def poisson_arrivals(
    rate: float, count: int, prompt_tokens: tuple[int, int], answer_tokens: tuple[int, int], seed: int = 0
) -> list[Arrival]:
    """Return requests that arrive independently of one another, with lengths drawn evenly from two ranges.

    Args:
        rate: requests per second, > 0.
        count: requests.
        prompt_tokens: shortest and longest prompt.
        answer_tokens: shortest and longest answer.
        seed: of the draws.

    Raises:
        ValueError: a number that no load can have.
    """
    if rate <= 0 or count < 1:
        raise ValueError(f"rate must be > 0 and count >= 1, got {rate} and {count}")
    for name, (low, high) in (("prompt_tokens", prompt_tokens), ("answer_tokens", answer_tokens)):
        if not 1 <= low <= high:
            raise ValueError(f"{name} must be a range of numbers >= 1, got {low}-{high}")
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate)
        arrivals.append(Arrival(now, rng.randint(*prompt_tokens), rng.randint(*answer_tokens)))
    return arrivals


def read_trace(path: Path) -> list[Arrival]:
    """Read arrivals from a JSONL file: objects with `at`, `prompt_tokens` and `answer_tokens`, a line each.

    Raises:
        ValueError: the file cannot be read, or a line holds something else.
    """
    arrivals = []
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            if line.strip():
                record = json.loads(line)
                arrivals.append(
                    Arrival(float(record["at"]), int(record["prompt_tokens"]), int(record["answer_tokens"]))
                )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is no trace of arrivals: {error!r}") from error
    if not arrivals:
        raise ValueError(f"{path} holds no arrivals")
    return sorted(arrivals, key=lambda arrival: arrival.at)


@dataclass
class _Served:
    """A request under way, and when each of its tokens was there."""

    arrival: Arrival
    stream: Stream
    token_times: list[float] = field(default_factory=list)


def serve(llm: LLM, arrivals: Sequence[Arrival], *, seed: int = 0, progress: bool = True) -> dict:
    """Play a load and return what was seen: latencies in milliseconds, throughput, queueing, preemptions, batch sizes.

    Arrivals do not wait for answers: a load that is too high shows as a growing queue.
    """
    rng = random.Random(seed)
    vocab_size = llm.model.config.vocab_size
    pending = list(reversed(arrivals))
    running: list[_Served] = []
    done: list[_Served] = []
    batches_before, preempted_before = llm.stats.batch_sizes.copy(), llm.num_preemptions
    longest_queue = 0
    began = time.perf_counter()
    with tqdm(total=len(arrivals), desc="serving", unit="request", disable=not progress, leave=False) as bar:
        while pending or running:
            now = time.perf_counter() - began
            while pending and pending[-1].at <= now:
                arrival = pending.pop()
                prompt = [rng.randrange(vocab_size) for _ in range(arrival.prompt_tokens)]
                params = SamplingParams(temperature=0.0, max_tokens=arrival.answer_tokens, ignore_eos=True)
                running.append(_Served(arrival, llm.stream(prompt, params)))
            if not running:
                time.sleep(min(_IDLE_SECONDS, max(pending[-1].at - now, 0.0)))
                continue
            llm.step()
            longest_queue = max(longest_queue, llm.num_waiting)
            now = time.perf_counter() - began
            for served in running:
                answer = served.stream.request.outputs[0]
                served.token_times += [now] * (len(answer.token_ids) - len(served.token_times))
                if answer.finish_reason is not None:
                    done.append(served)
                    bar.update()
            running = [served for served in running if served.stream.request.outputs[0].finish_reason is None]
    seconds = time.perf_counter() - began
    first = [1000 * (served.token_times[0] - served.arrival.at) for served in done]
    gaps = [
        1000 * (later - earlier)
        for served in done
        for earlier, later in zip(served.token_times, served.token_times[1:], strict=False)
    ]
    per_token = [
        1000 * (served.token_times[-1] - served.token_times[0]) / (len(served.token_times) - 1)
        for served in done
        if len(served.token_times) > 1
    ]
    tokens = sum(len(served.token_times) for served in done)
    batches = llm.stats.batch_sizes - batches_before
    return {
        "requests": len(done),
        "offered_per_second": len(arrivals) / max(arrivals[-1].at, 1e-9),
        "served_per_second": len(done) / seconds,
        "tokens_per_second": tokens / seconds,
        "ttft_ms": vars(Percentiles.of(first)),
        "tpot_ms": vars(Percentiles.of(per_token or [0.0])),
        "itl_ms": vars(Percentiles.of(gaps or [0.0])),
        "longest_queue": longest_queue,
        "preemptions": llm.num_preemptions - preempted_before,
        "batch_sizes": {str(size): batches[size] for size in sorted(batches)},
    }
