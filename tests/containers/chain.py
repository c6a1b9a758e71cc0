"""A $TASK folder made by the documented commands, with ROCK's own services, and what is asked of Docker beside them.

Owns the folder, the two services and the commands' calls. Nothing in it stands for anything else.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import httpx
import yaml
from harbor_runs import Run

ROOT = Path(__file__).resolve().parents[2]
HARBOR = ROOT / "harbor_env"
# Environments are kept between sessions, in the place that the other tests of harbor_env use.
KEPT = ROOT / ".harbor"
BASE, OUTER, ADMIN = "tinker-harbor-task:base", "tinker-harbor:local", "http://127.0.0.1:18080"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Two turns, and answers that fit the small model's context.
BUDGET = ("--context-tokens", "2048", "--input-tokens", "1500", "--output-tokens", "200", "--turns", "2")


def containers() -> list[str]:
    return docker("ps", "--all", "--format", "{{.Names}}").split()


def docker(*arguments: str, check: bool = True) -> str:
    return subprocess.run(["docker", *arguments], check=check, capture_output=True, text=True, timeout=300).stdout


def call(*command, env: dict[str, str] | None = None, timeout: float = 900, cwd: Path | str = "/") -> str:
    """The command's output; an error shows its end."""
    done = subprocess.run([str(part) for part in command], env={**os.environ, **(env or {})}, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=timeout, cwd=cwd)
    assert done.returncode == 0, f"{' '.join(map(str, command))}:\n{done.stdout[-4000:]}"
    return done.stdout


class Chain:
    """`agent` and `image` are what `prepare` makes; `more` are further flags of prepare-sandbox."""

    def __init__(self, root: Path, agent: str = "bash-agent", image: str = OUTER, more: tuple[str, ...] = ()):
        self.root, self.services = root, []
        self.agent, self.image, self.more = agent, image, more
        self.python = KEPT / "control-venv" / "bin" / "python"
        self.variables = {"TASK": str(root), "PY": str(self.python)}

    def prepare(self, *budget: str, model: str = MODEL) -> None:
        """All that comes before `serve`."""
        KEPT.mkdir(exist_ok=True)
        call(HARBOR / "setup.sh", "control", env={"TASK": str(KEPT)})
        for name in ("control-venv", "rock-venv", "dist"):
            (self.root / name).symlink_to(KEPT / name)
        call(HARBOR / "base_image.sh", BASE)
        image = self.root / "base.tar"
        docker("save", "--output", str(image), BASE)
        self.command("prepare-sandbox", "--task-id", "median", "--task-source", HARBOR / "examples" / "median",
                     "--agent", self.agent, "--base-image", BASE, "--images", image, "--outer-image", self.image, *self.more)
        image.unlink()
        self.command("configure", "--task-id", "median", "--model", model, "--renderer", "qwen3_instruct",
                     "--agent", self.agent, "--outer-image", self.image, *(budget or BUDGET))

    def command(self, *arguments) -> str:
        return call(self.python, "-m", "harbor_env", *arguments, env=self.variables)

    def serve(self) -> None:
        for name in ("worker", "admin"):
            self.services.append(subprocess.Popen(["bash", HARBOR / "serve.sh", name], env={**os.environ, **self.variables},
                                                  stdout=open(self.root / f"{name}.out", "w"), stderr=subprocess.STDOUT))
        limit = time.monotonic() + 120
        while time.monotonic() < limit and all(service.poll() is None for service in self.services):
            try:
                if httpx.get(ADMIN, trust_env=False, timeout=5).json() == {"message": "hello, ROCK!"}:
                    return
            except httpx.TransportError:
                time.sleep(0.5)
        logs = [*self.root.glob("*.out"), *self.root.glob("logs/rock-*.log")]
        raise AssertionError("\n".join(f"{log.name}: {log.read_text()[-1500:]}" for log in logs))

    def stop(self) -> None:
        for service in reversed(self.services):
            service.send_signal(signal.SIGTERM)
        for service in self.services:
            service.wait(60)
        shutil.rmtree(self.root, ignore_errors=True)

    def start(self, *arguments: str) -> subprocess.Popen:
        """`run` with these arguments, in a session of its own."""
        return subprocess.Popen(["bash", HARBOR / "run.sh", *arguments], env={**os.environ, **self.variables}, cwd="/",
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)

    def run(self, *arguments: str) -> Run:
        return self.ended(self.start(*arguments))

    def ended(self, process: subprocess.Popen) -> Run:
        try:
            output, _ = process.communicate(timeout=540)
        except BaseException:
            # Also when the test's time limit ends the wait.
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)
            raise
        return Run(process.returncode, output)

    def change(self, **sections) -> dict:
        """Change config/harbor.yaml; the sections as they were before, to be put back by another call."""
        file = self.root / "config" / "harbor.yaml"
        tree = yaml.safe_load(file.read_text())
        before = {name: tree[name] for name in sections}
        for name, values in sections.items():
            tree[name] = {**tree[name], **values}
        file.write_text(yaml.safe_dump(tree))
        return before
