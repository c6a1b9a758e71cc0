"""Parking: idle training runs wait on disk, so that the workers' memory holds those that train.

Owns which runs are parked and their folders. Does not order commands: it is called from inside them, one at a time.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time

from verl_tinker.core.errors import TinkerError
from verl_tinker.core.runs import Run, RunTable
from verl_tinker.core.store import CheckpointStore
from verl_tinker.engine.base import Engine

log = logging.getLogger(__name__)


class Parking:
    """All of a parked run lies in a folder, bit for bit, its gradient too; its next command brings it back.

    `idle_s` is how long a run rests before `park_if_idle` takes it; None is for ever.
    """

    def __init__(self, engine: Engine, runs: RunTable, checkpoints: CheckpointStore, idle_s: float | None):
        self._engine = engine
        self._runs = runs
        self._checkpoints = checkpoints
        self._idle_s = idle_s

    async def loaded(self, run: Run) -> Run:
        """The run, back in the workers' memory if it was parked; when that fails it stays parked."""
        if run.parked is None:
            return run
        await self.make_room()
        started = time.perf_counter()
        await self._engine.unpark(run.run_id, run.spec, run.parked)
        await self.forget(run)
        log.info("%s is back from disk after %.2f s", run.run_id, time.perf_counter() - started)
        return run

    async def make_room(self) -> None:
        """Park the run that rests the longest until there is a place for one more."""
        while (run := self._runs.to_park()) is not None:
            await self._park(run)

    async def park_if_idle(self, run: Run) -> None:
        """Park a run that still rests; only from inside a command of that run. A full disk leaves it where it is."""
        if self.is_idle(run):
            try:
                await self._park(run)
            except TinkerError as error:
                log.warning("%s stays in memory: %s", run.run_id, error)

    def is_idle(self, run: Run) -> bool:
        rests = self._idle_s is not None and time.time() - run.last_request >= self._idle_s
        return rests and run.can_be_parked

    async def forget(self, run: Run) -> None:
        """Remove what lies on disk of a run that is back in memory, or has ended."""
        folder, run.parked = run.parked, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def _park(self, run: Run) -> None:
        await asyncio.to_thread(self._checkpoints.require_room, run.run_id, "weights")
        folder = self._checkpoints.scratch()
        try:
            await self._engine.park(run.run_id, folder)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        run.parked = folder
        log.info("%s is parked on disk", run.run_id)
