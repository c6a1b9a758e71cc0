"""This server and SkyRL's Tinker server with its JAX back-end, on one machine: the same calls, by the same old SDK.

Owns the two servers' processes and the section of docs/performance.md. The calls are `driver.py`'s.

    uv venv --python 3.11 PEER && uv pip install --python PEER/bin/python "skyrl[tinker,jax]==0.3.0" tinker==0.24.1 torch
    python bench/peers/compare.py PEER/bin/python [--rounds 2]

SkyRL starts its engine by `uv run`; a stand-in for uv runs it in PEER instead. With Python 3.11 pydantic refuses the SDK's
`typing.TypedDict`, so PEER needs a sitecustomize.py that imports typing and typing_extensions and says
`typing.TypedDict = typing_extensions.TypedDict`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import httpx
import psutil

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "support"), str(ROOT)]

from workload import MODEL, write_section  # noqa: E402

from real_server import free_port  # noqa: E402
from verl_tinker.models import resolve_model  # noqa: E402

HEADING = "## Beside SkyRL's Tinker server"
UV = '#!/bin/bash\nwhile [ $# -gt 0 ] && [ "$1" != -m ]; do shift; done\n{python} "$@"\n'


class Side:
    """One server on the tiny model, in its own process group."""

    def __init__(self, name: str, folder: Path, peer_python: Path):
        self.name, self.folder, self.port = name, folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.model = MODEL if name == "verl-tinker" else str(resolve_model("bundled:tiny"))
        self._peer_python = peer_python

    def _command(self) -> list[str]:
        if self.name == "verl-tinker":
            return [sys.executable, "-m", "verl_tinker.start", "--config", "configs/quick_start/cpu.yaml",
                    *(f"--set={s}" for s in (f"server.port={self.port}", f"server.checkpoint_dir={self.folder / 'checkpoints'}",
                                             "server.model_path=bundled:tiny"))]
        return ["uv", "run", "-m", "skyrl.tinker.api", "--base-model", self.model, "--backend", "jax", "--backend-config",
                json.dumps({"max_lora_adapters": 4, "max_lora_rank": 32}), "--host", "127.0.0.1", "--port", str(self.port),
                "--database-url", f"sqlite:///{self.folder / 'peer.db'}", "--checkpoints-base", str(self.folder / "checkpoints")]

    def start(self) -> float:
        """Seconds until a run can be created: SkyRL's health check says ok before its engine has begun."""
        shim = self.folder / "uv"
        shim.write_text(UV.format(python=self._peer_python))
        shim.chmod(0o755)
        log = self.folder / "server.log"
        # What an earlier start has said there counts no more.
        self._said = log.stat().st_size if log.exists() else 0
        began = time.monotonic()
        self.process = subprocess.Popen(
            self._command(), cwd=ROOT, start_new_session=True, stderr=subprocess.STDOUT,
            stdout=open(log, "a"),
            env={**os.environ, "PATH": f"{self.folder}:{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"})
        while time.monotonic() < began + 300:
            try:
                if httpx.get(f"{self.url}/api/v1/healthz", timeout=5, trust_env=False).status_code == 200 and self._has_begun():
                    return time.monotonic() - began
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError(log.read_text()[-3000:])

    def _has_begun(self) -> bool:
        return self.name == "verl-tinker" or "Starting background engine" in (self.folder / "server.log").read_text()[self._said:]

    def memory(self) -> float:
        """Proportional set size of all its processes, GB."""
        group = [self.process.pid, *(p.pid for p in psutil.Process(self.process.pid).children(recursive=True))]
        return sum(psutil.Process(pid).memory_full_info().pss for pid in group if psutil.pid_exists(pid)) / 1e9

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        children = psutil.Process(self.process.pid).children(recursive=True)
        os.killpg(self.process.pid, number)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
        for child in psutil.wait_procs(children, timeout=30)[1]:
            child.kill()


def driven(side: Side, peer_python: Path) -> dict[str, float]:
    done = subprocess.run([peer_python, HERE / "driver.py", side.url, side.model], capture_output=True, text=True, timeout=1800,
                          env={**os.environ, "TINKER_API_KEY": "tml-bench"})
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode:
        rows.append({"name": f"ended: {done.stderr.strip().splitlines()[-1][:120]}", "value": float("nan")})
    return {row["name"]: row["value"] for row in rows}


def round_of(name: str, peer_python: Path) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        side = Side(name, Path(folder), peer_python)
        found = {"start to ready, s": side.start()}
        try:
            found |= driven(side, peer_python)
            found["memory afterwards, GB"] = side.memory()
        finally:
            side.stop(signal.SIGKILL)
        found["killed, to ready again, s"] = side.start()
        side.stop()
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer_python", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {"verl-tinker": defaultdict(list), "SkyRL": defaultdict(list)}
    for _ in range(options.rounds):
        for name, rows in found.items():
            for what, value in round_of(name, options.peer_python.absolute()).items():
                rows[what].append(value)
                print(name, what, value, flush=True)
    write_section(section(found, options.rounds))


def section(found: dict[str, dict[str, list[float]]], rounds: int) -> str:
    lines = [
        HEADING, "",
        f"Made by `python bench/peers/compare.py` on {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}: medians of the rounds, in which",
        f"the two take turns (rounds: {rounds}). SkyRL 0.3.0 (`skyrl[tinker,jax]`, JAX on the processor), both driven by SDK 0.24.1, the tiny model,",
        "whose weights are float32, LoRA rank 32, defaults otherwise. \"First\" is the first call of a shape: JAX compiles then.", "",
        "| | verl-tinker | SkyRL |", "|---|---|---|"]
    names = list(dict.fromkeys([*found["verl-tinker"], *found["SkyRL"]]))
    for what in names:
        values = [statistics.median(rows[what]) if rows.get(what) else None for rows in found.values()]
        lines.append(f"| {what} | " + " | ".join("-" if v is None else f"{v:.3g}" if v < 1000 else f"{v:,.0f}" for v in values) + " |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
