"""Samplers: names for weight versions, and the way from a name to loaded weights.

Owns which weights a sampler stands for; that never changes. Does not sample.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_tinker.core.checkpoints import CheckpointPath
from verl_tinker.core.errors import Evicted, NotFound, UserError
from verl_tinker.core.store import CheckpointStore
from verl_tinker.core.versions import Version, VersionTable

OTHER_RUNS = "other runs"


@dataclass
class Sampler:
    """A base model (neither of the two), an unnamed snapshot, or a checkpoint by path and uid."""

    sampler_id: str
    session_id: str
    base_model: str
    snapshot: Version | None = None
    path: CheckpointPath | None = None
    checkpoint_uid: str | None = None
    clones: int = 0

    def join(self) -> int:
        """A number from 1 for one more client of this sampler; its requests count from a range of their own."""
        self.clones += 1
        return self.clones


class SamplerTable:
    """Every sampler by id; loads a named one's weights again when they were evicted."""

    def __init__(self, versions: VersionTable, checkpoints: CheckpointStore, is_live: Callable[[str], bool]):
        self._versions = versions
        self._checkpoints = checkpoints
        self._is_live = is_live
        self._samplers: dict[str, Sampler] = {}

    def get(self, sampler_id: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None:
            raise NotFound(
                f"sampling_session_id {sampler_id!r} is not known here; the server may have restarted since. "
                "Create a sampling client again from the saved path or the base model"
            )
        return sampler

    def find(self, sampler_id: str) -> Sampler | None:
        return self._samplers.get(sampler_id)

    def add(self, sampler: Sampler) -> Sampler:
        self._samplers[sampler.sampler_id] = sampler
        return sampler

    def of_path(self, sampler_id: str, session_id: str, path: CheckpointPath) -> Sampler:
        """A sampler, not added yet, for what a path holds now."""
        if path.kind != "sampler_weights":
            raise UserError(
                f"model_path: {path} holds training weights, which are resumed and not sampled; save with "
                "save_weights_for_sampler and use the path it returns"
            )
        checkpoint = self._checkpoints.get(path)
        return Sampler(sampler_id, session_id, checkpoint.spec.base_model, path=path, checkpoint_uid=checkpoint.uid)

    async def version(self, sampler: Sampler) -> Version | None:
        """The loaded version that a sampler stands for, None for the base model; never any other weights."""
        if sampler.snapshot is not None:
            if sampler.snapshot.evicted:
                raise Evicted(
                    f"sampler {sampler.sampler_id} cannot answer: {sampler.snapshot.evicted}. It was an unnamed "
                    "snapshot, so it cannot be loaded again; save again with save_weights_for_sampler, and give a name "
                    "to weights that must stay"
                )
            return sampler.snapshot
        if sampler.path is None:
            return None
        return self._versions.find(sampler.checkpoint_uid) or await self._reload(sampler)

    async def _reload(self, sampler: Sampler) -> Version:
        path = sampler.path
        checkpoint = self._checkpoints.get(path)
        if checkpoint.uid != sampler.checkpoint_uid:
            raise Evicted(
                f"sampler {sampler.sampler_id} cannot answer: its weights {path} were deleted and other weights were "
                "saved under that name since; create a new sampling client to use those"
            )
        group = path.run_id if self._is_live(path.run_id) else OTHER_RUNS
        folder = self._checkpoints.folder(path)
        return await self._versions.load(checkpoint.spec.base_model, group, folder, checkpoint.uid)
