"""A server process with the fake engine, for tests that kill it, load it or run beside it.

Owns the process. Does not judge anything: tests do.

    python tests/support/fake_server.py --folder DIR [--port N] [--delay SECONDS] [--keys FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]


async def serve(options: argparse.Namespace) -> None:
    import fake_engine
    import uvicorn
    from fake_engine import FakeEngine

    from verl_tinker.api.app import create_app
    from verl_tinker.api.limits import BoundedProtocol
    from verl_tinker.core.access import Keys
    from verl_tinker.core.futures import Limits
    from verl_tinker.core.service import Service

    fake_engine.CONTEXT, fake_engine.VOCAB = options.context, options.vocab
    engine = FakeEngine(delay=options.delay)
    service = Service(
        engine, options.folder, max_runs=1000, session_timeout_s=options.session_timeout,
        max_waiting_samples=options.max_waiting_samples, limits=Limits(count=options.kept_results))
    keys = Keys(options.keys) if options.keys else None
    app = create_app(service, keys=keys, poll_seconds=options.poll_seconds)
    config = uvicorn.Config(app, http=BoundedProtocol, port=options.port, log_level="warning", backlog=4096)
    http = uvicorn.Server(config)
    tasks = [asyncio.create_task(service.start()), asyncio.create_task(service.keep_house(1.0))]
    await http.serve()
    for task in tasks:
        task.cancel()


class FakeServer:
    """The process, seen from a test."""

    def __init__(self, folder: Path, *arguments: str):
        self.folder, self.arguments = folder, arguments
        self.process: subprocess.Popen | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> FakeServer:
        command = [sys.executable, __file__, "--folder", str(self.folder), "--port", str(self.port), *self.arguments]
        self.process = subprocess.Popen(command)
        end = time.monotonic() + 60
        while time.monotonic() < end:
            assert self.process.poll() is None, "the server ended by itself"
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/api/v1/healthz", timeout=5, verify=False).status_code == 200:
                    return self
            time.sleep(0.05)
        raise AssertionError("the server did not become ready")

    def kill(self) -> None:
        """As `kill -9` does: nothing is told to anybody."""
        if self.process and self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(15)
            self.kill()

    def http(self, key: str = "tml-test", timeout: float = 60.0) -> httpx.Client:
        return httpx.Client(base_url=f"{self.url}/api/v1", timeout=timeout, verify=False, headers={"X-API-Key": key})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds that each call of the engine takes")
    parser.add_argument("--keys", type=Path, help="a file of API keys")
    parser.add_argument("--poll-seconds", type=float, default=25.0)
    parser.add_argument("--max-waiting-samples", type=int, default=20_000)
    parser.add_argument("--kept-results", type=int, default=20_000)
    parser.add_argument("--session-timeout", type=float, default=900.0)
    parser.add_argument("--context", type=int, default=64, help="the longest sequence in tokens")
    parser.add_argument("--vocab", type=int, default=1000)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
