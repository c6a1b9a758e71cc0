"""OpenTelemetry traces: a span for each request, for the wait and the run of what it began, and for each call of the engine.

Owns the spans. Active only where OpenTelemetry's own environment variables ask for it; keeps no global provider, so that
two apps in one process trace apart.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from importlib.metadata import entry_points
from typing import Any

from opentelemetry import context, propagate, trace
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from verl_tinker import __version__
from verl_tinker.core.errors import UserError
from verl_tinker.core.futures import Future
from verl_tinker.core.watch import Watcher

_ASKING = ("OTEL_TRACES_EXPORTER", "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_PROTOCOLS = {"http/protobuf": "otlp_proto_http", "grpc": "otlp_proto_grpc"}
# The run that the present task is carrying out, above the calls of the engine that it makes.
_running: ContextVar[Span | None] = ContextVar("verl_tinker_running", default=None)


def provider_from_environment(environ: Mapping[str, str] = os.environ) -> TracerProvider | None:
    """The provider that the variables ask for, None where they ask for none; UserError for an exporter that is not there."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or not any(environ.get(name) for name in _ASKING):
        return None
    names = [name.strip() for name in (environ.get("OTEL_TRACES_EXPORTER") or "otlp").split(",")]
    if names == ["none"]:
        return None
    # The service's name of OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES counts more than ours.
    provider = TracerProvider(resource=Resource({SERVICE_NAME: "verl-tinker"}).merge(_given(environ)))
    for name in names:
        provider.add_span_processor(BatchSpanProcessor(_exporter(name, environ)))
    return provider


def _given(environ: Mapping[str, str]) -> Resource:
    named = environ.get("OTEL_SERVICE_NAME") or SERVICE_NAME in environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    resource = Resource.create()
    if named:
        return resource
    return Resource({key: value for key, value in resource.attributes.items() if key != SERVICE_NAME})


def _exporter(name: str, environ: Mapping[str, str]) -> SpanExporter:
    entry = name
    if name == "otlp":
        protocol = (environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
                    or "http/protobuf")
        entry = _PROTOCOLS.get(protocol, protocol)
    found = next(iter(entry_points(group="opentelemetry_traces_exporter", name=entry)), None)
    if found is None:
        raise UserError(f"OTEL_TRACES_EXPORTER: there is no exporter {entry!r} installed; use otlp over http/protobuf, "
                        "which is, or install the package that has it")
    return found.load()()


class Traces(Watcher):
    """Spans of one server, given to `provider`."""

    def __init__(self, provider: TracerProvider):
        self.provider = provider
        self._tracer = provider.get_tracer("verl_tinker", __version__)
        self._waits: dict[str, Span] = {}
        self._runs: dict[str, Span] = {}

    @contextmanager
    def http_request(self, scope: dict) -> Iterator[None]:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        attributes = {"http.request.method": scope["method"], "url.path": scope["path"], "url.scheme": scope["scheme"]}
        with self._tracer.start_as_current_span(
            scope["method"], propagate.extract(headers), SpanKind.SERVER, attributes) as span:
            try:
                yield
            finally:
                self._tell_answer(span, scope)

    def _tell_answer(self, span: Span, scope: dict) -> None:
        route, status = getattr(scope.get("route"), "path", None), scope.get("answered")
        if route:
            span.update_name(f"{scope['method']} {route}")
            span.set_attribute("http.route", route)
        if status is not None:
            span.set_attribute("http.response.status_code", status)
            if status >= 500:
                span.set_status(Status(StatusCode.ERROR))

    def accepted(self, future: Future) -> None:
        self._waits[future.request_id] = self._span(f"{future.kind} waits", future, context.get_current())

    def began(self, future: Future) -> None:
        wait = self._waits.pop(future.request_id, None)
        if wait is None:
            return
        wait.end()
        # Beside the wait, below what accepted it.
        parent = trace.set_span_in_context(trace.NonRecordingSpan(wait.parent)) if wait.parent else context.Context()
        run = self._span(f"{future.kind} runs", future, parent)
        self._runs[future.request_id] = run
        _running.set(run)

    def settled(self, future: Future) -> None:
        span = self._runs.pop(future.request_id, None) or self._waits.pop(future.request_id, None)
        if span is None:
            return
        if future.error is not None:
            span.set_attribute("error.type", type(future.error).__name__)
            span.set_status(Status(StatusCode.ERROR, future.error.told))
        span.end()
        if _running.get() is span:
            _running.set(None)

    @contextmanager
    def engine_call(self, name: str) -> Iterator[None]:
        run = _running.get()
        parent = context.Context() if run is None else trace.set_span_in_context(run)
        with self._tracer.start_as_current_span(f"engine {name}", parent):
            yield

    def _span(self, name: str, future: Future, parent: context.Context) -> Span:
        facts: dict[str, Any] = {"verl_tinker.request_id": future.request_id, "verl_tinker.kind": future.kind}
        if future.model_id:
            facts["verl_tinker.model_id"] = future.model_id
        return self._tracer.start_span(name, parent, attributes=facts)
