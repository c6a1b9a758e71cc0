"""The small admin as a process, for tests of what speaks with ROCK.

Owns the process. Does not judge anything.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from pathlib import Path

import httpx

PROGRAMS = Path(os.environ.get("HARBOR_TEST_SANDBOX_BIN", ""))


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Admin:
    def __init__(self, folder: Path):
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> Admin:
        script = Path(__file__).parents[1] / "small_admin.py"
        self.process = subprocess.Popen(
            [PROGRAMS / "python", script, str(self.port), str(self.folder)], stdout=open(self.folder / "admin.log", "w"),
            stderr=subprocess.STDOUT, env={**os.environ, "ROCK_TIME_ZONE": "Etc/UTC"})
        limit = time.monotonic() + 60
        while time.monotonic() < limit and self.process.poll() is None:
            try:
                if self.get("/") == {"message": "hello, ROCK!"}:
                    return self
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError((self.folder / "admin.log").read_text()[-3000:])

    def get(self, path: str):
        return httpx.get(self.url + path, trust_env=False, timeout=10).json()

    def state(self) -> dict:
        return self.get("/test/state")

    def alive(self) -> list[str]:
        return [name for name, sandbox in self.state()["sandboxes"].items() if sandbox["alive"]]

    def fail(self, **faults) -> None:
        httpx.post(f"{self.url}/test/faults", json=faults, trust_env=False, timeout=10)

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
