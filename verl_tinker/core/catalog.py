"""The catalogue: training runs and checkpoints, live ones and those of earlier servers.

Owns what listings show. Does not save or load: `verl_tinker.core.saving` and `verl_tinker.core.training` do.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from verl_tinker.core.checkpoints import Checkpoint, RunRecord, parse_path
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
    last_request: float
    user_metadata: dict[str, str]
    last_checkpoint: Checkpoint | None
    last_sampler_checkpoint: Checkpoint | None


class Catalog:
    """Reads the disk for each answer, off the event loop, so that what it says survives a restart."""

    def __init__(self, runs: RunTable, checkpoints: CheckpointStore, versions: VersionTable):
        self._runs = runs
        self._checkpoints = checkpoints
        self._versions = versions

    async def runs(self) -> list[RunView]:
        """Every run, newest first."""
        return await asyncio.to_thread(lambda: [self._view(record) for record in self._checkpoints.runs()])

    async def run(self, run_id: str) -> RunView:
        record = await asyncio.to_thread(self._checkpoints.run, run_id)
        if record is None:
            raise NotFound(f"training run {run_id!r} is not known; GET /api/v1/training_runs lists what there is")
        return await asyncio.to_thread(self._view, record)

    async def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of one run or of all, newest first."""
        if run_id is not None:
            await self.run(run_id)
        return await asyncio.to_thread(self._checkpoints.list, run_id)

    async def checkpoint(self, path: str) -> Checkpoint:
        return await asyncio.to_thread(self._checkpoints.get, parse_path(path))

    async def delete(self, path: str) -> None:
        """Remove a checkpoint; samplers that stand for it say so from then on."""
        checkpoint = await self.checkpoint(path)
        version = self._versions.find(checkpoint.uid)
        if version:
            await self._versions.evict(version, f"{path} was deleted")
        await asyncio.to_thread(self._checkpoints.delete, checkpoint.path)

    async def set_ttl(self, path: str, ttl_seconds: int | None) -> None:
        await asyncio.to_thread(self._checkpoints.set_ttl, parse_path(path), ttl_seconds)

    def _view(self, record: RunRecord) -> RunView:
        checkpoints = self._checkpoints.list(record.run_id)
        live = self._runs.find(record.run_id)
        newest = max([record.created, *(c.created for c in checkpoints)])
        return RunView(
            run_id=record.run_id,
            spec=record.spec,
            last_request=live.last_request if live else newest,
            user_metadata=record.user_metadata,
            last_checkpoint=next((c for c in checkpoints if c.path.kind == "weights"), None),
            last_sampler_checkpoint=next((c for c in checkpoints if c.path.kind == "sampler_weights"), None),
        )
