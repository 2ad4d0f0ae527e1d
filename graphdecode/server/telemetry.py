"""Prometheus metrics with vLLM's names, and OpenTelemetry spans with vLLM's attributes."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from graphdecode.config import EngineConfig
from graphdecode.engine import EngineStats, RequestMetrics
from graphdecode.errors import ArgumentError
from graphdecode.server.engine_client import EngineClient
from graphdecode.server.messages import EngineStatus
from graphdecode.server.protocol import Generation
from graphdecode.text.input_processor import ParentRequest

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_STEP_SECONDS = (1e-4, 2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3, 8e-3, 0.016, 0.032, 0.064, 0.125, 0.25, 0.5, 1.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_COUNTS = (0, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_RECENT = 100  # steps and requests for medians
_REASONS = ("stop", "length", "abort", "error")
_COUNTERS = {
    "prompt_tokens": "Prompt tokens of started requests.",
    "generation_tokens": "Generated tokens.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "prompt_tokens_cached": "The same, of started requests.",
}
_DRAFT_COUNTERS = {
    "spec_decode_num_drafts": "Runs of drafts that were verified.",
    "spec_decode_num_draft_tokens": "Drafts that were verified.",
    "spec_decode_num_accepted_tokens": "Drafts that were accepted.",
}
_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": ("From arrival to the first token.", _SECONDS),
    "vllm:inter_token_latency_seconds": ("Between two tokens.", _STEP_SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean time per output token of a request.", _STEP_SECONDS),
    "vllm:e2e_request_latency_seconds": ("From arrival to the end.", _SECONDS),
    "vllm:request_queue_time_seconds": ("Waiting for a row.", _SECONDS),
    "vllm:request_prefill_time_seconds": ("From the row to the first token.", _SECONDS),
    "vllm:request_decode_time_seconds": ("From the first token to the last.", _SECONDS),
    "vllm:request_inference_time_seconds": ("From the row to the last token.", _SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "vllm:request_generation_tokens": ("Generated tokens of an output.", _TOKENS),
    "vllm:request_max_num_generation_tokens": ("Generated tokens of a request's longest output.", _TOKENS),
    "vllm:request_params_n": ("n of a request.", _COUNTS),
    "vllm:request_params_max_tokens": ("max_tokens of a request that has it.", _TOKENS),
    "vllm:request_num_preemptions": ("Preemptions of a request.", _COUNTS),
    "vllm:request_prefill_kv_computed_tokens": ("Prompt tokens that were not found in the prefix cache.", _TOKENS),
    "vllm:iteration_tokens_total": ("Computed prompt tokens and generated tokens of a step.", _TOKENS),
    "graphdecode:step_seconds": ("Time of a decode step.", _STEP_SECONDS),
    "graphdecode:launch_seconds": ("The host's time for a launch.", _STEP_SECONDS),
}
_PHASES = {  # vLLM's name in a span -> in a histogram
    "time_in_queue": "vllm:request_queue_time_seconds",
    "time_to_first_token": "vllm:time_to_first_token_seconds",
    "time_in_model_prefill": "vllm:request_prefill_time_seconds",
    "time_in_model_decode": "vllm:request_decode_time_seconds",
    "time_in_model_inference": "vllm:request_inference_time_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


def _phases(metrics: RequestMetrics, now: float) -> dict[str, float]:
    arrived, scheduled, first = metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time
    end = metrics.finished_time or now
    spans = (arrived, scheduled), (arrived, first), (scheduled, first), (first, end), (scheduled, end), (arrived, end)
    return {
        name: max(until - since, 0.0)
        for name, (since, until) in zip(_PHASES, spans, strict=True)
        if since is not None and until is not None
    }


class Metrics(Collector):
    """Counts and times of one served model."""

    def __init__(self, model_name: str, client: EngineClient, settings: EngineConfig) -> None:
        self.registry = CollectorRegistry()
        self.engine_status = EngineStatus(0, 0, 0, 0, 0, EngineStats())  # the latest
        self.last_steps: deque[float] = deque(maxlen=_RECENT)  # seconds
        self.last_first_tokens: deque[float] = deque(maxlen=_RECENT)  # seconds from arrival
        self.generated_tokens = 0  # since the start
        self.client = client
        self._label, self._settings = model_name, settings
        labels, registry = ["model_name"], self.registry
        self._counters = {
            name: Counter(f"vllm:{name}", text, labels, registry=registry).labels(model_name)
            for name, text in _COUNTERS.items()
        }
        success = Counter("vllm:request_success", "Outputs by finish reason.", [*labels, "finished_reason"],
                          registry=registry)  # fmt: skip
        self._success = {reason: success.labels(model_name, reason) for reason in _REASONS}
        self._histograms = {
            name: Histogram(name, text, labels, registry=registry, buckets=buckets).labels(model_name)
            for name, (text, buckets) in _HISTOGRAMS.items()
        }
        registry.register(self)

    def update(self, status: EngineStatus) -> None:
        """Take the engine's latest status."""
        self.engine_status = status
        self.last_steps.extend(status.stats.step_seconds)
        for seconds in status.stats.step_seconds:
            self._histograms["graphdecode:step_seconds"].observe(seconds)
        for seconds in status.stats.launch_seconds:
            self._histograms["graphdecode:launch_seconds"].observe(seconds)
        for tokens in status.stats.step_tokens:
            self._histograms["vllm:iteration_tokens_total"].observe(tokens)

    @contextlib.contextmanager
    def tracked(self, parents: list[ParentRequest]) -> Iterator[Callable[[], None]]:
        """Yield a function that counts new tokens of some prompts; the prompts are counted when the context ends."""
        outputs = [(state.output, parent.output.metrics) for parent in parents for state in parent.states]
        counted = [(0, 0.0)] * len(outputs)  # tokens, and when the last of them came

        def count_tokens() -> None:
            for index, (output, metrics) in enumerate(outputs):
                before, last = counted[index]
                new = len(output.token_ids) - before
                if new:
                    now = time.perf_counter()
                    counted[index] = before + new, now
                    self.generated_tokens += new
                    self._counters["generation_tokens"].inc(new)
                    gaps = new if before else new - 1  # the first tokens may come together
                    since = last if before else metrics.first_token_time or now
                    for _ in range(gaps):
                        self._histograms["vllm:inter_token_latency_seconds"].observe(max(now - since, 0.0) / gaps)

        try:
            yield count_tokens
        finally:
            for parent in parents:
                self._count(parent)

    def _count(self, parent: ParentRequest) -> None:
        output, metrics, histograms = parent.output, parent.output.metrics, self._histograms
        prompt = len(output.prompt_token_ids)
        self._counters["prefix_cache_queries"].inc(prompt)
        self._counters["prefix_cache_hits"].inc(metrics.num_cached_tokens)
        histograms["vllm:request_prompt_tokens"].observe(prompt)
        histograms["vllm:request_params_n"].observe(len(output.outputs))
        max_tokens = parent.children[0][0].sampling_params.max_tokens if parent.children else None
        if max_tokens is not None:
            histograms["vllm:request_params_max_tokens"].observe(max_tokens)
        longest = max(len(each.token_ids) for each in output.outputs)
        histograms["vllm:request_max_num_generation_tokens"].observe(longest)
        histograms["vllm:request_num_preemptions"].observe(metrics.num_preemptions)
        for each in output.outputs:
            self._success.get(each.finish_reason or "abort", self._success["error"]).inc()
            histograms["vllm:request_generation_tokens"].observe(len(each.token_ids))
        if metrics.first_scheduled_time is not None:
            self._counters["prompt_tokens"].inc(prompt)
            self._counters["prompt_tokens_cached"].inc(metrics.num_cached_tokens)
            histograms["vllm:request_prefill_kv_computed_tokens"].observe(prompt - metrics.num_cached_tokens)
        phases = _phases(metrics, time.perf_counter())
        for name, seconds in phases.items():
            histograms[_PHASES[name]].observe(seconds)
        if "time_to_first_token" in phases:
            self.last_first_tokens.append(phases["time_to_first_token"])
            if longest > 1:
                mean = phases["time_in_model_decode"] / (longest - 1)
                histograms["vllm:request_time_per_output_token_seconds"].observe(mean)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the engine's latest status."""
        status, stats, adapters = self.engine_status, self.engine_status.stats, self.engine_status.adapters
        usage, restarts = status.used_pages / max(status.total_pages, 1), self.client.restarts
        waiting = {"capacity": status.waiting - status.deferred, "deferred": status.deferred}
        accepted = dict(enumerate(stats.spec_decode_num_accepted_tokens_per_pos))
        gauges: tuple[tuple[str, str, Any], ...] = (
            ("vllm:num_requests_running", "Requests that have a row.", status.running),
            ("vllm:num_requests_waiting", "Requests that wait for a row.", status.waiting),
            ("vllm:kv_cache_usage_perc", "Share of the pages in use.", usage),
            ("graphdecode:padding_share", "Share of the computed rows that were padding.", stats.padding_share),
            (
                "vllm:num_requests_waiting_by_reason",
                "Requests that wait, for a row and pages (capacity) or a slot for their adapter (deferred).",
                ("reason", waiting),
            ),
        )
        counts = (
            ("vllm:num_preemptions", "Preemptions of rows.", status.preemptions),
            ("graphdecode:recaptures", "Restarts of the engine.", restarts),
            ("graphdecode:adapter_writes", "Adapters loaded into a slot.", adapters.writes),
            ("graphdecode:adapter_evictions", "Adapters evicted from a slot.", adapters.evictions),
            *((f"vllm:{name}", text, getattr(stats, name)) for name, text in _DRAFT_COUNTERS.items()),
            ("graphdecode:bucket_replays", "Steps of a bucket.", ("bucket", dict(sorted(stats.bucket_steps.items())))),
            ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts, by position.", ("position", accepted)),
            ("graphdecode:adapter_requests", "Requests by adapter.", ("lora_name", adapters.requests)),
        )
        for kind, families in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counts)):
            for name, text, value in families:  # a number, or a label and the number for each of its values
                label, values = value if isinstance(value, tuple) else (None, {None: value})
                family = kind(name, text, labels=["model_name", *filter(None, [label])])
                for which, number in values.items():
                    family.add_metric([self._label, *([] if label is None else [str(which)])], number)
                yield family
        if self.client.ready is not None:
            yield self._cache_info()

    def _cache_info(self) -> Metric:
        """Return the settings of the cache, with vLLM's names."""
        settings, rules = self._settings, self.client.rules
        info = {
            "model_name": self._label,
            "block_size": rules.page_size,
            "num_gpu_blocks": rules.capacity.total_num_pages,
            "cache_dtype": settings.kv_cache_dtype,
            "enable_prefix_caching": settings.prefix_cache,
            "gpu_memory_utilization": settings.buckets.memory_fraction,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Settings of the cache.", labels=[*info])
        family.add_metric([str(value) for value in info.values()], 1)
        return family

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class Tracer:
    """Writes spans to an exporter."""

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

    def trace(self, request_id: str, parent: ParentRequest, body: Generation, headers: Mapping[str, str]) -> None:
        """Write the span of a prompt that finished or was aborted, in the trace of a `traceparent` in its headers."""
        from opentelemetry.trace import SpanKind

        output, metrics = parent.output, parent.output.metrics
        now, wall = time.perf_counter(), time.time()
        requested = {name: getattr(body, name, None) for name in ("temperature", "top_p", "n")}  # none of a pooling
        requested["max_tokens"] = getattr(body, "most_tokens", None)
        attributes: dict[str, Any] = {
            "gen_ai.response.model": self._model_name,
            "gen_ai.request.id": request_id,
            "gen_ai.usage.prompt_tokens": len(output.prompt_token_ids),
            "gen_ai.usage.completion_tokens": sum(len(each.token_ids) for each in output.outputs),
            "gen_ai.usage.num_sequences": len(output.outputs),
            "gen_ai.response.finish_reasons": [each.finish_reason or "abort" for each in output.outputs],
            **{f"gen_ai.request.{name}": value for name, value in requested.items() if value is not None},
            **{f"gen_ai.latency.{name}": seconds for name, seconds in _phases(metrics, now).items()},
        }
        span = self._tracer.start_span(
            "llm_request",
            context=self._contexts.extract(headers),
            kind=SpanKind.SERVER,
            attributes=attributes,
            start_time=int((wall - (now - metrics.arrival_time)) * 1e9),
        )
        span.end(int((wall - (now - (metrics.finished_time or now))) * 1e9))

    def close(self) -> None:
        """Send the last spans."""
        self._provider.shutdown()


def otlp_tracer(model_name: str, endpoint: str, version: str) -> Tracer:
    """Return a tracer for an OTLP endpoint, such as `http://127.0.0.1:4318/v1/traces`."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ArgumentError(f"traces need {error.name}: pip install 'graphdecode[otel]'") from error
    return Tracer(model_name, OTLPSpanExporter(endpoint), version)
