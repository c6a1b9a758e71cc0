"""Prometheus metrics of one server: what it does, counted as it happens, and what it holds, read when it is asked.

Owns the names and their labels. Labels never name users, runs or paths, so that their number is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, Counter, GCCollector, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric

from verl_tinker import __version__
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.machine import Memory
from verl_tinker.core.errors import EngineError
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service
from verl_tinker.core.watch import Watcher

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_STATES = ("starting", "ok", "failed")

router = APIRouter()


@router.get("/metrics", response_class=Response)
async def metrics(request: Request, caller: CallerDep) -> Response:
    """All metrics, in the format that the scraper asks for. Needs a key where the server has keys; works while it starts."""
    found: Metrics = request.app.state.metrics
    found.measured(await request.app.state.machine.memory())
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(found.registry), media_type=content_type)


class Metrics(Watcher):
    """One registry for one service."""

    def __init__(self, service: Service):
        self.registry = registry = CollectorRegistry()
        self.waits = Histogram("verl_tinker_operation_wait_seconds", "Time from the acceptance of an operation to its begin",
                               ["kind"], registry=registry, buckets=_SECONDS)
        self.runs = Histogram("verl_tinker_operation_run_seconds", "Time from the begin of an operation to its end",
                              ["kind", "outcome"], registry=registry, buckets=_SECONDS)
        self.calls = Histogram("verl_tinker_engine_call_seconds", "A call of the engine: trainer, sampler, transfers",
                               ["call", "outcome"], registry=registry, buckets=_SECONDS)
        self.requests = Histogram("verl_tinker_http_request_seconds", "Time of an HTTP request; long polls are such too",
                                  ["method", "route", "status"], registry=registry, buckets=_SECONDS)
        self.trained = Counter("verl_tinker_trained_tokens", "Tokens that went through forward_backward or forward",
                               ["call"], registry=registry)
        self.sampled = Counter("verl_tinker_sampled_tokens", "Tokens that were sampled", registry=registry)
        self.prompts = Counter("verl_tinker_prompt_tokens", "Tokens of samples' prompts", ["cached"], registry=registry)
        self._held = _Held(service)
        registry.register(self._held)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=registry)

    def measured(self, memory: Memory) -> None:
        """What the next scrape is to say of the machine."""
        self._held.workers, self._held.gpus = memory.workers, memory.gpus

    def accepted(self, future: Future) -> None:
        self._held.waiting[future.request_id] = future.kind

    def began(self, future: Future) -> None:
        self._held.waiting.pop(future.request_id, None)
        self._held.running[future.request_id] = future.kind
        self.waits.labels(future.kind).observe(future.began_at - future.accepted_at)

    def settled(self, future: Future) -> None:
        self._held.waiting.pop(future.request_id, None)
        self._held.running.pop(future.request_id, None)
        began = future.settled_at if future.began_at is None else future.began_at
        outcome = f"{future.error.category}_error" if future.error else "ok"
        self.runs.labels(future.kind, outcome).observe(future.settled_at - began)

    @contextmanager
    def engine_call(self, name: str) -> Iterator[None]:
        started, outcome = time.perf_counter(), "server_error"
        try:
            yield
            outcome = "ok"
        except Exception as error:
            outcome = "server_error" if isinstance(error, EngineError) else f"{getattr(error, 'category', 'server')}_error"
            raise
        finally:
            self.calls.labels(name, outcome).observe(time.perf_counter() - started)

    def engine_returned(self, name: str, arguments: tuple, result: Any) -> None:
        if name == "forward_backward":
            _, data, _, _, backward = arguments
            self.trained.labels(name if backward else "forward").inc(sum(len(datum.tokens) for datum in data))
        elif name == "sample":
            request = arguments[2]
            self.sampled.inc(sum(len(sequence.tokens) for sequence in result.sequences))
            cached = min(result.cache_hit_tokens, len(request.prompt))
            self.prompts.labels("yes").inc(cached)
            self.prompts.labels("no").inc(len(request.prompt) - cached)

    @contextmanager
    def http_request(self, scope: dict) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            route = getattr(scope.get("route"), "path", "none")
            status = str(scope.get("answered", "gone"))
            self.requests.labels(scope["method"], route, status).observe(time.perf_counter() - started)


class _Held:
    """What a server holds at the moment of a scrape."""

    def __init__(self, service: Service):
        self._service = service
        self.waiting: dict[str, str] = {}
        self.running: dict[str, str] = {}
        self.workers: dict[str, int] = {}
        self.gpus: list[tuple[str, int, int]] = []

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        service = self._service
        yield _gauge("build_info", "The version of the server", ["version"], {(__version__,): 1})
        phases = {(state,): int(state == service.health.status) for state in _STATES}
        yield _gauge("state", "1 for the state that the server is in", ["state"], phases)
        yield _gauge("operations_waiting", "Accepted operations that have not begun", ["kind"], _counted(self.waiting))
        yield _gauge("operations_running", "Operations that have begun and not ended", ["kind"], _counted(self.running))
        yield _gauge("futures", "Results that can be asked for, and operations that will have one", ["state"],
                     _keyed(service.futures.counts()))
        yield _gauge("result_bytes", "Size of the results that are kept", ["place"], _keyed(service.futures.bytes_kept()))
        live = service.runs.all()
        parked = sum(run.parked is not None for run in live)
        yield _gauge("training_runs", "Live training runs", ["place"], {("memory",): len(live) - parked, ("disk",): parked})
        yield _gauge("weight_versions", "Versions that can be sampled beside the base model", [],
                     {(): len(service.versions.all())})
        sessions = sum(not service.sessions.over(session) for session in service.sessions.all())
        yield _gauge("sessions", "Sessions that go on", [], {(): sessions})
        yield CounterMetricFamily("verl_tinker_weight_mismatches", "Samples that other weights answered than were asked "
                                  "for; each was refused", value=service.sampling.mismatches)
        yield _gauge("worker_memory_bytes", "Resident memory of the processes that this server started, by their name",
                     ["process"], _keyed(self.workers))
        used = {(gpu,): used for gpu, used, _ in self.gpus}
        yield _gauge("gpu_memory_used_bytes", "Used memory of each GPU of this machine", ["gpu"], used)
        total = {(gpu,): total for gpu, _, total in self.gpus}
        yield _gauge("gpu_memory_total_bytes", "Memory of each GPU of this machine", ["gpu"], total)


def _gauge(name: str, text: str, labels: list[str], values: dict[tuple, float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"verl_tinker_{name}", text, labels=labels)
    for key, value in values.items():
        family.add_metric(list(key), value)
    return family


def _keyed(values: dict[str, float]) -> dict[tuple, float]:
    return {(key,): value for key, value in values.items()}


def _counted(kinds: dict[str, str]) -> dict[tuple, float]:
    counts: dict[tuple, float] = {}
    for kind in kinds.values():
        counts[kind,] = counts.get((kind,), 0) + 1
    return counts
