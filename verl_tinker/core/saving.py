"""Saving: checkpoints to resume from, weights to sample from or to take away, and unnamed snapshots.

Owns what happens between a save command and its path or sampler. Does not write weights: the engine does.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from verl_tinker.core import disk, encryption
from verl_tinker.core.access import Caller
from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, check_name, check_ttl
from verl_tinker.core.errors import StorageError, UserError
from verl_tinker.core.futures import Future
from verl_tinker.core.runs import Run
from verl_tinker.core.samplers import Sampler, SamplerTable
from verl_tinker.core.snapshots import Snapshots
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.training import Training
from verl_tinker.core.validate import find_model
from verl_tinker.core.versions import VersionTable
from verl_tinker.engine.base import Engine

log = logging.getLogger(__name__)


class Saving:
    """The save commands. They go through the run's queue, so what is saved is what the order says."""

    def __init__(
        self,
        engine: Engine,
        training: Training,
        checkpoints: CheckpointStore,
        versions: VersionTable,
        samplers: SamplerTable,
        snapshots: Snapshots,
    ):
        self._engine = engine
        self._training = training
        self._checkpoints = checkpoints
        self._versions = versions
        self._samplers = samplers
        self._snapshots = snapshots

    def save_weights(
        self,
        caller: Caller,
        model_id: str,
        seq: int | None,
        name: str,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: dict[str, str],
    ) -> Future:
        async def save(run: Run) -> dict:
            path = CheckpointPath(model_id, "weights", check_name(name))
            await self._write(run, path, seq, overwrite, ttl_seconds, user_metadata, self._engine.save_state)
            await self._prune(path)
            return {"path": str(path)}

        return self._training.submit(caller, model_id, seq, "save_weights", self._training.on_run(model_id, save))

    def save_named_sampler(
        self,
        caller: Caller,
        model_id: str,
        seq: int | None,
        name: str,
        ttl_seconds: int | None,
        user_metadata: dict[str, str],
    ) -> Future:
        async def save(run: Run) -> dict:
            path = CheckpointPath(model_id, "sampler_weights", check_name(name))
            checkpoint = await self._write(
                run, path, seq, False, ttl_seconds, user_metadata, self._engine.export_sampler
            )
            try:
                # A server that samples nothing writes such weights all the same: recipes save them at their end.
                if find_model(self._engine.base_models(), run.spec.base_model).sampleable:
                    await self._versions.load(
                        run.spec.base_model, model_id, self._checkpoints.folder(path), str(path), checkpoint.uid
                    )
            except BaseException:
                # Weights that failed the check must not be found under a name later.
                self._checkpoints.delete(path)
                raise
            await self._prune(path)
            return {"path": str(path)}

        return self._training.submit(
            caller, model_id, seq, "save_weights_for_sampler", self._training.on_run(model_id, save))

    def save_external(
        self,
        caller: Caller,
        model_id: str,
        seq: int | None,
        name: str,
        ttl_seconds: int | None,
        age_recipients: list[str],
    ) -> Future:
        """Weights alone, in PEFT or Hugging Face layout, to be downloaded file by file."""

        async def save(run: Run) -> dict:
            path = CheckpointPath(model_id, "external_weights", check_name(name))
            recipients = encryption.check_recipients(age_recipients)

            async def export(run_id: str, folder: Path) -> None:
                await self._engine.export_weights(run_id, folder)
                if recipients:
                    await asyncio.to_thread(encryption.encrypt_files, folder, recipients)

            checkpoint = await self._write(run, path, seq, False, ttl_seconds, {}, export)
            await self._prune(path)
            return {"path": str(path), "size_bytes": checkpoint.size_bytes}

        return self._training.submit(
            caller, model_id, seq, "save_weights_external", self._training.on_run(model_id, save))

    def save_snapshot(
        self, caller: Caller, model_id: str, seq: int | None, sampling_session_seq_id: int, inflight: bool
    ) -> Future:
        """A sampler without a name: of the weights as they are, or of the newest that are published as inflight."""

        async def save(run: Run) -> dict:
            sampler_id = f"{run.session.session_id}:sample:{sampling_session_seq_id}"
            if self._samplers.find(sampler_id):
                raise UserError(f"sampling_session_seq_id {sampling_session_seq_id} is taken by {sampler_id}")
            folder = await asyncio.to_thread(self._snapshots.folder, model_id)
            async with self._discarded_on_failure(folder, sampler_id):
                await self._engine.export_sampler(model_id, folder)
                made_by = f"{model_id}, its version {run.version}"
                version = await self._versions.load(run.spec.base_model, model_id, folder, made_by, is_kept=inflight)
            sampler = Sampler(sampler_id, run.session.session_id, version.base_model, run.session.owner)
            if inflight:
                sampler.inflight_run = model_id
                before = self._samplers.publish(model_id, version)
                if before is not None:
                    await self._versions.evict(before, "newer inflight weights took its place")
            else:
                sampler.snapshot = version
            self._samplers.add(sampler)
            return {"sampling_session_id": sampler_id}

        return self._training.submit(
            caller, model_id, seq, "save_weights_for_sampler", self._training.on_run(model_id, save))

    async def _write(
        self,
        run: Run,
        path: CheckpointPath,
        seq: int | None,
        overwrite: bool,
        ttl_seconds: int | None,
        user_metadata: dict[str, str],
        write: Callable[[str, Path], Awaitable[None]],
    ) -> Checkpoint:
        check_ttl(ttl_seconds)
        await asyncio.to_thread(self._checkpoints.admit, path, overwrite)
        now = time.time()
        checkpoint = Checkpoint(
            uid=secrets.token_hex(8),
            path=path,
            spec=run.spec,
            created=now,
            seq=seq,
            user_metadata=user_metadata,
            owner=run.session.owner,
            ttl_seconds=ttl_seconds,
            expires_at=None if ttl_seconds is None else now + ttl_seconds,
        )
        folder = self._checkpoints.scratch()
        async with self._discarded_on_failure(folder, str(path)):
            await write(run.run_id, folder)
            return await asyncio.to_thread(self._checkpoints.publish, folder, checkpoint)

    async def _prune(self, path: CheckpointPath) -> None:
        """Remove what the run has beyond `keep_last`, but nothing that a sampler stands for."""
        for old in await asyncio.to_thread(self._checkpoints.surplus, path.run_id, path.kind):
            if not self._samplers.in_use(old.uid):
                await self._versions.evict_checkpoint(old.uid, f"{old.path} was removed: newer ones took its place")
                try:
                    await asyncio.to_thread(self._checkpoints.delete, old.path)
                except StorageError as error:
                    # What was to be saved is saved, and the next save tries again.
                    log.error("%s", error)

    @asynccontextmanager
    async def _discarded_on_failure(self, folder: Path, what: str) -> AsyncIterator[None]:
        """Remove a half-made folder when what fills it fails, and say so when it was the disk."""
        try:
            with disk.explained(self._checkpoints.root, what):
                yield
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
