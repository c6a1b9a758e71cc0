"""The environments that the tests of harbor_env need beside their own, made on demand in `.harbor/` by its set-up script.

Owns the call of the script and pytest's place among them. Does not run tests.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / ".harbor"
PYTEST = ("pytest", "pytest-timeout", "iniconfig", "pluggy", "packaging", "pygments")


def control_python() -> Path:
    """Python with the Tinker SDK, the cookbook, ROCK's SDK and the pytest of the calling environment."""
    python = FOLDER / "control-venv" / "bin" / "python"
    with _lock():
        _setup("control", "--without-services")
        wanted = [f"{name}=={version(name)}" for name in PYTEST]
        _run(ROOT / ".client-venv" / "bin" / "uv", "pip", "install", "--quiet", "--no-deps", "--python", python, *wanted)
    return python


def sandbox_bin() -> Path:
    """The folder with `rocklet` and `rock`, as they lie in a sandbox's image."""
    with _lock():
        _setup("sandbox")
    return FOLDER / "sandbox-venv" / "bin"


def _setup(*arguments: str) -> None:
    _run(ROOT / "harbor_env" / "setup.sh", *arguments)


def _run(*command) -> None:
    done = subprocess.run([str(part) for part in command], env={**os.environ, "TASK": str(FOLDER)}, capture_output=True,
                          text=True, timeout=540)
    assert done.returncode == 0, f"{command[0]} failed:\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"


class _lock:
    """One process at a time changes the environments."""

    def __enter__(self):
        FOLDER.mkdir(exist_ok=True)
        self.file = open(FOLDER / "lock", "w")
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_):
        self.file.close()
