"""The live training runs: who holds a place, and whose place may be taken.

Owns the number of places. Does not talk to the engine: `verl_tinker.core.training` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.errors import CapacityError, NotFound, RunLost, TinkerError
from verl_tinker.core.journal import Journal
from verl_tinker.core.sessions import Session, SessionTable
from verl_tinker.core.types import ModelSpec


@dataclass
class Run:
    """A live training run. `spec` is what the engine made of the request; `notes` tell the difference.

    `parked` is the folder of a run that is not in the workers' memory. `version` counts its weights: 1 as created, one
    more for each step and load.
    """

    run_id: str
    session: Session
    spec: ModelSpec
    notes: list[str]
    user_metadata: dict[str, str]
    created: float
    last_request: float
    has_gradient: bool = False
    is_leaving: bool = False
    parked: Path | None = None
    version: int = 1

    @property
    def can_be_parked(self) -> bool:
        # Full fine-tuning has the workers to itself anyway.
        return self.parked is None and self.spec.lora is not None


class RunTable:
    """The live runs, at most `max_runs` of them in the workers' memory and the others parked."""

    def __init__(self, sessions: SessionTable, max_runs: int, journal: Journal, resume_from: Callable[[str], str | None]):
        """`resume_from` gives the newest path from which a run's client may go on."""
        self._sessions = sessions
        self._journal = journal
        self._resume_from = resume_from
        self._max_runs = max_runs
        self._runs: dict[str, Run] = {}

    def get(self, run_id: str, caller: Caller = None) -> Run:
        run = self._runs.get(run_id)
        if run is None:
            owner = self._journal.run_owner(run_id)
            raise self.absent(run_id) if owner is None or may_see(caller, owner) else self.unknown(run_id)
        if not may_see(caller, run.session.owner):
            raise self.unknown(run_id)
        return run

    def absent(self, run_id: str) -> TinkerError:
        """The refusal of work on a run that is not live, with the reason and the way to go on."""
        end = self._journal.run_end(run_id)
        if end is None:
            begun = self._journal.command(run_id, 0)
            if begun is None or begun.outcome is not None:
                return self.unknown(run_id)
            return RunLost(f"model_id {run_id!r}: the server stopped while this run was made; create a training client again")
        why, category = end
        path = self._resume_from(run_id)
        how = (
            f"create_training_client_from_state_with_optimizer({path!r}) goes on from its last saved state" if path
            else "it saved no state, so begin again with a new training client"
        )
        kind = NotFound if category == "user" else RunLost
        return kind(f"model_id {run_id!r} is not a live training run any more: {why}; {how}")

    def unknown(self, run_id: str) -> NotFound:
        return NotFound(
            f"model_id {run_id!r} is not a training run of this server: it was never created here, or its creation "
            "failed. Create a training client"
        )

    def find(self, run_id: str) -> Run | None:
        return self._runs.get(run_id)

    def add(self, run: Run) -> None:
        self._journal.add_run(run.run_id, run.session.owner, run.session.session_id)
        self._runs[run.run_id] = run

    def remove(self, run: Run, reason: str, category: str = "user") -> None:
        """`category` "server" says that its client could do nothing about it."""
        self._runs.pop(run.run_id, None)
        self._journal.end_run(run.run_id, reason, category)

    def all(self) -> list[Run]:
        return list(self._runs.values())

    def of_session(self, session_id: str) -> list[Run]:
        return [run for run in self._runs.values() if run.session.session_id == session_id]

    def to_make_way(self, spec: ModelSpec) -> list[Run]:
        """The runs whose sessions are over and whose places a new one of `spec` needs; CapacityError when it must be
        alone and is not."""
        over = [run for run in self._runs.values() if self._sessions.over(run.session)]
        full = spec.lora is None
        # Full fine-tuning changes the weights that adapters share, so it is alone.
        if full or any(run.spec.lora is None for run in self._runs.values()):
            if len(over) < len(self._runs):
                kind = "full fine-tuning (lora_config.rank 0)" if full else "an adapter beside full fine-tuning"
                raise CapacityError(self._refusal(f"{kind} needs all training runs of others to end, and some live", over))
            return over
        return over if self._surplus() > 0 else []

    def to_park(self) -> Run | None:
        """The run that rests the longest, where one must leave memory before one more may come; else None."""
        if self._surplus() <= 0:
            return None
        return min((run for run in self._runs.values() if run.can_be_parked), key=lambda run: run.last_request, default=None)

    def _surplus(self) -> int:
        """How many runs too many are in memory for one more."""
        return sum(run.parked is None for run in self._runs.values()) + 1 - self._max_runs

    def why_over(self, run: Run) -> str:
        session = run.session
        if session.finished:
            return f"its session finished ({session.finished})"
        return f"its session sent no heartbeat for {self._sessions.timeout_s:.0f} s"

    def _refusal(self, reason: str, over: list[Run]) -> str:
        holders = "; ".join(
            f"{run.run_id} (base model {run.spec.base_model}, "
            f"last sign {self._sessions.silence(run.session):.0f} s ago)"
            for run in self._runs.values()
            if run not in over and run.parked is None
        )
        return (
            f"{reason}; the place is held by {holders}. Close that client by ServiceClient.close('success'), which "
            f"finishes its session; or wait: a session without heartbeat for {self._sessions.timeout_s:.0f} s makes room "
            "(server.session_timeout_s)"
        )
