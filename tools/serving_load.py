"""An open-loop load on the engine, in process: when requests arrive, what users see at a given rate, and a picture."""

from __future__ import annotations

import io
import itertools
import json
import math
import random
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from graphdecode.errors import ArgumentError, cause
from graphdecode.profiling.plots import new_figure
from graphdecode.profiling.profile_row import Percentiles
from graphdecode.text import LLM, SamplingParams, Stream

SCHEMA_VERSION = 1  # of the file that holds these figures
_LARGEST_SIGMA = 10  # e^10 is 22026 times the median
_IDLE_SECONDS = 0.0005  # how long to sleep when nothing runs and nobody has arrived
_FIRST_TOKEN = (
    ("ttft_ms", "p50", "first token, median", "C0", "o-"),
    ("ttft_ms", "p99", "first token, p99", "C0", "o--"),
    ("queue_ms", "p50", "of it in the queue, median", "C1", "s-"),
    ("queue_ms", "p99", "of it in the queue, p99", "C1", "s--"),
)
_NEXT_TOKENS = (
    ("itl_ms", "p50", "between tokens, median", "C2", "o-"),
    ("itl_ms", "p99", "between tokens, p99", "C2", "o--"),
    ("tpot_ms", "p50", "mean of an answer, median", "C3", "s-"),
    ("tpot_ms", "p99", "mean of an answer, p99", "C3", "s--"),
)
_LEAST_MS = 1e-3  # a logarithmic axis has no zero


@dataclass(frozen=True)
class Lengths:
    """A distribution of numbers of tokens.

    Attributes:
        low: the shortest.
        high: the longest.
        median: of a log-normal distribution, cut off at `low` and `high`; None: evenly spread over them.
        sigma: of the logarithm.
    """

    low: int
    high: int
    median: float | None = None
    sigma: float = 0.0

    @classmethod
    def parse(cls, option: str, text: str) -> Lengths:
        """Read `64`, `8-64` (evenly spread) or `lognormal:MEDIAN:SIGMA:LONGEST`.

        Args:
            option: its name, for the message.
            text: what was given.

        Raises:
            ValueError: it is none of these, or a number that no length can have.
        """
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
        """Return one length."""
        if self.median is None:
            return rng.randint(self.low, self.high)
        drawn = rng.lognormvariate(math.log(self.median), self.sigma)
        return min(max(round(min(drawn, self.high)), self.low), self.high)


@dataclass(frozen=True)
class Arrival:
    """One request: when it comes, in seconds from the start, and how long its prompt and its answer are, in tokens."""

    at: float
    prompt_tokens: int
    answer_tokens: int


def poisson_arrivals(
    rate: float, count: int, prompt_tokens: Lengths, answer_tokens: Lengths, seed: int = 0, burst: int = 1
) -> list[Arrival]:
    """Return bursts of requests that arrive independently of one another; rates differ in nothing but the pace.

    Args:
        rate: requests per second, > 0.
        count: requests.
        prompt_tokens: of each prompt.
        answer_tokens: of each answer.
        seed: of the draws.
        burst: requests that arrive together.

    Raises:
        ValueError: a number that no load can have.
    """
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


