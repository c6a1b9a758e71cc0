"""The real server as a user starts it, in a process of its own.

Owns the process. Does not make requests but for its health.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx

ROOT = Path(__file__).resolve().parents[2]
CPU_PRESET = "configs/quick_start/cpu.yaml"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_server(folder: Path, *overrides: str, port: int | None = None,
                 preset: str | Path = CPU_PRESET) -> tuple[subprocess.Popen, str]:
    """Start a preset and wait until it is ready; its output goes to server.log in `folder`."""
    port = port or free_port()
    flags = [f"--set={o}" for o in (f"server.port={port}", f"server.checkpoint_dir={folder / 'checkpoints'}", *overrides)]
    log = open(folder / "server.log", "w")
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_tinker.start", "--config", str(preset), *flags],
        cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until_ready(process, url, folder / "server.log")
    except BaseException:
        # Also when a test's time limit interrupts the wait: a server that is left behind keeps its memory.
        stop_server(process)
        raise
    return process, url


def wait_until_ready(process: subprocess.Popen, url: str, log: Path) -> None:
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        try:
            answer = httpx.get(f"{url}/api/v1/healthz", timeout=5, verify=False)
            if answer.status_code == 200:
                assert answer.json() == {"status": "ok", "phase": "ready"}
                return
            if answer.json().get("status") == "failed":
                break
        except httpx.TransportError:
            pass
        time.sleep(0.5)
    raise RuntimeError("the server did not become ready:\n" + log.read_text()[-3000:])


def stop_server(process: subprocess.Popen) -> int:
    process.send_signal(signal.SIGTERM)
    try:
        return process.wait(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
