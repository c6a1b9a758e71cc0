"""Sessions: who is here, and who still shows life.

Owns liveness. Does not hold what a session made: `verl_tinker.core.runs` and `verl_tinker.core.samplers` do.
"""

from __future__ import annotations

import secrets
import time
from dataclasses import asdict, dataclass, field, replace

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.errors import NotFound, UserError
from verl_tinker.core.journal import Journal, SessionRecord


@dataclass(frozen=True)
class SessionFacts:
    """What a client says of its session; kept to be shown and searched, never acted on."""

    tags: list[str] = field(default_factory=list)
    user_metadata: dict[str, str] = field(default_factory=dict)
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


@dataclass
class Session:
    """A client's session. `owner` is the name of its API key, "" without keys; `created` seconds since 1970.

    `detail` is what the client said of the reason with which it finished.
    """

    session_id: str
    owner: str = ""
    facts: SessionFacts = field(default_factory=SessionFacts)
    created: float = field(default_factory=time.time)
    last_seen: float = field(default_factory=time.monotonic)
    finished: str | None = None
    detail: str | None = None

    def touch(self) -> None:
        self.last_seen = time.monotonic()


class SessionTable:
    """Every session in the journal. One is over when it finished or gave no sign for `timeout_s`.

    After a restart each has that time anew, for its client could not reach the server meanwhile.
    """

    def __init__(self, timeout_s: float, journal: Journal):
        self.timeout_s = timeout_s
        self._journal = journal
        self._sessions: dict[str, Session] = {}
        self._by_key: dict[tuple[str, str], Session] = {}
        for record in journal.sessions():
            facts = SessionFacts(**record.facts)
            session = Session(
                record.session_id, record.owner, facts, record.created, finished=record.finished, detail=record.detail)
            self._keep(session, record.idempotency_key)

    def create(self, idempotency_key: str | None, facts: SessionFacts = SessionFacts(), owner: str = "") -> Session:
        """A new session, or the one that the same key made: a client repeats a create whose answer was lost."""
        known = self._by_key.get((owner, idempotency_key)) if idempotency_key else None
        if known:
            return known
        session = Session(secrets.token_hex(8), owner, facts)
        self._journal.add_session(
            SessionRecord(session.session_id, owner, session.created, asdict(facts), idempotency_key))
        self._keep(session, idempotency_key)
        return session

    def _keep(self, session: Session, idempotency_key: str | None) -> None:
        self._sessions[session.session_id] = session
        if idempotency_key:
            self._by_key[session.owner, idempotency_key] = session

    def get(self, session_id: str, caller: Caller) -> Session:
        session = self._sessions.get(session_id)
        if session is None or not may_see(caller, session.owner):
            raise NotFound(
                f"session_id {session_id!r} is not known here; create a new ServiceClient"
            )
        return session

    def open(self, session_id: str, caller: Caller) -> Session:
        """A session that may still begin work."""
        session = self.get(session_id, caller)
        if session.finished:
            raise UserError(f"session {session_id} is finished ({session.finished}); create a new ServiceClient")
        session.touch()
        return session

    def finish(self, session: Session, reason: str, detail: str | None = None) -> None:
        """The first reason stands, with its detail."""
        if session.finished is None:
            session.finished, session.detail = reason, detail
            self._journal.end_session(session.session_id, reason, detail)

    def set_project(self, session: Session, project_id: str) -> None:
        self._journal.move_session(session.session_id, project_id)
        session.facts = replace(session.facts, project_id=project_id)

    def over(self, session: Session) -> bool:
        return session.finished is not None or self.silence(session) > self.timeout_s

    def silence(self, session: Session) -> float:
        """Seconds since the session was last heard of."""
        return time.monotonic() - session.last_seen

    def all(self) -> list[Session]:
        """The oldest first."""
        return list(self._sessions.values())
