"""Records the trees beside this file with Harbor's own Trial and Job, in a folder instead of a container.

Owns the tasks and the ways in which they go wrong. Does not run in the tests: it needs Python 3.12 and harbor 0.25.0.

    python record.py FOLDER     # an empty one; the trees lie in FOLDER/jobs, less what names the machine
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

from harbor.agents.base import BaseAgent
from harbor.environments.base import BaseEnvironment, ExecResult
from harbor.environments.capabilities import EnvironmentCapabilities
from harbor.job import Job
from harbor.models.job.config import JobConfig
from harbor.models.trial.config import AgentConfig, EnvironmentConfig, TaskConfig
from harbor.models.trial.error_policy import ERROR_POLICIES
from harbor.models.trial.result import TrialResult

PLACES = re.compile(r"(?<![\w/.])/(logs|tests|solution|app)\b")
# What the verifier writes for each task, and how long it may take.
VERIFIERS = {
    "solved": "echo 1 > $V/reward.txt; echo '{\"solved\": {\"resolved\": true}}' > $V/report.json",
    "unsolved": "echo 0 > $V/reward.txt; echo '{\"unsolved\": {\"resolved\": false}}' > $V/report.json",
    "graded": "echo 0.25 > $V/reward.txt; echo '{\"reward\": 0.75, \"style\": 1}' > $V/reward.json",
    "no-reward": "echo no grader here",
    "empty-reward": "touch $V/reward.txt",
    "text-reward": "echo passed > $V/reward.txt",
    "nan-reward": "echo nan > $V/reward.txt",
    "slow-verifier": "sleep 5; echo 1 > $V/reward.txt",
    "agent-crashed": "echo 1 > $V/reward.txt",
    "agent-slow": "echo 1 > $V/reward.txt",
    "context-exceeded": "echo 0 > $V/reward.txt",
    "environment-failed": "echo 1 > $V/reward.txt",
}


class Folder(BaseEnvironment):
    """Commands run on this machine, with the container's places below a folder of the trial."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.root = self.trial_paths.trial_dir.resolve().parent / f".{self.trial_paths.trial_dir.name}"

    @staticmethod
    def type() -> str:
        return "folder"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities()

    def _validate_definition(self) -> None:
        pass

    def _at(self, path: str) -> Path:
        return self.root / str(path).lstrip("/")

    async def start(self, force_build: bool) -> None:
        for name in ("logs/agent", "logs/verifier", "logs/artifacts", "tests", "app"):
            self._at(name).mkdir(parents=True, exist_ok=True)
        if "environment-failed" in self.trial_paths.trial_dir.name:
            raise RuntimeError("docker compose build failed: no such image")

    async def stop(self, delete: bool) -> None:
        shutil.rmtree(self.root, ignore_errors=True)

    async def upload_file(self, source_path, target_path):
        shutil.copy(source_path, self._at(target_path))

    async def upload_dir(self, source_dir, target_dir):
        shutil.copytree(source_dir, self._at(target_dir), dirs_exist_ok=True)

    async def download_file(self, source_path, target_path):
        shutil.copy(self._at(source_path), target_path)

    async def download_dir(self, source_dir, target_dir):
        shutil.copytree(self._at(source_dir), target_dir, dirs_exist_ok=True)

    async def exec(self, command, cwd=None, env=None, timeout_sec=None, user=None) -> ExecResult:
        here = PLACES.sub(lambda m: str(self._at(m.group(0))), command)
        process = await asyncio.create_subprocess_shell(
            here, cwd=self._at("app"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "V": str(self._at("logs/verifier")), **(env or {})})
        out, err = await process.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=process.returncode)


class ContextWindowExceededError(Exception):
    """As litellm names it."""


class NonZeroAgentExitCodeError(RuntimeError):
    """As Harbor's installed agents raise it."""


