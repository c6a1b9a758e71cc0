"""A real HTTP server around the fake engine, in a thread of the test process.

Owns start and stop. Does not judge answers: tests do.
"""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import uvicorn
from fake_engine import FakeEngine

from verl_tinker.api.app import create_app
from verl_tinker.api.limits import BoundedProtocol
from verl_tinker.core.service import Service


class Prompt(uvicorn.Server):
    """Looks ten times as often as uvicorn does whether it is to stop, for there are hundreds of servers to stop."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.01)


class TestServer:
    """`url` is the base URL, `engine` the fake, `service` the core behind it. `wrap` puts an app around the server's."""

    __test__ = False

    def __init__(self, checkpoint_dir, *, ready=True, allow_shutdown=True, poll_seconds=25.0, changed_flags={},
                 keys=None, tokenizers=None, engine=None, tracer_provider=None, wrap=lambda app: app, **options):
        self.engine = engine or FakeEngine()
        if not ready:
            self.engine.hold.add("start")
        self._checkpoint_dir, self._options, self._wrap = checkpoint_dir, options, wrap
        self._app_options = {"allow_shutdown": allow_shutdown, "poll_seconds": poll_seconds,
                             "changed_flags": changed_flags, "keys": keys, "tokenizers": tokenizers,
                             "tracer_provider": tracer_provider}
        # The protocol must be named: asyncio turns Nagle's algorithm off only for a socket that says TCP.
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        self._socket.bind(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self.shutdown_asked = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self._thread.start()
        wait_until(lambda: hasattr(self, "service") and self._http is not None and self._http.started)
        if ready:
            wait_until(lambda: self.service.health.status == "ok")

    async def _serve(self) -> None:
        self._http = None
        self.service = Service(self.engine, self._checkpoint_dir, **self._options)
        app = create_app(self.service, on_shutdown=self.shutdown_asked.set, **self._app_options)
        config = uvicorn.Config(self._wrap(app), http=BoundedProtocol, log_level="warning",
                                timeout_graceful_shutdown=2, timeout_keep_alive=90)
        self._http = Prompt(config)
        self.loop = asyncio.get_running_loop()
        starting = asyncio.create_task(self.service.start())
        await self._http.serve([self._socket])
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    def stop(self) -> None:
        if not self._thread.is_alive():
            return
        self.engine.hold.clear()
        asyncio.run_coroutine_threadsafe(self.service.close(), self.loop).result(5)
        self._http.should_exit = True
        self._thread.join(10)

    def http(self) -> httpx.Client:
        # Reading certificates for plain HTTP would take most of a client's time.
        return httpx.Client(base_url=f"{self.url}/api/v1", timeout=30, verify=False, headers={"X-API-Key": "tml-test"})


def wait_until(condition, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.01)


@contextmanager
def servers_in(folder: Path, **defaults: Any) -> Iterator[Callable[..., TestServer]]:
    """A function that starts servers, each with a folder of its own; they end together. Its options are laid over `defaults`,
    of which one that can be called is made anew for each server."""
    started: list[TestServer] = []

    def begin(**options: Any) -> TestServer:
        made = {name: value() if callable(value) else value for name, value in defaults.items() if name not in options}
        started.append(TestServer(folder / f"server-{len(started)}", **made, **options))
        return started[-1]

    try:
        yield begin
    finally:
        for server in started:
            server.stop()
