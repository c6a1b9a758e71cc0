"""The FastAPI app: the routers under /api/v1 around one service.

Owns the assembly. Does not start the engine or the process: `verl_tinker.start` does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from opentelemetry.sdk.trace import TracerProvider

from verl_tinker.api import (
    dashboard,
    describe,
    errors,
    flags,
    metrics,
    openai,
    routes_catalog,
    routes_external,
    routes_futures,
    routes_server,
    routes_sessions,
    routes_training,
    tracing,
)
from verl_tinker.api.codec import WireCodec
from verl_tinker.api.machine import Machine
from verl_tinker.api.requests import Watched
from verl_tinker.chat import Tokenizers
from verl_tinker.core.access import Keys
from verl_tinker.core.service import Service


def create_app(
    service: Service,
    *,
    allow_shutdown: bool = False,
    on_shutdown: Callable[[], Awaitable[None] | None] = lambda: None,
    poll_seconds: float = routes_futures.POLL_SECONDS,
    changed_flags: Mapping[str, Any] = {},
    keys: Keys | None = None,
    tokenizers: Tokenizers | None = None,
    tracer_provider: TracerProvider | None = None,
) -> FastAPI:
    """The app can serve before the engine is ready: it answers health checks, and 503 to the rest.

    The app's own shutdown closes the service. Long polls hold connections open until their futures end, so
    whoever stops the server calls `await service.close()` first and lets the HTTP server drain after it.
    Without `keys` everybody may call and sees everything. `changed_flags`: flags of client/config and
    client/dynamic_config that differ from `verl_tinker.api.flags`.
    Without `tokenizers` OpenAI's routes refuse text. Without `tracer_provider` OpenTelemetry's variables decide whether it
    traces.
    """
    app = FastAPI(title="verl-tinker", lifespan=_lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    _add_watchers(app, service, tracer_provider or tracing.provider_from_environment())
    service.futures.codec = WireCodec()
    app.state.keys = keys
    app.state.tokenizers = tokenizers
    app.state.allow_shutdown = allow_shutdown
    app.state.on_shutdown = on_shutdown
    app.state.poll_seconds = poll_seconds
    app.state.client_config, app.state.dynamic_config = flags.chosen(changed_flags)
    # Two at once keep the memory of hostile or merely big bodies within bounds.
    app.state.decompressing = asyncio.Semaphore(2)
    _add_routes(app)
    errors.install(app)
    # Added last, so that it goes around all else.
    app.add_middleware(Watched, watchers=service.watchers)
    describe.install(app)
    return app


def _add_watchers(app: FastAPI, service: Service, tracer_provider: TracerProvider | None) -> None:
    app.state.machine = Machine()
    app.state.metrics = metrics.Metrics(service)
    service.watchers.add(app.state.metrics)
    app.state.tracer_provider = tracer_provider
    if tracer_provider is not None:
        service.watchers.add(tracing.Traces(tracer_provider))


def _add_routes(app: FastAPI) -> None:
    # Routes are tried in this order: those that are asked most come first.
    for router in (
        routes_futures.open_router,
        routes_futures.router,
        routes_training.router,
        routes_server.open_router,
        routes_external.open_router,
        dashboard.router,
        routes_server.router,
        routes_sessions.router,
        routes_catalog.router,
        routes_external.router,
    ):
        app.include_router(router, prefix="/api/v1")
    for prefix in openai.PREFIXES:
        app.include_router(openai.router, prefix=prefix)
    app.include_router(metrics.router)
    app.include_router(dashboard.page_router)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    yield
    await app.state.service.close()
    if app.state.tracer_provider is not None:
        # What has not been sent yet goes out now.
        await asyncio.to_thread(app.state.tracer_provider.shutdown)