class Agent(BaseAgent):
    """Does nothing, or fails as the task's name says."""

    @staticmethod
    def name() -> str:
        return "recorded"

    def version(self) -> str:
        return "1"

    async def setup(self, environment) -> None:
        pass

    async def run(self, instruction, environment, context) -> None:
        await environment.exec("echo looked around > /logs/agent/log.txt")
        if "crashed" in instruction:
            raise NonZeroAgentExitCodeError("sweagent exited with status 1")
        if "slow" in instruction:
            await asyncio.sleep(60)
        if "exceeded" in instruction:
            raise ContextWindowExceededError("the prompt is longer than the model's context")
        context.n_input_tokens, context.n_output_tokens = 1200, 80


def make_task(folder: Path, name: str) -> Path:
    task = folder / name
    (task / "environment").mkdir(parents=True)
    (task / "tests").mkdir()
    (task / "environment" / "Dockerfile").write_text("FROM scratch\n")
    instruction = {"agent-crashed": "crashed", "agent-slow": "slow", "context-exceeded": "exceeded"}.get(name, "fix")
    (task / "instruction.md").write_text(f"{instruction}\n")
    limit = 1 if name == "slow-verifier" else 30
    (task / "task.toml").write_text(
        f'schema_version = "1.4"\n[task]\nname = "recorded/{name}"\n[verifier]\ntimeout_sec = {limit}\n'
        "[agent]\ntimeout_sec = 2\n")
    (task / "tests" / "test.sh").write_text(f"#!/bin/sh\necho grading\n{VERIFIERS[name]}\n")
    return task


async def run_job(folder: Path, name: str, task: Path) -> None:
    job = await Job.create(JobConfig(
        job_name=name, jobs_dir=folder / "jobs", n_concurrent_trials=1, quiet=True, retry={"max_retries": 0},
        environment=EnvironmentConfig(import_path=f"{__name__}:Folder"),
        agents=[AgentConfig(import_path=f"{__name__}:Agent")], tasks=[TaskConfig(path=task)]))
    await job.run()


def strip(folder: Path) -> None:
    """Leave out what names this machine, and files that nobody reads."""
    for file in sorted(p for p in (folder / "jobs").rglob("*") if p.is_file()):
        if file.name in ("config.json", "lock.json", "job.log", "trial.log", "manifest.json"):
            file.unlink()
            continue
        text = file.read_text().replace(str(folder.resolve()), "/jobs")
        if file.name == "exception.txt":
            text = text.splitlines()[-1] + "\n"
        elif file.name == "result.json":
            text = json.dumps(_less_tracebacks(json.loads(text)), indent=2) + "\n"
        file.write_text(text)


def _less_tracebacks(node):
    if isinstance(node, dict):
        return {key: "left out" if key == "exception_traceback" else _less_tracebacks(value) for key, value in node.items()}
    return [_less_tracebacks(item) for item in node] if isinstance(node, list) else node


def judge(folder: Path) -> None:
    """Harbor's own verdict on each recorded trial, beside the trees."""
    verdicts = {}
    for file in sorted((folder / "jobs").glob("*/*/result.json")):
        result = TrialResult.model_validate_json(file.read_text())
        rewards = result.verifier_result.rewards if result.verifier_result else None
        verdicts[file.parts[-3]] = {"reward_valid": result.reward_valid, "failure_cause": result.failure_cause,
                                   "rewards": rewards}
    policies = {name: policy.reward_valid for name, policy in ERROR_POLICIES.items()}
    (folder / "jobs" / "verdicts.json").write_text(json.dumps({"trials": verdicts, "errors": policies}, indent=2) + "\n")


async def main(folder: Path) -> None:
    for name in VERIFIERS:
        await run_job(folder, name, make_task(folder / "tasks", name))
    strip(folder)
    judge(folder)


if __name__ == "__main__":
    sys.modules["record"] = sys.modules["__main__"]
    __name__ = "record"
    asyncio.run(main(Path(sys.argv[1]).resolve()))
