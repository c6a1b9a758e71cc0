"""A real server on SmolLM2, as a user starts it, and unmodified cookbook recipes against it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from real_server import start_server, stop_server

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client_examples"))
import run as launcher  # noqa: E402


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.recipes)


@dataclass
class Result:
    """What a recipe left: one dict a step of metrics, and its checkpoints by name."""

    metrics: list[dict]
    checkpoints: dict[str, dict]

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.metrics if key in row]


@dataclass
class Recipes:
    url: str
    folder: Path

    def run(self, name: str, *flags: str, timeout: float, label: str | None = None) -> Result:
        """Run a recipe to its end in the client's environment; any exit code but 0 fails the test with its output."""
        log_path = self.folder / "logs" / (label or name)
        output = self.folder / f"{label or name}.log"
        with open(output, "w") as file:
            process = launcher.launch(name, log_path, self.url, self.folder / "work", list(flags),
                                      stdout=file, stderr=subprocess.STDOUT)
            try:
                code = process.wait(timeout=timeout)
            finally:
                process.kill()
        assert code == 0, output.read_text()[-4000:]
        metrics = [json.loads(line) for line in (log_path / "metrics.jsonl").read_text().splitlines()]
        records = [json.loads(line) for line in (log_path / "checkpoints.jsonl").read_text().splitlines()]
        final = [r for r in records if r["name"] == "final"]
        assert len(final) == 1 and final[0]["state_path"].startswith("tinker://") and final[0]["sampler_path"]
        return Result(metrics, {r["name"]: r for r in records})


# Not for the session: its end would fall upon the last test of another folder, and upon that test's time limit.
@pytest.fixture(scope="module")
def recipes(tmp_path_factory):
    assert launcher.CLIENT_PYTHON.exists(), "the client environment is missing; run client_examples/setup.sh"
    folder = tmp_path_factory.mktemp("recipes")
    process, url = start_server(folder)
    try:
        launcher.prepare_folder(folder / "work")
        yield Recipes(url, folder)
    finally:
        code = stop_server(process)
    assert code == 0, (folder / "server.log").read_text()[-3000:]


os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
