"""The JSON side of sessions and checkpoints: tolerant request models, and dates.

Owns field names and their defaults. Does not check ranges: the core does.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from pydantic import AwareDatetime, Field

from verl_tinker.api.wire import Command, Metadata, Sequence64, Wire
from verl_tinker.core.session_catalog import SessionQuery
from verl_tinker.core.sessions import SessionFacts

_EPOCH = datetime.fromtimestamp(0, UTC)
_MICROSECOND = timedelta(microseconds=1)
# How a session's client may say that it ended.
FINISHED = ("success", "errored", "interrupted")
# The owner that is shown where there are no keys.
LOCAL = "local"


class CreateSession(Wire):
    tags: list[str] = []
    user_metadata: Metadata = {}
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None

    def facts(self) -> SessionFacts:
        return SessionFacts(self.tags, self.user_metadata, self.sdk_version, self.project_id, self.display_name)


class Project(Wire):
    project_id: str


class SearchOwner(Wire):
    type: str = "own"
    owner_urns: list[str] = []


class SearchStatus(Wire):
    type: str
    reasons: list[str] | None = None


class SearchCursor(Wire):
    last_created_at: AwareDatetime
    last_session_id: str

    def position(self) -> tuple[int, str]:
        return (self.last_created_at - _EPOCH) // _MICROSECOND, self.last_session_id


class SearchSessions(Wire):
    session_id: str | None = None
    project_ids: list[str] | None = None
    user_metadata: Metadata = {}
    display_name: str | None = None
    owner: SearchOwner = SearchOwner()
    statuses: list[SearchStatus] | None = None
    limit: int = Field(default=50, ge=1, le=200)
    cursor: SearchCursor | None = None

    def query(self) -> SessionQuery:
        named = ["" if urn == LOCAL else urn for urn in self.owner.owner_urns]
        return SessionQuery(
            session_id=self.session_id,
            display_name=self.display_name,
            user_metadata=self.user_metadata,
            project_ids=self.project_ids,
            owners=named if self.owner.type == "user" else None,
            statuses=None if self.statuses is None else self._statuses(),
        )

    def _statuses(self) -> set[str]:
        wanted: set[str] = set()
        for status in self.statuses or []:
            if status.type == "client_finished":
                wanted |= set(status.reasons or FINISHED)
            else:
                wanted.add(status.type)
        return wanted


class SaveExternal(Command):
    path: str
    ttl_seconds: int | None = None
    age_encryption_recipients: list[str] | None = None


class CopyWeights(Wire):
    source_path: str
    destination_project_id: str | None = None
    session_id: str | None = None
    model_seq_id: Sequence64 | None = None
    ttl_seconds: int | None = None


def date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


def date_of_us(microseconds: int) -> str:
    return (_EPOCH + microseconds * _MICROSECOND).isoformat()
