"""One environment for each SDK version, made on demand and kept in `.matrix/`, and the driver's run in it.

Owns the environments. Does not judge what the driver saw.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".matrix"
DRIVER = HERE / "driver.py"
REQUIREMENTS = HERE / "requirements.txt"
VERSIONS = (HERE / "versions.txt").read_text().split()


def python_of(version: str) -> Path:
    """The interpreter of a version's environment; installs it where it is not there or not up to date."""
    folder = FOLDER / version
    wanted = hashlib.sha256(f"{ROOT} {version} {sys.version} {REQUIREMENTS.read_text()}".encode()).hexdigest()
    stamp, python = folder / "installed", folder / "bin" / "python"
    FOLDER.mkdir(exist_ok=True)
    with open(FOLDER / f"{version}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == wanted):
            _install(version, folder, python)
            stamp.write_text(wanted)
    return python


def drive(version: str, url: str) -> dict:
    """What the driver saw; its own output is the error when it fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    done = subprocess.run(
        [python_of(version), DRIVER, url],
        env={**environment, "TINKER_API_KEY": "tml-test", "TINKER_PROJECT_ID": "matrix"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, f"tinker {version} failed:\n{done.stderr[-6000:]}"
    said = json.loads(done.stdout)
    assert said["sdk"] == version
    return said["seen"]


def _install(version: str, folder: Path, python: Path) -> None:
    wheels = os.environ.get("PIP_FIND_LINKS", "").split()
    # With a local wheel folder torch comes from there; otherwise uv knows where the CPU builds are.
    torch = [part for path in wheels for part in ("--find-links", path)] or ["--torch-backend", "cpu"]
    _uv("venv", "--clear", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--python", str(python), "--no-deps", *torch, "-r", str(REQUIREMENTS), f"tinker=={version}")


def _uv(*arguments: str) -> None:
    done = subprocess.run(
        [Path(sys.executable).parent / "uv", "--quiet", *arguments],
        env={"UV_HTTP_TIMEOUT": "300", **os.environ},
        capture_output=True,
        text=True,
        timeout=540,
    )
    if done.returncode:
        raise RuntimeError(f"uv {' '.join(arguments)} failed: {done.stderr[-2000:]}")
