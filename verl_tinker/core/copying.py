"""Copies of checkpoints, each under a training run of its own that holds nothing else.

Owns the ids of those runs. Does not decide who may read the source: the store does.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import time
from dataclasses import replace

from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath, RunRecord, check_ttl
from verl_tinker.core.errors import UserError
from verl_tinker.core.store import CheckpointStore

_COPY = "copy-"


class Copying:
    """Copies share the disk with their source and outlive it; deleting either leaves the other."""

    def __init__(self, store: CheckpointStore):
        self._store = store
        # Two requests of one retry must not both find nothing there.
        self._one_at_a_time = asyncio.Lock()

    async def copy(
        self,
        source: Checkpoint,
        owner: str,
        run_id: str | None,
        project_id: str | None,
        ttl_seconds: int | None,
        key: str | None,
    ) -> CheckpointPath:
        """The path of a copy. A retry, which has the same run or the same `key`, gets the path of the first copy."""
        check_ttl(ttl_seconds)
        run_id = run_id or _run_of_key(owner, key)
        async with self._one_at_a_time:
            return await asyncio.to_thread(self._copy, source, owner, run_id, project_id, ttl_seconds)

    def _copy(
        self, source: Checkpoint, owner: str, run_id: str, project_id: str | None, ttl_seconds: int | None
    ) -> CheckpointPath:
        path = replace(source.path, run_id=run_id)
        known = next((c for c in self._store.list(run_id) if c.path == path and c.source_uid == source.uid), None)
        if known:
            return known.path
        if self._store.run(run_id) is not None and not run_id.startswith(_COPY):
            raise UserError(
                f"model_seq_id: {run_id} is a training run already, with weights of its own; give the copy a number of its "
                "own, or destination_project_id"
            )
        now = time.time()
        scratch = self._store.scratch()
        try:
            self._store.link_files(source, scratch)
            run = self._store.run(source.path.run_id)
            self._store.record_run(
                RunRecord(run_id, source.spec, now, run.user_metadata if run else {}, owner, project_id))
            self._store.publish(scratch, replace(
                source, uid=secrets.token_hex(8), source_uid=source.uid, path=path, created=now, owner=owner, public=False,
                ttl_seconds=ttl_seconds, expires_at=None if ttl_seconds is None else now + ttl_seconds))
        except BaseException:
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        return path


def _run_of_key(owner: str, key: str | None) -> str:
    # Made from the key, so that a retry meets the first copy even after a restart.
    word = hashlib.sha256(f"{owner}\n{key}".encode()).hexdigest()[:16] if key else secrets.token_hex(8)
    return f"{_COPY}{word}:train:0"
