"""An open-loop load on the engine, in process: what users would see at a given rate of arrivals."""

from __future__ import annotations

import itertools
import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from tqdm import tqdm

from graphdecode.errors import ArgumentError
from graphdecode.profiling.profile_row import Percentiles
from graphdecode.text import LLM, SamplingParams, Stream
from serving_load.arrivals import Arrival, offered_rate

SCHEMA_VERSION = 1  # of the file that holds these figures
_IDLE_SECONDS = 0.0005  # how long to sleep when nothing runs and nobody has arrived


@dataclass
class _Served:
    """A request under way, and when each of its tokens was there."""

    arrival: Arrival
    stream: Stream
    token_times: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.stream.request.outputs[0].finish_reason is not None

    def note_tokens(self, now: float) -> None:
        self.token_times += [now] * (len(self.stream.request.outputs[0].token_ids) - len(self.token_times))


def check_fits(llm: LLM, arrivals: Sequence[Arrival]) -> None:
    """Refuse a load that the engine could not serve as it is written, before any of it is served.

    Raises:
        ValueError: a request is longer than a sequence can be.
    """
    limit = llm.capacity.token_limit
    for arrival in arrivals:
        if arrival.prompt_tokens + arrival.answer_tokens > limit:
            raise ArgumentError(
                f"a request of {arrival.prompt_tokens} + {arrival.answer_tokens} tokens does not fit: prompt and "
                f"answer can have {limit} (max_sequence_length {llm.capacity.max_sequence_length}, "
                f"{llm.capacity.total_num_pages} pages of {llm.config.page_size} tokens)"
            )


def serve(
    llm: LLM, arrivals: Sequence[Arrival], *, seed: int = 0, label: str = "serving", progress: bool = True
) -> dict:
    """Play a load and return what was seen: latencies in milliseconds, throughput, queueing, preemptions, batch sizes.

    Arrivals do not wait for answers: a load that is too high shows as a growing queue. What is under way when this is
    interrupted is aborted.

    Args:
        llm: the engine; nothing else may be using it.
        arrivals: in the order of their times.
        seed: of the prompts' tokens; another for each load, or the prefix cache knows them.
        label: of the progress bar.
        progress: show it on standard error.

    Raises:
        ValueError: a request is longer than a sequence can be.
    """
    check_fits(llm, arrivals)
    rng = random.Random(seed)
    vocab_size = llm.model.config.vocab_size
    prompts = [[rng.randrange(vocab_size) for _ in range(arrival.prompt_tokens)] for arrival in arrivals]
    due = [arrival.at for arrival in arrivals]
    running: list[_Served] = []
    done: list[_Served] = []
    queued_seconds: defaultdict[float, float] = defaultdict(float)  # by the requests that had no row meanwhile
    batches_before, preempted_before = llm.stats.batch_sizes.copy(), llm.num_preemptions
    handed_in, began, last = 0, time.perf_counter(), 0.0
    bar = tqdm(total=len(arrivals), desc=label, unit="request", disable=None if progress else True, leave=False)
    try:
        while handed_in < len(arrivals) or running:
            now = time.perf_counter() - began
            while handed_in < len(arrivals) and due[handed_in] <= now:
                arrival = arrivals[handed_in]
                params = SamplingParams(temperature=0.0, max_tokens=arrival.answer_tokens, ignore_eos=True)
                running.append(_Served(arrival, llm.stream(prompts[handed_in], params)))
                handed_in += 1
            if running:
                llm.step()
            else:
                time.sleep(min(_IDLE_SECONDS, max(due[handed_in] - now, 0.0)))
            now = time.perf_counter() - began
            queued_seconds[llm.num_waiting + bisect_right(due, now) - handed_in] += now - last
            last = now
            for served in running:
                served.note_tokens(now)
            finished = [served for served in running if served.finished]
            running = [served for served in running if not served.finished]
            done += finished
            bar.update(len(finished))
    finally:
        bar.close()
        for served in running:
            served.stream.close()
    return _figures(done, began, last) | {
        "offered_per_second": offered_rate(arrivals),
        "queue_depth": asdict(Percentiles.weighted(queued_seconds)),
        "preemptions": llm.num_preemptions - preempted_before,
        "batch_sizes": {str(size): steps for size, steps in sorted((llm.stats.batch_sizes - batches_before).items())},
    }


def _figures(done: Sequence[_Served], began: float, seconds: float) -> dict:
    times = [served.token_times for served in done]
    arrived = [served.arrival.at for served in done]
    scheduled = [served.stream.request.metrics.first_scheduled_time or 0.0 for served in done]
    return {
        "requests": len(done),
        "seconds": seconds,
        "served_per_second": len(done) / seconds,
        "tokens_per_second": sum(map(len, times)) / seconds,
        "ttft_ms": _milliseconds([own[0] - at for own, at in zip(times, arrived, strict=True)]),
        "queue_ms": _milliseconds([at - began - due for at, due in zip(scheduled, arrived, strict=True)]),
        "tpot_ms": _milliseconds([(own[-1] - own[0]) / (len(own) - 1) for own in times if len(own) > 1]),
        "itl_ms": _milliseconds([later - earlier for own in times for earlier, later in itertools.pairwise(own)]),
    }


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles; None where there is nothing to measure, such as the time between the tokens of one."""
    return asdict(Percentiles.of([1000 * value for value in seconds])) if seconds else None
