"""One OpenTelemetry span for each prompt, with the attributes that vLLM gives its own: what reads those works here."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from graphdecode.errors import ArgumentError
from graphdecode.server.protocol import Generation
from graphdecode.text.intake import Order

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter


class Tracer:
    """Writes spans.

    Args:
        model_name: that is served.
        exporter: where spans go.
        version: of this package.
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
            request_id: of the response.
            order: of the prompt.
            body: of the request.
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
        model_name: that is served.
        endpoint: such as `http://127.0.0.1:4318/v1/traces`.
        version: of this package.

    Raises:
        ArgumentError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        raise ArgumentError(f"traces need {error.name}: pip install 'graphdecode[otel]'") from error
    return Tracer(model_name, OTLPSpanExporter(endpoint), version)
