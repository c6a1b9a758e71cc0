"""Reads what a Harbor job left, and trusts a reward only where Harbor does.

Owns the reading of result trees of harbor 0.25 and the rule for a valid reward. Does not import Harbor, which needs a newer
Python, and does not fetch trees: it reads a folder.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

from harbor_env.errors import AgentFailed, EpisodeError, JobFailed, NoReward

# Errors that the agent brought on itself: what it left behind was graded, and the grade stands. Any other error voids it.
GRADED_ERRORS = frozenset({
    "AgentTimeoutError", "ContextWindowExceededError", "OutputTokenExceededError", "ContextLengthExceededError",
    "OutputLengthExceededError", "AgentSafetyRefusalError", "ContentPolicyViolationError"})
VERIFIER_ERRORS = frozenset({
    "VerifierTimeoutError", "RewardFileNotFoundError", "RewardFileEmptyError", "VerifierOutputParseError"})


@dataclass(frozen=True)
class Trial:
    """One attempt at a task. `reward` is None unless it is valid; `error` then says why, as one of the named causes."""

    task: str
    name: str
    folder: Path
    rewards: dict[str, float] = field(default_factory=dict)
    reward: float | None = None
    error: EpisodeError | None = None
    tolerated: str | None = None

    @property
    def report(self) -> dict | None:
        """verifier/report.json, which Harbor keeps and does not read."""
        try:
            return json.loads((self.folder / "verifier" / "report.json").read_text())
        except (OSError, ValueError):
            return None

    @property
    def verifier_output(self) -> str:
        file = self.folder / "verifier" / "test-stdout.txt"
        return file.read_text(errors="replace") if file.is_file() else ""

    def checked_reward(self) -> float:
        """The reward, or the error that says why there is none."""
        if self.error is not None or self.reward is None:
            raise self.error or NoReward(f"{self.name} has no reward")
        return self.reward


def read_job(folder: Path) -> list[Trial]:
    """The trials of a job's folder, by name; JobFailed when there is none."""
    found = sorted(file.parent for file in folder.glob("*/result.json"))
    if not found:
        raise JobFailed(f"Harbor left no trial in {folder.name}: {_last_line(folder / 'job.log')}")
    return [read_trial(trial) for trial in found]


def read_trial(folder: Path) -> Trial:
    """A trial's folder; JobFailed when its result.json is not one of Harbor's."""
    try:
        result = json.loads((folder / "result.json").read_text())
        task, name = result["task_name"], result["trial_name"]
        verifier = result.get("verifier_result") or {}
        rewards = verifier.get("rewards") or {}
        errors = [e for e in (result.get("exception_info"), *_of_steps(result)) if e]
        types = [error["exception_type"] for error in errors]
        finished = bool(result.get("finished_at"))
        known = all(type(value) in (int, float) for value in rewards.values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise JobFailed(f"{folder.name}/result.json is no trial of Harbor's: {type(error).__name__} {error}") from error
    refused = _refusal(name, errors, finished, rewards if known else {})
    valid = refused is None
    return Trial(task, name, folder, rewards, float(rewards["reward"]) if valid else None, refused,
                 types[0] if valid and types else None)


def _of_steps(result: dict) -> list[dict | None]:
    return [step.get("exception_info") for step in result.get("step_results") or []]


def _refusal(name: str, errors: list[dict], finished: bool, rewards: dict) -> EpisodeError | None:
    """Why the reward does not count: Harbor's rule, and three more that it leaves to its reader."""
    voiding = next((error for error in errors if error["exception_type"] not in GRADED_ERRORS), None)
    if voiding is not None:
        kind, text = voiding["exception_type"], f"{voiding['exception_type']}: {voiding.get('exception_message', '')}"
        return NoReward(f"{name}: {text}") if kind in VERIFIER_ERRORS else AgentFailed(f"{name}: {text}")
    if not finished:
        return JobFailed(f"{name} was not finished")
    if not rewards and errors:
        return AgentFailed(f"{name}: {errors[0]['exception_type']}: {errors[0].get('exception_message', '')}")
    if not rewards:
        return NoReward(f"{name}: the verifier gave no reward")
    if "reward" not in rewards:
        return NoReward(f"{name}: the verifier gave {', '.join(rewards)}, and no `reward`")
    if not math.isfinite(rewards["reward"]):
        return NoReward(f"{name}: the reward is {rewards['reward']}")
    return None


def _last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.is_file() else []
    return lines[-1] if lines else "its log is empty"
