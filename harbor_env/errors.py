"""Why an episode ended without a score, one type for each cause, and what is wrong with a user's setting.

Owns the words that stand as `cause` in result files. Does not decide what becomes of the episode: its caller does.
"""

from __future__ import annotations


class SettingError(ValueError):
    """A flag, file or field that cannot be used; the text names it and the remedy."""


class EpisodeError(Exception):
    """An episode that has no valid score. It is dropped and counted, and never stands for a reward of 0."""

    cause = "episode_failed"


class RockUnreachable(EpisodeError):
    """The ROCK admin does not answer, or answers with a server error."""

    cause = "rock_unreachable"


class SandboxNotStarted(EpisodeError):
    """ROCK answered, and the sandbox did not come up: no Docker engine, no image, no room."""

    cause = "sandbox_not_started"


class SandboxDied(EpisodeError):
    """The sandbox came up and is gone."""

    cause = "sandbox_died"


class ModelServiceFailed(EpisodeError):
    """The model service inside the sandbox did not start or has ended."""

    cause = "model_service_failed"


class AgentSilent(EpisodeError):
    """The agent neither asked nor ended within its time."""

    cause = "agent_silent"


class RequestRefused(EpisodeError):
    """A chat request that the policy cannot answer; the text names the field."""

    cause = "request_refused"


class InputBudgetExceeded(EpisodeError):
    """The agent's prompt is longer than its input budget."""

    cause = "input_budget_exceeded"


class TurnBudgetExceeded(EpisodeError):
    """The agent asked more often than it may."""

    cause = "turn_budget_exceeded"


class SamplingFailed(EpisodeError):
    """The server gave no answer: it stopped, refused, or took longer than a turn may take."""

    cause = "sampling_failed"


class JobFailed(EpisodeError):
    """Harbor ran no trial, or its job did not end in time."""

    cause = "job_failed"


class AgentFailed(EpisodeError):
    """Harbor recorded an error of the agent or of the task's environment."""

    cause = "agent_failed"


class NoReward(EpisodeError):
    """The verifier gave no reward that Harbor accepts."""

    cause = "no_reward"
