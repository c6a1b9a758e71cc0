"""Sessions as listings and searches show them.

Owns the filters and the order of sessions. Does not keep sessions: `verl_tinker.core.sessions` does.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.checkpoints import Checkpoint, RunRecord
from verl_tinker.core.samplers import SamplerTable
from verl_tinker.core.sessions import Session, SessionTable
from verl_tinker.core.store import CheckpointStore


@dataclass(frozen=True)
class SessionView:
    """A session with what it made. `is_live`: it has not finished and shows signs of life."""

    session: Session
    is_live: bool
    run_ids: list[str] = field(default_factory=list)
    sampler_ids: list[str] = field(default_factory=list)
    checkpoints: list[Checkpoint] = field(default_factory=list)


@dataclass(frozen=True)
class SessionQuery:
    """What a search asks for; empty conditions hold for every session.

    `session_id` and `display_name` are alternatives to each other: a session matches that fits either. `statuses`
    holds "active", or the reasons with which sessions finished.
    """

    session_id: str | None = None
    display_name: str | None = None
    user_metadata: dict[str, str] = field(default_factory=dict)
    project_ids: list[str] | None = None
    owners: list[str] | None = None
    statuses: set[str] | None = None


class SessionCatalog:
    """Reads sessions from memory, and what they made from the disk, off the event loop."""

    def __init__(self, sessions: SessionTable, samplers: SamplerTable, checkpoints: CheckpointStore):
        self._sessions = sessions
        self._samplers = samplers
        self._checkpoints = checkpoints

    def list(self, caller: Caller) -> list[Session]:
        """The caller's sessions, newest first."""
        own = [session for session in self._sessions.all() if may_see(caller, session.owner)]
        return sorted(own, key=_age)

    async def get(self, caller: Caller, session_id: str) -> SessionView:
        return (await self.views([self._sessions.get(session_id, caller)]))[0]

    def search(self, caller: Caller, query: SessionQuery, after: tuple[int, str] | None) -> list[Session]:
        """The sessions that match, newest first; `after`: `created_us` and id of the last one already seen."""
        found = [session for session in self.list(caller) if self._matches(session, query)]
        return [session for session in found if after is None or _age(session) > (-after[0], after[1])]

    async def views(self, sessions: list[Session]) -> list[SessionView]:
        runs = (await asyncio.to_thread(self._checkpoints.runs))[::-1]
        checkpoints = await asyncio.to_thread(self._checkpoints.list)
        return [self._view(session, runs, checkpoints) for session in sessions]

    def _view(self, session: Session, runs: list[RunRecord], checkpoints: list[Checkpoint]) -> SessionView:
        run_ids = [run.run_id for run in runs if run.session_id == session.session_id]
        made = [checkpoint for checkpoint in checkpoints if checkpoint.path.run_id in run_ids]
        samplers = self._samplers.of_session(session.session_id)
        return SessionView(session, not self._sessions.over(session), run_ids, samplers, made)

    def _matches(self, session: Session, query: SessionQuery) -> bool:
        facts = session.facts
        return (
            self._is_named(session, query)
            and query.user_metadata.items() <= facts.user_metadata.items()
            and (query.project_ids is None or (facts.project_id or "") in query.project_ids)
            and (query.owners is None or session.owner in query.owners)
            and (query.statuses is None or self._status(session) in query.statuses)
        )

    def _is_named(self, session: Session, query: SessionQuery) -> bool:
        if query.session_id is None and query.display_name is None:
            return True
        name = (session.facts.display_name or "").lower()
        wanted = (query.display_name or "").lower().split()
        return session.session_id == query.session_id or bool(wanted) and all(word in name for word in wanted)

    def _status(self, session: Session) -> str | None:
        return session.finished or (None if self._sessions.over(session) else "active")


def created_us(session: Session) -> int:
    """Microseconds since 1970, as a date on the wire has them; so a page begins where the last one ended."""
    return int(session.created * 1e6)


def _age(session: Session) -> tuple[int, str]:
    return -created_us(session), session.session_id
