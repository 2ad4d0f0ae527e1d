"""What Prometheus reads: vLLM's names, so that dashboards work, and what only this engine has."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphdecode.server.engine_client import EngineClient
from graphdecode.server.wire import Vitals
from graphdecode.text.answer import Answer
from graphdecode.text.intake import Order

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_KEPT = 100  # of the last steps and requests
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Counts and times of one served model.

    Args:
        model_name: the label of all.
        client: the engine.

    Attributes:
        vitals: what the engine's process said last.
        last_steps: seconds of the last decode steps.
        last_first_tokens: seconds to the first token of the last requests.
        generated_tokens: since the start.
    """

    def __init__(self, model_name: str, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.vitals: Vitals | None = None
        self.last_steps: deque[float] = deque(maxlen=_KEPT)
        self.last_first_tokens: deque[float] = deque(maxlen=_KEPT)
        self.generated_tokens = 0
        self.client = client
        labels, values = ["model_name"], [model_name]

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, registry=self.registry, buckets=buckets).labels(*values)

        def counter(name: str, text: str) -> Counter:
            return Counter(name, text, labels, registry=self.registry).labels(*values)

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens of requests that began.")
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.")
        self._prefix_queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = counter("vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        success = Counter(
            "vllm:request_success", "Answers by how they ended.", [*labels, "finished_reason"], registry=self.registry
        )
        self._success = {reason: success.labels(*values, reason) for reason in _REASONS}
        self._first_token = histogram("vllm:time_to_first_token_seconds", "From arrival to the first token.", _SECONDS)
        self._inter_token = histogram("vllm:inter_token_latency_seconds", "Between two tokens.", _STEP_SECONDS)
        self._per_token = histogram("vllm:request_time_per_output_token_seconds", "Mean of a request.", _STEP_SECONDS)
        self._latency = histogram("vllm:e2e_request_latency_seconds", "From arrival to the end.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Waiting for a row.", _SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "From the row to the first token.", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "From the first token to the last.", _SECONDS)
        self._inference = histogram("vllm:request_inference_time_seconds", "From the row to the last token.", _SECONDS)
        self._request_prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._request_generated = histogram("vllm:request_generation_tokens", "Generated tokens of one.", _TOKENS)
        self._step = histogram("graphdecode:step_seconds", "Time of a decode step.", _STEP_SECONDS)
        self._launch = histogram("graphdecode:launch_seconds", "The host's time for a launch.", _STEP_SECONDS)
        self.registry.register(_Vital(self, model_name))

    def take_vitals(self, vitals: Vitals) -> None:
        """Take how the engine is."""
        self.vitals = vitals
        self.last_steps.extend(vitals.step_seconds)
        for seconds in vitals.step_seconds:
            self._step.observe(seconds)
        for seconds in vitals.launch_seconds:
            self._launch.observe(seconds)

    @contextlib.contextmanager
    def tracked(self, orders: list[Order]) -> Iterator[list[TokenClock]]:
        """Hold while some prompts are answered; however that ends, it is counted.

        Gives a clock for each answer, to be ticked whenever there is news.
        """
        clocks = [TokenClock(self, answer) for order in orders for answer in order.answers]
        try:
            yield clocks
        finally:
            for order in orders:
                self._count(order)

    def saw_tokens(self, count: int, seconds: float | None) -> None:
        """Count new tokens of an answer.

        Args:
            count: of them.
            seconds: since the ones before; None for the first.
        """
        self.generated_tokens += count
        self._generation_tokens.inc(count)
        if seconds is not None:
            for _ in range(count):
                self._inter_token.observe(seconds / count)

    def _count(self, order: Order) -> None:
        output, metrics = order.output, order.output.metrics
        prompt = len(output.prompt_token_ids)
        self._prefix_queries.inc(prompt)
        self._prefix_hits.inc(metrics.num_cached_tokens)
        self._request_prompt.observe(prompt)
        generated = [len(answer.token_ids) for answer in output.outputs]
        for answer in output.outputs:
            self._success.get(answer.finish_reason or "abort", self._success["error"]).inc()
            self._request_generated.observe(len(answer.token_ids))
        now = time.perf_counter()
        end = metrics.finished_time or now
        self._latency.observe(now - metrics.arrival_time)
        if metrics.first_scheduled_time is None:
            return
        self._prompt_tokens.inc(prompt)
        self._queue.observe(max(metrics.first_scheduled_time - metrics.arrival_time, 0.0))
        self._inference.observe(max(end - metrics.first_scheduled_time, 0.0))
        if metrics.first_token_time is None:
            return
        self.last_first_tokens.append(metrics.first_token_time - metrics.arrival_time)
        self._first_token.observe(self.last_first_tokens[-1])
        self._prefill.observe(metrics.first_token_time - metrics.first_scheduled_time)
        decode = max(end - metrics.first_token_time, 0.0)
        self._decode.observe(decode)
        if max(generated) > 1:
            self._per_token.observe(decode / (max(generated) - 1))

    def text(self) -> bytes:
        """Return all of it in Prometheus' text format."""
        return generate_latest(self.registry)


class TokenClock:
    """Times the tokens of one answer."""

    def __init__(self, metrics: Metrics, answer: Answer) -> None:
        self._metrics = metrics
        self._answer = answer
        self._count = 0
        self._last: float | None = None

    def tick(self) -> None:
        """Look at what came."""
        count = len(self._answer.output.token_ids)
        if count > self._count:
            now = time.perf_counter()
            self._metrics.saw_tokens(count - self._count, None if self._last is None else now - self._last)
            self._count, self._last = count, now


class _Vital(Collector):
    """What is read off the engine's last vitals, when Prometheus asks."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._label = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        vitals = self._metrics.vitals
        if vitals is None:
            return
        gauges = {
            "vllm:num_requests_running": ("Requests that have a row.", vitals.running),
            "vllm:num_requests_waiting": ("Requests that wait for a row.", vitals.waiting),
            "vllm:kv_cache_usage_perc": ("Share of the pages in use.", vitals.used_pages / max(vitals.total_pages, 1)),
            "graphdecode:padding_share": ("Share of the computed rows that were padding.", vitals.padding_share),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._label], value)
            yield gauge
        preemptions = CounterMetricFamily("vllm:num_preemptions", "Rows that gave way.", labels=["model_name"])
        preemptions.add_metric([self._label], vitals.preemptions)
        yield preemptions
        recaptures = CounterMetricFamily(
            "graphdecode:recaptures", "How often the engine was started again.", labels=["model_name"]
        )
        recaptures.add_metric([self._label], self._metrics.client.restarts)
        yield recaptures
        replays = CounterMetricFamily(
            "graphdecode:bucket_replays", "Steps of a bucket.", labels=["model_name", "bucket"]
        )
        for bucket, steps in sorted(vitals.bucket_steps.items()):
            replays.add_metric([self._label, str(bucket)], steps)
        yield replays
        yield from self._drafts(vitals)

    def _drafts(self, vitals: Vitals) -> Iterator[Metric]:
        counts = {
            "vllm:spec_decode_num_drafts": ("Runs of drafts that were verified.", vitals.drafts),
            "vllm:spec_decode_num_draft_tokens": ("Drafts that were verified.", vitals.draft_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Drafts that were accepted.", vitals.accepted_tokens),
        }
        for name, (text, value) in counts.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._label], value)
            yield counter
        places = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts that were accepted, by their place in a run.",
            labels=["model_name", "position"],
        )
        for place, value in enumerate(vitals.accepted_per_pos):
            places.add_metric([self._label, str(place)], value)
        yield places
