"""Traces: the spans of a request and of what it begins, as an OTLP collector gets them over HTTP."""

import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from data import forward_backward_body, sft
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode
from server import wait_until

from verl_tinker.api.tracing import provider_from_environment
from verl_tinker.core.errors import EngineError, UserError

pytestmark = pytest.mark.timeout(180)
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}


class Spans:
    """What a provider finished, by name."""

    def __init__(self):
        self.memory = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self.memory))

    def named(self, name):
        return [span for span in self.memory.get_finished_spans() if span.name == name]

    def one(self, name):
        wait_until(lambda: self.named(name))
        (span,) = self.named(name)
        return span


@pytest.fixture
def spans():
    return Spans()


@pytest.fixture
def traced(start, spans):
    return start(tracer_provider=spans.provider)


@pytest.fixture
def raw(traced):
    from raw import Raw

    with traced.http() as http:
        raw = Raw(http)
        raw.create()
        yield raw


def test_a_command_is_one_trace_from_its_request_to_the_engine(raw, spans):
    spans.memory.clear()
    body = forward_backward_body(raw.model, 1, [sft()], "cross_entropy", None)
    raw.http.post("/forward_backward", content=body, headers={"Content-Type": "application/x-protobuf", **PARENT})
    call = spans.one("engine forward_backward")
    request, waits, runs = (spans.one(name) for name in (
        "POST /api/v1/forward_backward", "forward_backward waits", "forward_backward runs"))
    assert {format(s.context.trace_id, "032x") for s in (request, waits, runs, call)} == {TRACE}
    assert format(request.parent.span_id, "016x") == "b7ad6b7169203331"
    assert waits.parent.span_id == runs.parent.span_id == request.context.span_id
    assert call.parent.span_id == runs.context.span_id
    assert waits.end_time <= runs.start_time <= call.start_time <= call.end_time <= runs.end_time
    assert request.attributes["http.response.status_code"] == 200
    assert request.attributes["http.route"] == "/api/v1/forward_backward"
    assert runs.attributes["verl_tinker.model_id"] == raw.model


def test_samples_at_once_keep_their_traces_apart(raw, spans):
    sampler = raw.base_sampler()
    spans.memory.clear()
    for request_id in [raw.sample(sampler, seq) for seq in range(8)]:
        raw.binary(request_id)
    wait_until(lambda: len(spans.named("engine sample")) == 8)
    runs = {span.context.span_id: span for span in spans.named("sample runs")}
    requests = {span.context.span_id: span for span in spans.named("POST /api/v1/asample")}
    for call in spans.named("engine sample"):
        assert runs[call.parent.span_id].parent.span_id in requests
    assert len({call.context.trace_id for call in spans.named("engine sample")}) == 8


def test_commands_of_two_requests_do_not_mix(traced, raw, spans):
    traced.engine.hold.add("forward_backward")
    spans.memory.clear()
    ids = [raw.forward_backward(1), raw.optim_step(2), raw.forward_backward(3)]
    traced.engine.hold.clear()
    for request_id in ids:
        raw.result(request_id)
    wait_until(lambda: len(spans.named("engine forward_backward")) == 2)
    runs = {span.context.span_id: span for span in spans.memory.get_finished_spans() if span.name.endswith("runs")}
    calls = [span for span in spans.memory.get_finished_spans() if span.name.startswith("engine")]
    assert [runs[call.parent.span_id].attributes["verl_tinker.request_id"] for call in calls] == ids


def test_errors_are_marked_with_their_reason(traced, raw, spans):
    traced.engine.fail["forward_backward"] = EngineError("worker 0 died")
    raw.result(raw.forward_backward(1))
    run = spans.one("forward_backward runs")
    assert run.status.status_code is StatusCode.ERROR and "worker 0 died" in run.status.description
    assert spans.one("engine forward_backward").status.status_code is StatusCode.ERROR
    with traced.http() as http:
        assert http.get("/training_runs/none").status_code == 404
    assert spans.one("GET /api/v1/training_runs/{run_id}").status.status_code is StatusCode.UNSET


def test_an_operation_that_never_begins_ends_its_wait(raw, spans):
    raw.post("forward", model_id="nobody:train:0", seq_id=1, forward_input={"data": [], "loss_fn": "cross_entropy"})
    assert spans.one("forward waits").status.status_code is StatusCode.ERROR
    assert not spans.named("forward runs")


@pytest.mark.parametrize("environ", [{}, {"OTEL_SERVICE_NAME": "x"}, {"OTEL_TRACES_EXPORTER": "none"},
                                     {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}])
def test_nothing_is_traced_unless_the_variables_ask(environ):
    assert provider_from_environment(environ) is None


def test_an_exporter_that_is_not_there_is_named():
    with pytest.raises(UserError, match="no exporter 'zipkin' installed"):
        provider_from_environment({"OTEL_TRACES_EXPORTER": "zipkin"})


@pytest.fixture
def collector():
    """An OTLP/HTTP receiver on loopback; `received` holds what was sent to it."""
    received = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            received.append((self.path, self.headers, ExportTraceServiceRequest.FromString(body)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.received = received
        threading.Thread(target=http.serve_forever, daemon=True).start()
        yield http
        http.shutdown()


@pytest.mark.parametrize("more, name", [
    ({}, "verl-tinker"), ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
    ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=ours,zone=a"}, "ours")])
def test_a_server_process_sends_its_spans_to_the_collector_of_the_variables(collector, tmp_path, more, name):
    """All is sent by the end of the process; the spans carry the name of the service."""
    from fake_server import HERE, FakeServer

    environ = {key: value for key, value in os.environ.items() if not key.startswith("OTEL_")}
    environ |= {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_port}",
                "OTEL_EXPORTER_OTLP_HEADERS": "who=me", "NO_PROXY": "127.0.0.1", **more}
    server = FakeServer(tmp_path)
    command = [sys.executable, str(Path(HERE) / "fake_server.py"), "--folder", str(tmp_path), "--port", str(server.port)]
    server.process = subprocess.Popen(command, env=environ)
    try:
        wait_until(lambda: _is_up(server.url), 120)
        with server.http() as http:
            http.post("/create_session", json={})
    finally:
        server.stop()
    resources = [resource for *_, message in collector.received for resource in message.resource_spans]
    spans = [span for resource in resources for scope in resource.scope_spans for span in scope.spans]
    assert "POST /api/v1/create_session" in {span.name for span in spans}
    attributes = {pair.key: pair.value.string_value for pair in resources[0].resource.attributes}
    assert attributes["service.name"] == name
    path, headers, _ = collector.received[0]
    assert path == "/v1/traces" and headers["who"] == "me"


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/v1/healthz", verify=False).status_code == 200
    except httpx.TransportError:
        return False
