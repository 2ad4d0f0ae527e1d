"""Prometheus metrics with vLLM's names, and OpenTelemetry spans with vLLM's attributes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphdecode.errors import ArgumentError
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.protocol import Generation
from graphdecode.server.wire import Vitals
from graphdecode.text.answer import Answer
from graphdecode.text.input_processor import Order

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_KEPT = 100  # of the last steps and requests
_REASONS = ("stop", "length", "abort", "error")


class Metrics:
    """Counts and times of one served model."""

    def __init__(self, model_name: str, client: EngineClient) -> None:
        self.registry = CollectorRegistry()
        self.vitals: Vitals | None = None  # what the engine's process said last
        self.last_steps: deque[float] = deque(maxlen=_KEPT)  # seconds of the last decode steps
        self.last_first_tokens: deque[float] = deque(maxlen=_KEPT)  # seconds to the first token of the last requests
        self.generated_tokens = 0  # since the start
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
    """Collects metrics of the engine's latest state when Prometheus asks."""

    def __init__(self, metrics: Metrics, model_name: str) -> None:
        self._metrics = metrics
        self._label = model_name

    def collect(self) -> Iterator[Metric]:
        """Yield the current values."""
        vitals = self._metrics.vitals
        if vitals is None:
            return
        gauges = (
            ("vllm:num_requests_running", "Requests that have a row.", vitals.running),
            ("vllm:num_requests_waiting", "Requests that wait for a row.", vitals.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the pages in use.", vitals.used_pages / max(vitals.total_pages, 1)),
            ("graphdecode:padding_share", "Share of the computed rows that were padding.", vitals.padding_share),
        )
        counts = (
            ("vllm:num_preemptions", "Preemptions of rows.", vitals.preemptions),
            ("graphdecode:recaptures", "How often the engine was started again.", self._metrics.client.restarts),
            ("vllm:spec_decode_num_drafts", "Runs of drafts that were verified.", vitals.drafts),
            ("vllm:spec_decode_num_draft_tokens", "Drafts that were verified.", vitals.draft_tokens),
            ("vllm:spec_decode_num_accepted_tokens", "Drafts that were accepted.", vitals.accepted_tokens),
        )
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counts)):
            for name, text, value in families:
                family = kind(name, text, labels=["model_name"])
                family.add_metric([self._label], value)
                yield family
        replays, places = "graphdecode:bucket_replays", "vllm:spec_decode_num_accepted_tokens_per_pos"
        by_place = "Drafts that were accepted, by their place in a run."
        for name, text, label, values in (
            (replays, "Steps of a bucket.", "bucket", sorted(vitals.bucket_steps.items())),
            (places, by_place, "position", enumerate(vitals.accepted_per_pos)),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name", label])
            for key, value in values:
                counter.add_metric([self._label, str(key)], value)
            yield counter


class Tracer:
    """Writes spans.

    Args:
        exporter: where spans go.
    """

    def __init__(self, model_name: str, exporter: SpanExporter, version: str = "") -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model_name = model_name
        resource = Resource.create({"service.name": "graphdecode", "service.version": version})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("graphdecode.server")
        self._contexts = TraceContextTextMapPropagator()

    def trace(self, request_id: str, order: Order, body: Generation, headers: Mapping[str, str]) -> None:
        """Write the span of a prompt that was answered, or given up.

        Args:
            headers: of the request; a `traceparent` among them makes the span a part of its caller's trace.
        """
        from opentelemetry.trace import SpanKind

        output, metrics = order.output, order.output.metrics
        now, wall = time.perf_counter(), time.time()
        end = metrics.finished_time or now
        times = {
            "time_in_queue": (metrics.arrival_time, metrics.first_scheduled_time),
            "time_to_first_token": (metrics.arrival_time, metrics.first_token_time),
            "time_in_model_prefill": (metrics.first_scheduled_time, metrics.first_token_time),
            "time_in_model_decode": (metrics.first_token_time, end),
            "time_in_model_inference": (metrics.first_scheduled_time, end),
            "e2e": (metrics.arrival_time, end),
        }
        asked = {name: getattr(body, name) for name in ("temperature", "top_p", "max_tokens", "n")}
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(answer.token_ids) for answer in output.outputs),
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.response.finish_reasons": [answer.finish_reason or "abort" for answer in output.outputs],
            **{f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None},
            **{
                f"gen_ai.latency.{name}": max(until - since, 0.0)
                for name, (since, until) in times.items()
                if since is not None and until is not None
            },
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._contexts.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int((wall - (now - metrics.arrival_time)) * 1e9),
        )
        span.end(int((wall - (now - end)) * 1e9))

    def close(self) -> None:
        """Send what was not sent yet."""
        self._provider.shutdown()


def otlp_tracer(model_name: str, endpoint: str, version: str) -> Tracer:
    """Return a tracer that sends its spans over OTLP's HTTP.

    Args:
        endpoint: such as `http://127.0.0.1:4318/v1/traces`.

    Raises:
        ArgumentError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ArgumentError(f"traces need {error.name}: pip install 'graphdecode[otel]'") from error
    return Tracer(model_name, OTLPSpanExporter(endpoint), version)
