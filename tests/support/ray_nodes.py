"""Ray nodes by Ray's own command line, several on one machine, on loopback.

Owns their processes and folders. Does not connect to them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
from real_server import free_port

from verl_tinker.engine.cpu.environment import driver_environment

ROOT = Path(__file__).resolve().parents[2]


class Node:
    """One node; without `address` it is the head."""

    def __init__(self, cpus: int, address: str | None = None):
        # Ray puts sockets below it, whose path may not exceed 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="vtn-", dir="/tmp"))
        self.port = free_port()
        self.address = address or f"127.0.0.1:{self.port}"
        place = [f"--address={address}"] if address else ["--head", f"--port={self.port}", "--include-dashboard=false"]
        self.process = subprocess.Popen(
            [str(Path(sys.executable).parent / "ray"), "start", "--block", *place, "--node-ip-address=127.0.0.1",
             f"--temp-dir={self.folder}", f"--num-cpus={cpus}", "--num-gpus=0", f"--object-store-memory={200 * 2**20}",
             "--disable-usage-stats"],
            env={**os.environ, **driver_environment(), "PYTHONPATH": str(ROOT)}, stdout=open(self.folder / "out", "w"),
            stderr=subprocess.STDOUT)

    def kill(self) -> None:
        """As if the machine had lost its power."""
        family = [*psutil.Process(self.process.pid).children(recursive=True), self.process]
        for member in family:
            member.kill()
        psutil.wait_procs(family[:-1], timeout=30)
        self.process.wait(timeout=30)
        self.remove()

    def stop(self) -> None:
        if self.process.poll() is None:
            family = psutil.Process(self.process.pid).children(recursive=True)
            self.process.terminate()
            self.process.wait(timeout=60)
            _, alive = psutil.wait_procs(family, timeout=30)
            assert not alive, [p.cmdline()[:3] for p in alive]
        self.remove()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
