"""The catalogue: training runs and checkpoints, live ones and those of earlier servers.

Owns what listings show and what a caller may change in them. Does not save or load: `verl_tinker.core.saving` and
`verl_tinker.core.training` do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, RunRecord, parse_path
from verl_tinker.core.errors import NotFound
from verl_tinker.core.runs import RunTable
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.types import ModelSpec
from verl_tinker.core.versions import VersionTable


@dataclass(frozen=True)
class RunView:
    """One training run as listings show it; times are seconds since 1970, `last_*` the newest of each kind."""

    run_id: str
    spec: ModelSpec
    owner: str
    last_request: float
    user_metadata: dict[str, str]
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None


class Catalog:
    """Reads the disk for each answer, off the event loop, so that what it says survives a restart.

    A caller sees its own runs and checkpoints; those that are public it may read, and changes only its own.
    """

    def __init__(self, runs: RunTable, checkpoints: CheckpointStore, versions: VersionTable):
        self._runs = runs
        self._checkpoints = checkpoints
        self._versions = versions

    # Reading

    async def runs(self, caller: Caller, project_id: str | None = None) -> list[RunView]:
        """The caller's runs, of one project or of all, newest first."""
        return await asyncio.to_thread(self._list_runs, caller, project_id)

    async def run(self, caller: Caller, run_id: str, with_public: bool = False) -> RunView:
        """`with_public`: a run of somebody else's is shown too, if it has a public checkpoint."""
        return await asyncio.to_thread(self._get_run, caller, run_id, with_public)

    async def run_checkpoints(self, caller: Caller, run_id: str) -> list[Checkpoint]:
        """The checkpoints of a run, newest first."""
        await self.run(caller, run_id)
        return await asyncio.to_thread(self._checkpoints.list, run_id)

    async def checkpoints(self, caller: Caller) -> list[Checkpoint]:
        """The caller's checkpoints of all runs, newest first."""
        found = await asyncio.to_thread(self._checkpoints.list)
        return [checkpoint for checkpoint in found if may_see(caller, checkpoint.owner)]

    async def checkpoint(self, caller: Caller, path: str) -> Checkpoint:
        return await asyncio.to_thread(self._checkpoints.get, parse_path(path), caller)

    # Changing

    async def delete(self, caller: Caller, path: str) -> None:
        """Remove a checkpoint; samplers that stand for it say so from then on."""
        checkpoint = await self._own(caller, path)
        await self._versions.evict_checkpoint(checkpoint.uid, f"{path} was deleted")
        await asyncio.to_thread(self._checkpoints.delete, checkpoint.path)

    async def sweep_expired(self) -> None:
        """Remove every checkpoint whose time is over; samplers that stand for one say so from then on."""
        for checkpoint in await asyncio.to_thread(self._checkpoints.sweep_expired):
            await self._versions.evict_checkpoint(checkpoint.uid, f"{checkpoint.path} has expired and was removed")

    async def set_ttl(self, caller: Caller, path: str, ttl_seconds: int | None) -> None:
        checkpoint = await self._own(caller, path)
        await asyncio.to_thread(self._checkpoints.set_ttl, checkpoint.path, ttl_seconds)

    async def set_public(self, caller: Caller, path: str, public: bool) -> None:
        checkpoint = await self._own(caller, path)
        if checkpoint.public != public:
            await asyncio.to_thread(self._checkpoints.set_public, checkpoint.path, public)

    async def set_project(self, session_id: str, project_id: str) -> None:
        """Move the runs of a session into a project."""
        await asyncio.to_thread(self._set_project, session_id, project_id)

    async def _own(self, caller: Caller, path: str) -> Checkpoint:
        checkpoint = await self.checkpoint(caller, path)
        if not may_see(caller, checkpoint.owner):
            raise NotFound(f"path: {path} is public and belongs to another API key, so it can be read and not changed")
        return checkpoint

    def _set_project(self, session_id: str, project_id: str) -> None:
        for record in self._checkpoints.runs():
            if record.session_id == session_id:
                self._checkpoints.record_run(replace(record, project_id=project_id))

    def _list_runs(self, caller: Caller, project_id: str | None) -> list[RunView]:
        return [
            self._view(record, self._checkpoints.list(record.run_id))
            for record in self._checkpoints.runs()
            if may_see(caller, record.owner) and project_id in (None, record.project_id)
        ]

    def _get_run(self, caller: Caller, run_id: str, with_public: bool) -> RunView:
        record = self._checkpoints.run(run_id)
        checkpoints = self._checkpoints.list(run_id) if record else []
        if record and (may_see(caller, record.owner) or with_public and any(c.public for c in checkpoints)):
            return self._view(record, [c for c in checkpoints if c.public or may_see(caller, c.owner)])
        raise NotFound(f"training run {run_id!r} is not known; GET /api/v1/training_runs lists what there is")

    def _view(self, record: RunRecord, checkpoints: list[Checkpoint]) -> RunView:
        live = self._runs.find(record.run_id)
        return RunView(
            run_id=record.run_id,
            spec=record.spec,
            owner=record.owner,
            last_request=live.last_request if live else max([record.created, *(c.created for c in checkpoints)]),
            user_metadata=record.user_metadata,
            last_checkpoint=next((c for c in checkpoints if c.path.kind == "weights"), None),
            last_sampler_checkpoint=next((c for c in checkpoints if c.path.kind == "sampler_weights"), None),
        )
