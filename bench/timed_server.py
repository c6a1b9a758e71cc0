"""A server with an engine that does nothing, which notes how long each command was in its own hands.

Owns the moments: last byte of the request, the engine's call and return, first byte of the reply. The queue is left out. Does not
make requests or write pages: `requests` does.

    python bench/timed_server.py --port N --folder DIR
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import time
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import psutil
import uvicorn
import workload  # noqa: F401  puts the repository on the path
from starlette.responses import JSONResponse

import fake_engine
from fake_engine import FakeEngine

from verl_tinker.api.app import create_app
from verl_tinker.api.limits import BoundedProtocol
from verl_tinker.core.service import Service
from verl_tinker.core.watch import Watcher

_request: ContextVar[dict] = ContextVar("request")
_operation: ContextVar[Any] = ContextVar("operation")


class Moments(Watcher):
    """`rows`: [kind, milliseconds before the engine, milliseconds after it] of each operation. Times of `time.monotonic`."""

    def __init__(self):
        self.rows: list[tuple[str, float, float]] = []
        # The last byte of its request; then the milliseconds that the server took before the engine, and the engine's return.
        self._arrived: dict[str, float] = {}
        self._worked: dict[str, tuple[str, float, float]] = {}

    def accepted(self, future) -> None:
        self._arrived[future.request_id] = _request.get({}).get("arrived", future.accepted_at)

    def began(self, future) -> None:
        _operation.set(future)

    @contextmanager
    def engine_call(self, name):
        future, called = _operation.get(None), time.monotonic()
        try:
            yield
        finally:
            if future is not None:
                before = future.accepted_at - self._arrived.pop(future.request_id, future.accepted_at) + called - future.began_at
                self._worked[future.request_id] = future.kind, before, time.monotonic()

    def replied(self, request_id: str, polled: float) -> None:
        kind, before, returned = self._worked.pop(request_id, (None, 0.0, 0.0))
        if kind is not None:
            self.rows.append((kind, 1000 * before, 1000 * (time.monotonic() - max(returned, polled))))


class Timed:
    """Around the whole app. GET /bench reports; /bench/hold keeps samples in the engine until /bench/release, and
    /bench/takes/SECONDS says how long each call of the engine takes."""

    def __init__(self, app, moments: Moments, engine: FakeEngine):
        self._app, self._moments, self._engine = app, moments, engine

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith("/bench"):
            if scope["path"] == "/bench/hold":
                self._engine.hold.add("sample")
            elif scope["path"] == "/bench/release":
                self._engine.hold.clear()
            elif scope["path"].startswith("/bench/takes/"):
                self._engine.delay = float(scope["path"].rpartition("/")[2])
            await JSONResponse(self._report())(scope, receive, send)
            return
        request: dict = {}
        _request.set(request)
        body = bytearray()

        async def receive_timed():
            message = await receive()
            body.extend(message.get("body", b""))
            if message["type"] == "http.request" and not message.get("more_body"):
                request["arrived"] = time.monotonic()
            return message

        async def send_timed(message):
            if message["type"] == "http.response.start" and scope["path"].endswith("/retrieve_future"):
                self._moments.replied(json.loads(body)["request_id"], request["arrived"])
            await send(message)

        await self._app(scope, receive_timed, send_timed)

    def _report(self) -> dict:
        rows, self._moments.rows = self._moments.rows, []
        process = psutil.Process(os.getpid())
        return {"rows": rows, "resident": process.memory_info().rss, "cpu": sum(process.cpu_times()[:2])}


async def serve(port: int, folder: Path) -> None:
    fake_engine.CONTEXT = 4096
    engine = FakeEngine()
    service = Service(engine, folder, max_runs=1000, max_waiting_samples=20000)
    app = create_app(service, poll_seconds=300.0)
    moments = Moments()
    service.watchers.add(moments)
    config = uvicorn.Config(Timed(app, moments, engine), http=BoundedProtocol, port=port, log_level="warning", backlog=16384,
                            limit_concurrency=None)
    tasks = [asyncio.create_task(service.start()), asyncio.create_task(service.keep_house(1.0))]
    await uvicorn.Server(config).serve()
    for task in tasks:
        task.cancel()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.port, options.folder))
