"""What a run of harbor_env printed and left, for tests that start it as a command.

Owns nothing: it reads.
"""

from __future__ import annotations

import json
from pathlib import Path


class Run:
    """`output` is the command's own, `code` its exit status."""

    def __init__(self, code: int, output: str):
        self.code, self.output = code, output
        lines = [line for line in output.splitlines() if line.startswith("Run directory: ")]
        self.directory = Path(lines[0].partition(": ")[2]) if lines else None

    @property
    def log(self) -> str:
        return (self.directory / "client.log").read_text()

    @property
    def exit_status(self) -> dict:
        return json.loads((self.directory / "exit-status.json").read_text())

    @property
    def results(self) -> Path:
        (only,) = (self.directory / "results").iterdir()
        return only

    def read(self, name: str) -> dict:
        return json.loads((self.results / name).read_text())
