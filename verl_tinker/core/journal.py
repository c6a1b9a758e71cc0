"""The journal: what the server has accepted and how it ended, on disk, so that a restarted server can answer for it.

Owns one SQLite file in WAL mode and the lock that keeps a second server off it. Rows are added, never changed, and
those of commands go after thirty days. Does not hold weights or large results: checkpoints have folders of their own, and
array results die with the process.
"""

from __future__ import annotations

import fcntl
import json
import logging
import shutil
import sqlite3
import time
from dataclasses import astuple, dataclass
from pathlib import Path

from verl_tinker.core.errors import StateInUse, StorageError

log = logging.getLogger(__name__)

_SCHEMA = """
CREATE TABLE IF NOT EXISTS session (id TEXT PRIMARY KEY, owner TEXT, created REAL, facts TEXT, idempotency_key TEXT);
CREATE TABLE IF NOT EXISTS session_end (id TEXT PRIMARY KEY, at REAL, reason TEXT);
CREATE TABLE IF NOT EXISTS session_detail (id TEXT PRIMARY KEY, detail TEXT);
CREATE TABLE IF NOT EXISTS session_project (id TEXT, at REAL, project TEXT);
CREATE TABLE IF NOT EXISTS run (id TEXT PRIMARY KEY, owner TEXT, session TEXT, created REAL);
CREATE TABLE IF NOT EXISTS run_end (id TEXT PRIMARY KEY, at REAL, reason TEXT, category TEXT);
CREATE TABLE IF NOT EXISTS command (request TEXT PRIMARY KEY, run TEXT, seq INTEGER, kind TEXT, owner TEXT, at REAL);
CREATE UNIQUE INDEX IF NOT EXISTS command_identity ON command (run, seq) WHERE seq IS NOT NULL;
CREATE TABLE IF NOT EXISTS outcome (request TEXT PRIMARY KEY, at REAL, result TEXT, error TEXT, category TEXT);
CREATE TABLE IF NOT EXISTS sampler (id TEXT PRIMARY KEY, owner TEXT, session TEXT, base_model TEXT, path TEXT, uid TEXT,
  is_snapshot INTEGER);
CREATE INDEX IF NOT EXISTS sampler_session ON sampler (session);
CREATE INDEX IF NOT EXISTS sampler_checkpoint ON sampler (uid);
"""

_KEPT_SECONDS = 30 * 86400.0


@dataclass(frozen=True)
class SessionRecord:
    """A session. `facts` is what its client said of it; `finished` the reason, None while it goes on, `detail` more of it."""

    session_id: str
    owner: str
    created: float
    facts: dict
    idempotency_key: str | None
    finished: str | None = None
    detail: str | None = None


@dataclass(frozen=True)
class Outcome:
    """How a command ended. Neither `result` nor `error` is set when it succeeded with arrays, which are not kept here."""

    result: dict | None = None
    error: str | None = None
    category: str = "server"


@dataclass(frozen=True)
class CommandRecord:
    """An accepted training command. `outcome` None means that the server ended before the command did."""

    request_id: str
    run_id: str
    seq: int | None
    kind: str
    owner: str
    outcome: Outcome | None


@dataclass(frozen=True)
class SamplerRecord:
    """A sampler. `path` and `uid` None is the base model, or a snapshot, whose weights end with the server."""

    sampler_id: str
    owner: str
    session_id: str
    base_model: str
    path: str | None
    uid: str | None
    is_snapshot: bool


