"""An open-loop load at several rates: throughput against latency, queueing, preemptions, batch sizes.

    tools/bench serving --rates 5,20,80 --out serving
    tools/bench serving --prompt-tokens lognormal:64:0.8:400 --answer-tokens 8-64

Requests arrive at random (Poisson), and do not wait for answers. Writes serving.json after every load.
"""

from __future__ import annotations

import itertools
import math
import random
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from tqdm import tqdm

from graphdecode import LLM, SamplingParams
from graphdecode.errors import ArgumentError
from graphdecode.profiling.latency import percentiles
from graphdecode.profiling.tuner import check_record, record_batch_sizes
from graphdecode.text import Stream
from harness import Device, Dtype, Model, OutFolder, record, show, write

SCHEMA_VERSION = 1  # of the file that holds these figures
DEFAULT_RATES = "5,20,80"
_LARGEST_SIGMA = 10  # e^10 is 22026 times the median
_IDLE_SECONDS = 0.0005  # how long to sleep when nothing runs and nobody has arrived


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens."""

    low: int  # the shortest
    high: int  # the longest
    # of a log-normal distribution, cut off at `low` and `high`; None: evenly spread over them
    median: float | None = None
    sigma: float = 0.0  # of the logarithm

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Read `64`, `8-64` (evenly spread) or `lognormal:MEDIAN:SIGMA:LONGEST`."""
        try:
            if text.startswith("lognormal:"):
                median, sigma, high = text.split(":")[1:]
                lengths = cls(1, int(high), float(median), float(sigma))
            else:
                low, _, rest = text.partition("-")
                lengths = cls(int(low), int(rest or low))
        except ValueError:
            raise ArgumentError(
                f"{option} must be N, LOW-HIGH or lognormal:MEDIAN:SIGMA:LONGEST, got {text!r}"
            ) from None
        median_fits = lengths.median is None or 1 <= lengths.median <= lengths.high
        if not (1 <= lengths.low <= lengths.high and median_fits and 0 <= lengths.sigma <= _LARGEST_SIGMA):
            raise ArgumentError(
                f"{option} must be lengths >= 1 in ascending order, and sigma in 0..{_LARGEST_SIGMA}, got {text!r}"
            )
        return lengths

    def draw(self, rng: random.Random) -> int:
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(min(drawn, self.high)), self.low), self.high)


@dataclass(frozen=True)
class Arrival:
    """One request: its arrival in seconds from the start, and its prompt and output tokens."""

    at: float
    prompt_tokens: int
    answer_tokens: int


def poisson_arrivals(
    rate: float, count: int, prompt_tokens: Lengths, answer_tokens: Lengths, seed: int = 0, burst: int = 1
) -> list[Arrival]:
    """Return bursts of requests that arrive independently; rates differ in nothing but the pace."""
    if not 0 < rate < math.inf or count < 1 or burst < 1:
        raise ArgumentError(
            f"rate must be > 0, the number of requests and a burst >= 1, got {rate}, {count} and {burst}"
        )
    rng = random.Random(seed)
    now, arrivals = 0.0, []
    for index in range(count):
        if index % burst == 0:
            now += burst * rng.expovariate(1.0)
        arrivals.append(Arrival(now / rate, prompt_tokens.draw(rng), answer_tokens.draw(rng)))
    return arrivals


def offered_rate(arrivals: Sequence[Arrival]) -> float | None:
    """Return the mean rate of requests after the first one, per second; None if there are none."""
    seconds = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / seconds if seconds > 0 else None


@dataclass
class _Served:
    """A request in flight, and the times of its tokens."""

    arrival: Arrival
    stream: Stream
    token_times: list[float] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return self.stream.request.outputs[0].finish_reason is not None

    def note_tokens(self, now: float) -> None:
        self.token_times += [now] * (len(self.stream.request.outputs[0].token_ids) - len(self.token_times))


def check_fits(llm: LLM, arrivals: Sequence[Arrival]) -> None:
    """Refuse a load with a request that the engine could never serve."""
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
) -> dict[str, Any]:
    """Play a load, and return its figures; arrivals do not wait, and an interrupt aborts what is in flight."""
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
        "queue_depth": weighted_percentiles(queued_seconds),
        "preemptions": llm.num_preemptions - preempted_before,
        "batch_sizes": {str(size): steps for size, steps in sorted((llm.stats.batch_sizes - batches_before).items())},
    }


def _figures(done: Sequence[_Served], began: float, seconds: float) -> dict[str, Any]:
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


