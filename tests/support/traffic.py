"""A server process under load: client processes that sample, while others train and beat.

Owns the processes and what they report. Does not judge: tests and the benchmark do.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import psutil
from fake_server import FakeServer

CLIENTS = Path(__file__).parents[1] / "load" / "clients.py"


@dataclass
class Report:
    """What the clients saw, and the server's resident bytes before and after."""

    seconds: list[float]
    ids: list[str]
    wrong: list[int]
    training: dict
    heartbeats: dict
    before: int
    after: int


class Load:
    """`samples` requests, divided among `processes`, beside one process that trains and one that beats."""

    def __init__(self, server: FakeServer, folder: Path, seconds: float):
        folder.mkdir(parents=True, exist_ok=True)
        self._server, self._until, self._seconds = server, folder / "until", seconds
        self._clients: list[subprocess.Popen] = []
        self.memory = psutil.Process(server.process.pid).memory_info

    def run(self, samples: int, processes: int) -> Report:
        """Raises when a client fails or takes too long; no client outlives the call."""
        before, share = self.memory().rss, samples // processes
        try:
            background = [self._start(what, "--until", str(self._until)) for what in ("training", "heartbeats")]
            ranges = [("--first", str(n * share), "--count", str(share)) for n in range(processes)]
            clients = [self._start("samples", *options) for options in ranges]
            answers = [self._finish(client) for client in clients]
            self._until.touch()
            training, heartbeats = (self._finish(client) for client in background)
        finally:
            for client in self._clients:
                client.kill()
                client.wait()
        joined = {key: [entry for answer in answers for entry in answer[key]] for key in ("seconds", "ids", "wrong")}
        return Report(**joined, training=training, heartbeats=heartbeats, before=before, after=self.memory().rss)

    def _start(self, what: str, *options: str) -> subprocess.Popen:
        command = [sys.executable, str(CLIENTS), what, self._server.url, *options]
        client = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._clients.append(client)
        return client

    def _finish(self, client: subprocess.Popen) -> dict:
        output, _ = client.communicate(timeout=self._seconds)
        assert client.returncode == 0, f"a client ended with {client.returncode}"
        return json.loads(output.splitlines()[-1])
