"""One span for each prompt, with vLLM's attributes."""

import pytest
from command_line import run_python
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from graphdecode.config import ConfigError, ServerConfig
from graphdecode.engine import RequestMetrics
from graphdecode.server.protocol import Completion
from graphdecode.server.telemetry import Tracer, otlp_tracer
from graphdecode.text.input_processor import ParentRequest
from graphdecode.text.outputs import CompletionOutput, RequestOutput

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def order(metrics: RequestMetrics, finish_reason: str | None) -> ParentRequest:
    answers = [CompletionOutput(index, token_ids=[7, 8], finish_reason=finish_reason) for index in range(2)]
    return ParentRequest(RequestOutput(0, "a secret", [1, 2, 3], answers, metrics), [])


def test_a_span_has_vllms_attributes_the_callers_trace_and_nothing_of_the_text() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("demo", exporter)
    metrics = RequestMetrics(10.0, first_scheduled_time=10.5, first_token_time=11.0, finished_time=13.0)
    body = Completion(prompt="a secret", temperature=0.5, n=2)
    tracer.trace("cmpl-1", order(metrics, "stop"), body, {"traceparent": PARENT})
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert (span.name, span.kind) == ("llm_request", SpanKind.SERVER)
    assert format(span.context.trace_id, "032x") == PARENT.split("-")[1]
    assert format(span.parent.span_id, "016x") == PARENT.split("-")[2]
    assert span.end_time - span.start_time == pytest.approx(3e9, abs=1e3)
    attributes = dict(span.attributes)
    assert attributes == {
        "gen_ai.response.model": "demo",
        "gen_ai.request.id": "cmpl-1",
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.n": 2,
        "gen_ai.usage.prompt_tokens": 3,
        "gen_ai.usage.completion_tokens": 4,
        "gen_ai.usage.num_sequences": 2,
        "gen_ai.response.finish_reasons": ("stop", "stop"),
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.0,
        "gen_ai.latency.time_in_model_prefill": 0.5,
        "gen_ai.latency.time_in_model_decode": 2.0,
        "gen_ai.latency.time_in_model_inference": 2.5,
        "gen_ai.latency.e2e": 3.0,
    }
    assert "secret" not in span.to_json()


def test_a_prompt_that_never_began_has_a_span_without_the_times_it_did_not_see() -> None:
    exporter = InMemorySpanExporter()
    tracer = Tracer("demo", exporter)
    tracer.trace("cmpl-2", order(RequestMetrics(10.0), None), Completion(prompt="x"), {"traceparent": "nonsense"})
    tracer.close()
    (span,) = exporter.get_finished_spans()
    assert span.parent is None
    assert span.attributes["gen_ai.response.finish_reasons"] == ("abort", "abort")
    assert [name for name in span.attributes if "latency" in name] == ["gen_ai.latency.e2e"]


def test_an_endpoint_makes_a_tracer_and_a_wrong_one_is_refused() -> None:
    otlp_tracer("demo", "http://127.0.0.1:9/v1/traces", "1").close()
    with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
        ServerConfig(otlp_traces_endpoint="nowhere")


def test_opentelemetry_is_imported_only_for_traces() -> None:
    code = "import sys, graphdecode.server.service; print('opentelemetry' in sys.modules)"
    assert run_python(code).strip() == "False"