def read_trace(path: Path) -> list[Arrival]:
    """Read arrivals from a JSONL file: objects with `at` (seconds), `prompt_tokens` and `answer_tokens`, a line each.

    Raises:
        ValueError: the file cannot be read, holds no arrival, or a line holds something else.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"{path} is no trace of arrivals: {cause(error)}") from error
    arrivals = [_arrival(f"{path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not arrivals:
        raise ArgumentError(f"{path} is no trace of arrivals: it is empty")
    return sorted(arrivals, key=lambda arrival: arrival.at)


def _arrival(where: str, line: str) -> Arrival:
    try:
        record = json.loads(line)
        at, prompt_tokens, answer_tokens = (record[key] for key in ("at", "prompt_tokens", "answer_tokens"))
    except (ValueError, KeyError, TypeError) as error:
        raise ArgumentError(f"{where} is no arrival: {error!r}") from error
    if type(at) not in (int, float) or not 0 <= at < math.inf:
        raise ArgumentError(f"{where}: at must be seconds >= 0, got {at!r}")
    for name, tokens in (("prompt_tokens", prompt_tokens), ("answer_tokens", answer_tokens)):
        if type(tokens) is not int or tokens < 1:
            raise ArgumentError(f"{where}: {name} must be an integer >= 1, got {tokens!r}")
    return Arrival(float(at), prompt_tokens, answer_tokens)


def offered_rate(arrivals: Sequence[Arrival]) -> float | None:
    """Return the mean rate at which requests follow the first one, in requests per second; None where none does."""
    seconds = arrivals[-1].at - arrivals[0].at
    return (len(arrivals) - 1) / seconds if seconds > 0 else None


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Return the same requests, closer together or further apart, so that their mean rate is another.

    Raises:
        ValueError: they have no rate, or the wanted one is impossible.
    """
    offered = offered_rate(arrivals)
    if offered is None:
        raise ArgumentError("a trace whose requests all arrive at one time has no rate that could be changed")
    if not 0 < rate < math.inf:
        raise ArgumentError(f"rate must be > 0, got {rate}")
    first = arrivals[0].at
    return [replace(arrival, at=(arrival.at - first) * offered / rate) for arrival in arrivals]


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


def plot_serving(rows: Sequence[dict], title: str) -> bytes:
    """Return the picture of some loads as PNG.

    Args:
        rows: what `serve` returned, and the `load`'s name.
        title: over all.

    Raises:
        ValueError: matplotlib is not installed, or there are no rows.
    """
    if not rows:
        raise ArgumentError("there is no load to draw")
    ordered = sorted(rows, key=lambda row: row["offered_per_second"] or 0.0)
    figure = new_figure((13, 5))
    first, following, batches = figure.subplots(1, 3)
    _draw_latencies(first, ordered, _FIRST_TOKEN, "until the first token")
    _draw_latencies(following, ordered, _NEXT_TOKENS, "between tokens")
    _draw_batches(batches, ordered)
    for row in ordered:
        point = (row["tokens_per_second"], max(row["ttft_ms"]["p99"], _LEAST_MS))
        first.annotate(
            row["load"],
            point,
            textcoords="offset points",
            xytext=(0, 7),
            fontsize="small",
            ha="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5, "alpha": 0.8},
        )
    for axes in (first, following, batches):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _draw_latencies(axes: Any, rows: Sequence[dict], kinds: Sequence[tuple[str, ...]], title: str) -> None:
    for kind, percentile, label, colour, style in kinds:
        points = [(row["tokens_per_second"], row[kind][percentile]) for row in rows if row[kind] is not None]
        if points:
            x, y = zip(*points, strict=True)
            axes.plot(x, np.maximum(y, _LEAST_MS), style, color=colour, label=label, markersize=4)
    axes.set(xlabel="throughput (tokens/s)", ylabel="latency (ms)", yscale="log", title=title)
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlim(0, 1.1 * max(row["tokens_per_second"] for row in rows))
    axes.locator_params(axis="x", nbins=6)
    axes.margins(y=0.12)
    if axes.lines:
        axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=2)


def _draw_batches(axes: Any, rows: Sequence[dict]) -> None:
    for row in rows:
        sizes = [int(size) for size in row["batch_sizes"]]
        steps = np.array(list(row["batch_sizes"].values()))
        shares = 100 * steps.cumsum() / steps.sum()
        axes.step([0, *sizes], [0, *shares], where="post", label=row["load"])
    axes.set(xlabel="live rows of a step, at most", ylabel="share of steps (%)", title="batch sizes")
    axes.set_xlim(left=0)
    axes.set_ylim(0, 102)
    axes.legend(fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.16), ncol=4)
