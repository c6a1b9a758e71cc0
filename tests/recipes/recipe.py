"""Cookbook recipes as processes of their own, and what they leave.

Owns the processes. Does not judge numbers: tests do.
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

import run as launcher
from reference import Reference


@dataclass
class Result:
    """What a recipe left: one dict a step of metrics, and its checkpoints by name."""

    metrics: list[dict]
    checkpoints: dict[str, dict]

    @classmethod
    def read(cls, logs: Path) -> Result:
        metrics = [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]
        records = [json.loads(line) for line in (logs / "checkpoints.jsonl").read_text().splitlines()]
        final = [r for r in records if r["name"] == "final"]
        assert len(final) == 1 and final[0]["state_path"].startswith("tinker://") and final[0]["sampler_path"]
        return cls(metrics, {r["name"]: r for r in records})

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.metrics if key in row]

    def state(self, name: str = "final") -> str:
        return self.checkpoints[name]["state_path"]

    def sampler(self, name: str = "final") -> str:
        return self.checkpoints[name]["sampler_path"]


@dataclass
class Running:
    """A recipe's process, the folder of its logs and the file of its output."""

    process: subprocess.Popen
    logs: Path
    output: Path

    def finish(self, timeout: float) -> Path:
        """Wait for its end and return its logs; any exit code but 0 fails the test with its output."""
        try:
            code = self.process.wait(timeout=timeout)
        finally:
            self.process.kill()
        assert code == 0, self.output.read_text()[-4000:]
        return self.logs

    def steps(self) -> int:
        file = self.logs / "metrics.jsonl"
        return file.read_text().count("\n") if file.exists() else 0


@dataclass
class Recipes:
    url: str
    folder: Path
    reference: Reference

    def start(self, name: str, *flags: str, label: str | None = None, url: str | None = None) -> Running:
        """Start a recipe in the client's environment. `url`: what stands between it and the server."""
        logs, output = self.folder / "logs" / (label or name), self.folder / f"{label or name}.log"
        with open(output, "w") as file:
            process = launcher.launch(name, logs, url or self.url, self.folder / "work", list(flags),
                                      stdout=file, stderr=subprocess.STDOUT)
        return Running(process, logs, output)

    def run(self, name: str, *flags: str, timeout: float, label: str | None = None, url: str | None = None) -> Result:
        """Run a recipe to its end."""
        return Result.read(self.start(name, *flags, label=label, url=url).finish(timeout))
