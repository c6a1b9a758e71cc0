"""The live training runs: who holds a place, and whose place may be taken.

Owns the number of places. Does not talk to the engine: `verl_tinker.core.training` does.
"""

from __future__ import annotations

from dataclasses import dataclass

from verl_tinker.core.errors import CapacityError, NotFound
from verl_tinker.core.sessions import Session, SessionTable
from verl_tinker.core.types import ModelSpec


@dataclass
class Run:
    """A live training run. `spec` is what the engine made of the request; `notes` tell the difference."""

    run_id: str
    session: Session
    spec: ModelSpec
    notes: list[str]
    user_metadata: dict[str, str]
    created: float
    last_request: float
    has_gradient: bool = False


class RunTable:
    """The live runs, at most `max_runs`."""

    def __init__(self, sessions: SessionTable, max_runs: int):
        self._sessions = sessions
        self._max_runs = max_runs
        self._runs: dict[str, Run] = {}
        self._dropped: dict[str, str] = {}

    def get(self, run_id: str) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            raise self.absent(run_id)
        return run

    def absent(self, run_id: str) -> NotFound:
        """The refusal of work on a run that is not live, with the reason."""
        why = self._dropped.get(run_id, "it was never created here, its creation failed, or the server restarted")
        return NotFound(
            f"model_id {run_id!r} is not a live training run: {why}. Create a training client again; "
            "create_training_client_from_state_with_optimizer resumes from a saved checkpoint"
        )

    def find(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def add(self, run: Run) -> None:
        self._runs[run.run_id] = run

    def remove(self, run: Run, reason: str) -> None:
        self._runs.pop(run.run_id, None)
        self._dropped[run.run_id] = reason

    def all(self) -> list[Run]:
        return list(self._runs.values())

    def to_make_way(self, spec: ModelSpec) -> list[Run]:
        """The runs that must be dropped before a new one of `spec` is created; CapacityError when too few may be."""
        over = [run for run in self._runs.values() if self._sessions.over(run.session)]
        full = spec.lora is None
        # Full fine-tuning changes the weights that adapters share, so it is alone.
        if full or any(run.spec.lora is None for run in self._runs.values()):
            if len(over) < len(self._runs):
                kind = "full fine-tuning (lora_config.rank 0)" if full else "an adapter beside full fine-tuning"
                raise CapacityError(self._refusal(f"{kind} needs all training runs of others to end, and some live", over))
            return over
        surplus = len(self._runs) + 1 - self._max_runs
        if len(over) < surplus:
            number = "one training run" if self._max_runs == 1 else f"{self._max_runs} training runs"
            raise CapacityError(self._refusal(f"this server trains {number} at a time (server.max_training_runs)", over))
        return over[: max(surplus, 0)]

    def why_over(self, run: Run) -> str:
        session = run.session
        if session.finished:
            return f"its session finished ({session.finished}) and another run took its place"
        return (
            f"its session sent no heartbeat for {self._sessions.timeout_s:.0f} s and another run took its place"
        )

    def _refusal(self, reason: str, over: list[Run]) -> str:
        holders = "; ".join(
            f"{run.run_id} (base model {run.spec.base_model}, "
            f"last sign {self._sessions.silence(run.session):.0f} s ago)"
            for run in self._runs.values()
            if run not in over
        )
        return (
            f"{reason}; the place is held by {holders}. Close that client by ServiceClient.close('success'), which "
            f"finishes its session; or wait: a session without heartbeat for {self._sessions.timeout_s:.0f} s makes room "
            "(server.session_timeout_s)"
        )