def weighted_percentiles(weights: Mapping[float, float]) -> dict[str, float]:
    """Return p50, p90, p99 and max of values (value -> weight, one of them above 0)."""
    values = sorted(value for value, weight in weights.items() if weight > 0)
    shares = np.cumsum([weights[value] for value in values])
    found = [float(values[int(np.searchsorted(shares, share * shares[-1]))]) for share in (0.5, 0.9, 0.99)]
    return dict(zip(("p50", "p90", "p99", "max"), [*found, float(values[-1])], strict=True))


def _milliseconds(seconds: Sequence[float]) -> dict[str, float] | None:
    """Return percentiles; None for no values."""
    return percentiles([1000 * value for value in seconds]) if seconds else None


def rates_of(text: str) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")]
    except ValueError:
        raise ArgumentError(f"--rates must be numbers separated by commas, such as 5,20,80; got {text!r}") from None
    if min(rates) <= 0:
        raise ArgumentError(f"--rates must be > 0, got {text!r}")
    return rates


def main(
    model: Model = "demo",
    config: Annotated[Path | None, typer.Option(help="A bucket configuration file.")] = None,
    rates: Annotated[str, typer.Option(help="Requests per second; separated by commas.")] = DEFAULT_RATES,
    requests: Annotated[int, typer.Option(help="Requests at each rate.")] = 100,
    burst: Annotated[int, typer.Option(help="Requests that arrive together.")] = 1,
    prompt_tokens: Annotated[str, typer.Option(help="N, LOW-HIGH or lognormal:MEDIAN:SIGMA:LONGEST.")] = "8-64",
    answer_tokens: Annotated[str, typer.Option(help="The same, of answers.")] = "8-64",
    seed: Annotated[int, typer.Option(help="Of arrivals, lengths and prompts.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    out: OutFolder = None,
    record_batches: Annotated[Path | None, typer.Option(help="Add the loads' batch sizes to a file.")] = None,
) -> None:
    lengths = Lengths.parse("--prompt-tokens", prompt_tokens), Lengths.parse("--answer-tokens", answer_tokens)
    loads = {f"{rate:g}/s": poisson_arrivals(rate, requests, *lengths, seed, burst) for rate in rates_of(rates)}
    if record_batches is not None:
        check_record(record_batches)
    rows: list[dict[str, Any]] = []
    with LLM(model, config=config, device=device, dtype=dtype, progress=True) as llm:
        for arrivals in loads.values():
            check_fits(llm, arrivals)
        serve(llm, [Arrival(0.0, 8, 4)] * 4, progress=False)  # warms it up
        about = record(
            llm.device,
            schema=SCHEMA_VERSION,
            model=model,
            dtype=str(llm.model.dtype).removeprefix("torch."),
            backend=llm.graphs.backend,
            max_batch_size=llm.config.max_batch_size,
            buckets=list(llm.graphs.buckets),
            total_num_pages=llm.capacity.total_num_pages,
            page_size=llm.config.page_size,
            arrivals={"prompt_tokens": prompt_tokens, "answer_tokens": answer_tokens, "burst": burst},
            seed=seed,
        )
        try:
            for index, (name, arrivals) in enumerate(loads.items(), 1):
                rows.append({"load": name, **serve(llm, arrivals, seed=seed + index, label=f"serving {name}")})
                write(out and out / "serving.json", about | {"rows": rows})
        finally:
            if rows:
                show_loads(rows)
                if record_batches is not None:
                    sizes = (Counter({int(rows): steps for rows, steps in row["batch_sizes"].items()}) for row in rows)
                    record_batch_sizes(record_batches, sum(sizes, Counter()))


def show_loads(rows: list[dict[str, Any]]) -> None:
    columns = {"load": "{load}", "tokens/s": "{tokens_per_second:.0f}"}
    for kind in ("ttft", "tpot", "itl"):
        columns |= percentile_columns(kind.upper(), f"{kind}_ms")
    show(columns, rows, "open loop: latencies in ms")
    columns = {"load": "{load}", "offered/s": "{offered_per_second:.1f}", "served/s": "{served_per_second:.1f}"}
    columns |= {"rows of a step": "{mean_rows:.1f}", "preempted": "{preemptions}"}
    show(columns, (row | {"mean_rows": mean_rows(row["batch_sizes"])} for row in rows))
    columns = {"load": "{load}"} | percentile_columns("queued", "queue_ms")
    columns |= {f"queue {key}": f"{{queue_depth[{key}]:.0f}}" for key in ("p50", "p90", "p99", "max")}
    show(columns, rows, "time in the queue (ms), length of the queue (requests)")


def percentile_columns(heading: str, key: str) -> dict[str, str]:
    return {f"{heading} {each}": f"{{{key}[{each}]:.2f}}" for each in ("p50", "p90", "p99")}


def mean_rows(batch_sizes: dict[str, int]) -> float:
    return sum(int(size) * count for size, count in batch_sizes.items()) / sum(batch_sizes.values())
