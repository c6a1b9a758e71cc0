"""Samplers: names for weight versions, and the way from a name to loaded weights.

Owns which weights a sampler stands for; that never changes, but for inflight samplers, which ask for it. Does not sample.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.checkpoints import KINDS, CheckpointPath, parse_path
from verl_tinker.core.errors import Evicted, NotFound, UserError
from verl_tinker.core.journal import Journal, SamplerRecord
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.versions import Version, VersionTable

OTHER_RUNS = "other runs"
# A client's requests are numbered clone * 10^9 + n, within 64 bits.
_MOST_CLIENTS = 1_000_000_000


@dataclass
class Sampler:
    """A base model (none of the three), an unnamed snapshot, a checkpoint by path and uid, or a run's inflight weights.

    `is_lost`: its weights ended with an earlier server.
    """

    sampler_id: str
    session_id: str
    base_model: str
    owner: str = ""
    snapshot: Version | None = None
    path: CheckpointPath | None = None
    checkpoint_uid: str | None = None
    inflight_run: str | None = None
    is_lost: bool = False
    clones: int = 0

    def join(self) -> int:
        """A number from 1 for one more client of this sampler; its requests count from a range of their own."""
        self.clones += 1
        return self.clones


class SamplerTable:
    """Every sampler by id; loads a named one's weights again when they were evicted."""

    def __init__(
        self, versions: VersionTable, checkpoints: CheckpointStore, is_live: Callable[[str], bool], journal: Journal
    ):
        self._versions = versions
        self._journal = journal
        self._checkpoints = checkpoints
        self._is_live = is_live
        self._samplers: dict[str, Sampler] = {}
        self._released: set[str] = set()
        self._inflight: dict[str, Version] = {}

    def get(self, sampler_id: str, caller: Caller) -> Sampler:
        sampler = self.find(sampler_id)
        if sampler is None or not may_see(caller, sampler.owner):
            raise NotFound(
                f"sampling_session_id {sampler_id!r} is not known here; create a sampling client from a saved path or "
                "the base model"
            )
        return sampler

    def find(self, sampler_id: str) -> Sampler | None:
        return self._samplers.get(sampler_id) or self._restore(sampler_id)

    def add(self, sampler: Sampler) -> Sampler:
        self._journal.add_sampler(SamplerRecord(
            sampler.sampler_id, sampler.owner, sampler.session_id, sampler.base_model,
            str(sampler.path) if sampler.path else None, sampler.checkpoint_uid,
            sampler.snapshot is not None or sampler.inflight_run is not None))
        self._samplers[sampler.sampler_id] = sampler
        return sampler

    def publish(self, run_id: str, version: Version) -> Version | None:
        """Make a version what all inflight samplers of a run stand for from now on; the one before, for the caller to
        evict."""
        before, self._inflight[run_id] = self._inflight.get(run_id), version
        return before

    def release(self, session_id: str) -> list[Version]:
        """The snapshots that only this session's samplers stood for, which the caller evicts."""
        self._released.add(session_id)
        mine = [s.snapshot for s in self._samplers.values() if s.session_id == session_id and s.snapshot]
        return [version for version in mine if not version.evicted]

    def _restore(self, sampler_id: str) -> Sampler | None:
        """A sampler of an earlier server, from the journal."""
        record = self._journal.sampler(sampler_id)
        if record is None:
            return None
        # Clients that joined before must not meet new ones in their range of numbers.
        clones = secrets.randbelow(_MOST_CLIENTS // 2) + _MOST_CLIENTS // 4
        path = parse_path(record.path) if record.path else None
        sampler = Sampler(sampler_id, record.session_id, record.base_model, record.owner, path=path, checkpoint_uid=record.uid,
                          is_lost=record.is_snapshot, clones=clones)
        self._samplers[sampler_id] = sampler
        return sampler

    def standing_for(self, version: Version) -> list[Sampler]:
        """The samplers that were used here and stand for a loaded version now."""
        uid = version.checkpoint_id
        return [s for s in self._samplers.values()
                if s.snapshot is version or (uid is not None and s.checkpoint_uid == uid)
                or (s.inflight_run is not None and self._inflight.get(s.inflight_run) is version)]

    def of_session(self, session_id: str) -> list[str]:
        """The ids of a session's samplers, the oldest first."""
        return self._journal.samplers_of_session(session_id)

    def in_use(self, checkpoint_uid: str) -> bool:
        """Whether a sampler of a session that goes on stands for this checkpoint."""
        return bool(self._journal.sessions_of_checkpoint(checkpoint_uid) - self._released)

    def of_path(self, sampler_id: str, session_id: str, path: CheckpointPath, owner: str) -> Sampler:
        """A sampler, not added yet, for what a path holds now."""
        if path.kind != "sampler_weights":
            raise UserError(
                f"model_path: {path} is a {KINDS[path.kind]} checkpoint, which cannot be sampled; save with "
                "save_weights_for_sampler and use the path it returns"
            )
        checkpoint = self._checkpoints.get(path, owner or None)
        base_model = checkpoint.spec.base_model
        return Sampler(sampler_id, session_id, base_model, owner, path=path, checkpoint_uid=checkpoint.uid)

    async def version(self, sampler: Sampler) -> Version | None:
        """The loaded version that a sampler stands for, None for the base model; never any other weights."""
        if sampler.is_lost:
            raise Evicted(
                f"sampler {sampler.sampler_id} cannot answer: its weights had no name and ended when the server "
                "restarted; resume the run from a saved state, and give a name to weights that must stay"
            )
        if sampler.snapshot is not None:
            if sampler.snapshot.evicted:
                raise Evicted(
                    f"sampler {sampler.sampler_id} cannot answer: {sampler.snapshot.evicted}. It was an unnamed "
                    "snapshot, so it cannot be loaded again; save again with save_weights_for_sampler, and give a name "
                    "to weights that must stay"
                )
            return sampler.snapshot
        if sampler.inflight_run is not None:
            return self._newest(sampler)
        if sampler.path is None:
            return None
        return self._versions.find(sampler.checkpoint_uid) or await self._reload(sampler)

    def _newest(self, sampler: Sampler) -> Version:
        version = self._inflight[sampler.inflight_run]
        if version.evicted:
            raise Evicted(f"sampler {sampler.sampler_id} cannot answer: {version.evicted}. Its weights were those of a live "
                          "run; save with save_weights_for_sampler and a name what must outlive the run")
        return version

    async def _reload(self, sampler: Sampler) -> Version:
        path = sampler.path
        checkpoint = self._checkpoints.get(path)
        if checkpoint.uid != sampler.checkpoint_uid:
            raise Evicted(
                f"sampler {sampler.sampler_id} cannot answer: its weights {path} were deleted and other weights were "
                "saved under that name since; create a new sampling client to use those"
            )
        group = path.run_id if self._is_live(path.run_id) else OTHER_RUNS
        folder = self._checkpoints.intact(checkpoint)
        return await self._versions.load(checkpoint.spec.base_model, group, folder, str(path), checkpoint.uid)