class Journal:
    """One server's journal; `None` keeps it in memory. StateInUse when another live server has the folder.

    Commits are not forced to the disk one by one: a killed process loses nothing, a power cut may lose the last moments.
    """

    def __init__(self, folder: Path | None):
        self._folder = folder
        self._lock = self._take(folder) if folder else None
        file = folder / "journal.sqlite3" if folder else ":memory:"
        try:
            self._db = sqlite3.connect(file, isolation_level=None)
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"the journal {file} cannot be read ({error}); move it and its -wal and -shm files away: checkpoints are "
                "not in it, but sessions, samplers and the outcomes of commands begin anew"
            ) from error
        now, reason = time.time(), "the server that held it stopped or was killed, and started again"
        # No run is live here yet, so no client can repeat a command of that age.
        self._write("DELETE FROM outcome WHERE request IN (SELECT request FROM command WHERE at < ?)", now - _KEPT_SECONDS)
        self._write("DELETE FROM command WHERE at < ?", now - _KEPT_SECONDS)
        self._write("INSERT INTO run_end SELECT id, ?, ?, 'server' FROM run WHERE id NOT IN (SELECT id FROM run_end)", now, reason)

    @staticmethod
    def _take(folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / "lock", "a")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            raise StateInUse(
                f"server.checkpoint_dir: another live server keeps its state in {folder}; stop it, or give this one a "
                "folder of its own"
            ) from None
        return lock

    def results_folder(self) -> Path | None:
        """Where large results lie, emptied: they are of no use to another process."""
        if self._folder is None:
            return None
        results = self._folder / "results"
        shutil.rmtree(results, ignore_errors=True)
        results.mkdir()
        return results

    def close(self) -> None:
        """Safe to call twice."""
        self._db.close()
        if self._lock:
            self._lock.close()

    # Sessions

    def add_session(self, record: SessionRecord) -> None:
        self._write("INSERT INTO session VALUES (?, ?, ?, ?, ?)", record.session_id, record.owner, record.created,
                    json.dumps(record.facts), record.idempotency_key)

    def end_session(self, session_id: str, reason: str, detail: str | None) -> None:
        self._write("INSERT OR IGNORE INTO session_detail SELECT ?1, ?2 WHERE ?1 NOT IN (SELECT id FROM session_end)",
                    session_id, detail)
        self._write("INSERT OR IGNORE INTO session_end VALUES (?, ?, ?)", session_id, time.time(), reason)

    def move_session(self, session_id: str, project_id: str) -> None:
        self._write("INSERT INTO session_project VALUES (?, ?, ?)", session_id, time.time(), project_id)

    def sessions(self) -> list[SessionRecord]:
        """Every session, the oldest first."""
        moved = dict(self._db.execute("SELECT id, project FROM session_project ORDER BY rowid"))
        rows = self._db.execute(
            "SELECT s.id, owner, created, facts, idempotency_key, reason, detail FROM session s "
            "LEFT JOIN session_end e ON s.id = e.id LEFT JOIN session_detail d ON s.id = d.id ORDER BY s.rowid")
        return [SessionRecord(i, owner, created, _facts(json.loads(facts), moved.get(i)), key, end, detail)
                for i, owner, created, facts, key, end, detail in rows]

    # Runs

    def add_run(self, run_id: str, owner: str, session_id: str) -> None:
        self._write("INSERT INTO run VALUES (?, ?, ?, ?)", run_id, owner, session_id, time.time())

    def end_run(self, run_id: str, reason: str, category: str) -> None:
        self._write("INSERT OR IGNORE INTO run_end VALUES (?, ?, ?, ?)", run_id, time.time(), reason, category)

    def run_owner(self, run_id: str) -> str | None:
        row = self._db.execute("SELECT owner FROM run WHERE id = ?", (run_id,)).fetchone()
        return row[0] if row else None

    def run_end(self, run_id: str) -> tuple[str, str] | None:
        """Why a run ended, and whose doing it was ("user" or "server")."""
        return self._db.execute("SELECT reason, category FROM run_end WHERE id = ?", (run_id,)).fetchone()

    # Commands

    def accept(self, request_id: str, run_id: str, seq: int | None, kind: str, owner: str) -> None:
        self._write("INSERT INTO command VALUES (?, ?, ?, ?, ?, ?)", request_id, run_id, seq, kind, owner, time.time())

    def settle(self, request_id: str, outcome: Outcome) -> None:
        """Note how a command ended. A full disk must not take the answer from the client, so it is logged only."""
        result = None if outcome.result is None else json.dumps(outcome.result)
        try:
            self._write("INSERT OR IGNORE INTO outcome VALUES (?, ?, ?, ?, ?)",
                        request_id, time.time(), result, outcome.error, outcome.category)
        except StorageError as error:
            log.error("the outcome of %s is not in the journal: %s", request_id, error)

    def command(self, run_id: str, seq: int) -> CommandRecord | None:
        return self._command("run = ? AND seq = ?", run_id, seq)

    def command_of_request(self, request_id: str) -> CommandRecord | None:
        return self._command("c.request = ?", request_id)

    def _command(self, where: str, *values) -> CommandRecord | None:
        row = self._db.execute(
            "SELECT c.request, run, seq, kind, owner, o.at, result, error, category FROM command c "
            f"LEFT JOIN outcome o ON c.request = o.request WHERE {where}", values).fetchone()
        if row is None:
            return None
        *command, ended, result, error, category = row
        outcome = Outcome(json.loads(result) if result else None, error, category) if ended else None
        return CommandRecord(*command, outcome)

    # Samplers

    def add_sampler(self, record: SamplerRecord) -> None:
        self._write("INSERT OR IGNORE INTO sampler VALUES (?, ?, ?, ?, ?, ?, ?)", *astuple(record))

    def sampler(self, sampler_id: str) -> SamplerRecord | None:
        row = self._db.execute("SELECT * FROM sampler WHERE id = ?", (sampler_id,)).fetchone()
        return SamplerRecord(*row[:-1], bool(row[-1])) if row else None

    def samplers_of_session(self, session_id: str) -> list[str]:
        """Their ids, the oldest first."""
        return [i for (i,) in self._db.execute("SELECT id FROM sampler WHERE session = ? ORDER BY rowid", (session_id,))]

    def sessions_of_checkpoint(self, uid: str) -> set[str]:
        """The sessions that have a sampler of this checkpoint."""
        return {session for (session,) in self._db.execute("SELECT session FROM sampler WHERE uid = ?", (uid,))}

    def _write(self, statement: str, *values) -> None:
        try:
            self._db.execute(statement, values)
        except sqlite3.DatabaseError as error:
            raise StorageError(
                f"the journal in server.checkpoint_dir cannot be written ({error}), so nothing was accepted; free disk "
                "space or mend the file, then repeat the call"
            ) from error


def _facts(facts: dict, project_id: str | None) -> dict:
    return facts if project_id is None else {**facts, "project_id": project_id}
