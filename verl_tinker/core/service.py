"""The server without HTTP: its parts put together, and its phase from starting to stopped.

Owns the phase. Does not end the process or the engine: `verl_tinker.start` does.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from verl_tinker.core.catalog import Catalog
from verl_tinker.core.copying import Copying
from verl_tinker.core.downloads import Downloads
from verl_tinker.core.errors import EngineError, without_paths
from verl_tinker.core.futures import FutureStore, Limits
from verl_tinker.core.history import History
from verl_tinker.core.journal import Journal
from verl_tinker.core.overview import Overview
from verl_tinker.core.parking import Parking
from verl_tinker.core.queue import CommandQueue
from verl_tinker.core.samplers import SamplerTable
from verl_tinker.core.sampling import Sampling
from verl_tinker.core.saving import Saving
from verl_tinker.core.records import RecordRing
from verl_tinker.core.request_log import RequestLog
from verl_tinker.core.runs import RunTable
from verl_tinker.core.session_catalog import SessionCatalog
from verl_tinker.core.sessions import SessionTable
from verl_tinker.core.signing import Signer
from verl_tinker.core.snapshots import Snapshots
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.training import Training
from verl_tinker.core.types import BaseModelInfo
from verl_tinker.core.versions import VersionTable
from verl_tinker.core.watch import WatchedEngine
from verl_tinker.engine.base import Engine

STATE_FOLDER = ".state"
HOUSEKEEPING_SECONDS = 10.0

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Health:
    """`phase` names the step of a start; `reason` tells why a server failed. Clients are shown both."""

    status: Literal["starting", "ok", "failed"]
    phase: str = ""
    reason: str = ""


class Service:
    """All state above the engine. Lives on one event loop; only `set_phase` may be called from other threads."""

    def __init__(
        self,
        engine: Engine,
        checkpoint_dir: Path,
        *,
        max_runs: int = 1,
        session_timeout_s: float = 900.0,
        max_loaded_versions: int = 8,
        max_concurrent_samples: int = 64,
        max_waiting_samples: int = 20_000,
        pack_tokens: int = 0,
        keep_last_checkpoints: int = 0,
        park_after_s: float | None = None,
        snapshot_memory_bytes: int = 0,
        limits: Limits | None = None,
    ):
        """`max_loaded_versions` is for each live run, and once more for the checkpoints of all other runs."""
        self.health = Health("starting", phase="created")
        self.is_closed = False
        self.journal = Journal(checkpoint_dir / STATE_FOLDER)
        # Results that nobody has read yet must not be dropped for the next ones of the same burst.
        limits = limits or Limits(count=max(Limits.count, 2 * max_waiting_samples))
        scratch = self.journal.results_folder()
        self.futures = FutureStore(limits, scratch)
        self.watchers = self.futures.watchers
        self.engine = engine = WatchedEngine(engine, self.watchers)
        records = RecordRing(scratch)
        self.sessions = SessionTable(session_timeout_s, self.journal)
        self.runs = RunTable(self.sessions, max_runs, self.journal, self._resume_path)
        self._checkpoints = CheckpointStore(checkpoint_dir, keep_last=keep_last_checkpoints)
        self._queue = CommandQueue(self.futures, self.journal, pack_tokens=pack_tokens)
        self.versions = self._versions = versions = VersionTable(engine, max_loaded_versions)
        self.samplers = SamplerTable(
            versions, self._checkpoints, lambda run_id: self.runs.find(run_id) is not None, self.journal
        )
        parking = Parking(engine, self.runs, self._checkpoints, park_after_s)
        self.training = Training(
            engine, self.futures, self._queue, self.sessions, self.runs, self._checkpoints, versions, self.journal, records,
            parking
        )
        self._snapshots = Snapshots(self._checkpoints, snapshot_memory_bytes)
        self.saving = Saving(engine, self.training, self._checkpoints, versions, self.samplers, self._snapshots)
        self.sampling = Sampling(
            engine, self.futures, self.sessions, self.samplers, versions, max_concurrent_samples, max_waiting_samples, records
        )
        self.catalog = Catalog(self.runs, self._checkpoints, versions)
        self.session_catalog = SessionCatalog(self.sessions, self.samplers, self._checkpoints)
        self.downloads = Downloads(self._checkpoints, Signer(self._checkpoints.root))
        self.copying = Copying(self._checkpoints)
        self.history = History()
        self.watchers.add(self.history)
        self.watchers.add(RequestLog(self._weights_version, self.engine.worker_logs))
        self.overview = Overview(self)

    def _resume_path(self, run_id: str) -> str | None:
        saved = (c.path for c in self._checkpoints.list(run_id) if c.path.kind == "weights")
        return next((str(path) for path in saved), None)

    def _weights_version(self, run_id: str) -> int | None:
        run = self.runs.find(run_id)
        return run.version if run else None

    def base_models(self) -> list[BaseModelInfo]:
        return self.engine.base_models()

    def warning(self) -> str | None:
        """What a new client should know about settings that cannot be honoured."""
        tied = [model.name for model in self.base_models() if model.trainable and model.tied_embeddings]
        if not tied:
            return None
        return (
            f"train_unembed is not applied on {', '.join(tied)}: the output layer shares its weights with the input "
            "embedding. get_info and weights_info report the settings in force"
        )

    def set_phase(self, phase: str) -> None:
        if self.health.status == "starting":
            self.health = Health("starting", phase=phase)

    def ready(self) -> None:
        self.health = Health("ok", phase="ready")

    def failed(self, reason: str) -> None:
        """Refuse new work for good, and end every pending future with the reason. The first reason stands."""
        if self.health.status != "failed":
            log.error("the server failed: %s", reason)
            self.health = Health("failed", reason=without_paths(reason))
            self.futures.fail_pending(EngineError(reason))

    async def start(self) -> None:
        """Start the engine, reporting its phases; a failure is kept as the reason and raised."""
        try:
            await self.engine.start(self.set_phase)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self.failed(f"the engine did not start: {error}")
            raise
        self.ready()

    async def recover(self, reason: str) -> None:
        """Start the engine again after a part of it died; raises when it does not start.

        Live runs end with the reason, for their weights died, but parked ones go on; saved checkpoints and snapshots are
        loaded again when they are asked for.
        """
        log.error("the engine failed and starts again: %s", reason)
        self.health = Health("starting", phase=f"starting the engine again, because {without_paths(reason)}")
        self.futures.fail_pending(EngineError(f"{reason}; this operation did not end. The engine starts again"))
        await self.sampling.close()
        await self._queue.close()
        for run in self.runs.all():
            if run.parked is None:
                self.runs.remove(run, reason, "server")
        self._versions.unload_all()
        await self.engine.close()
        await self.start()

    async def housekeep(self) -> None:
        """Free what sessions that are over still hold, and forget what has aged."""
        over = [session for session in self.sessions.all() if self.sessions.over(session)]
        self.sampling.completions.forget({session.session_id for session in over})
        for session in over:
            if session.finished is None:
                self.sessions.finish(session, f"it sent no heartbeat for {self.sessions.timeout_s:.0f} s")
            for run in self.runs.of_session(session.session_id):
                self.training.release(run)
            for version in self.samplers.release(session.session_id):
                await self._versions.evict(version, f"its session ended ({session.finished})")
        for run in self.runs.all():
            self.training.park(run)
        self.futures.prune()
        await self.catalog.sweep_expired()

    async def keep_house(self, seconds: float = HOUSEKEEPING_SECONDS) -> None:
        """Housekeeping for ever; one that fails is logged and tried again."""
        while True:
            await asyncio.sleep(seconds)
            try:
                await self.housekeep()
            except Exception:
                log.exception("housekeeping failed")

    async def close(self) -> None:
        """End pending futures, so that long polls return, then stop what runs. Safe to call twice."""
        self.is_closed = True
        if self.health.status != "failed":
            self.health = Health("failed", reason="the server is stopping")
        self.futures.fail_pending(EngineError("the server is stopping; this operation did not end"))
        await self.sampling.close()
        await self._queue.close()
        self._checkpoints.close()
        self._snapshots.close()
        self.journal.close()
