"""Weight versions: which immutable weights are loaded, who uses them, and which must go.

Owns version ids and eviction. Does not name samplers: `verl_tinker.core.samplers` does.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from verl_tinker.core.errors import Evicted
from verl_tinker.engine.base import Engine


@dataclass(eq=False)
class Version:
    """Weights that the engine can sample. `checkpoint_id` None is an unnamed snapshot, whose folder we delete.

    `made_by` tells where they come from. `is_kept`: newer versions of its group do not push it out.
    """

    number: int
    base_model: str
    group: str
    folder: Path
    made_by: str
    checkpoint_id: str | None = None
    is_kept: bool = False
    users: int = 0
    evicted: str | None = None
    is_loaded: bool = True


class VersionTable:
    """The loaded versions, newest `per_group` of each group. A group is one training run.

    Numbers count up from 1 and are never used twice; 0 is the base model, which is always there.
    """

    def __init__(self, engine: Engine, per_group: int):
        self._engine = engine
        self._per_group = per_group
        self._last = 0
        self._loaded: dict[int, Version] = {}
        # The engine loads and retires one version at a time, from training commands and from samples alike.
        self._loading = asyncio.Lock()

    async def load(
        self, base_model: str, group: str, folder: Path, made_by: str, checkpoint_id: str | None = None, is_kept: bool = False
    ) -> Version:
        """Make a folder sampleable under a new number, and evict the oldest of its group beyond the limit."""
        async with self._loading:
            known = self.find(checkpoint_id) if checkpoint_id else None
            if known:
                return known
            self._last += 1
            version = Version(self._last, base_model, group, folder, made_by, checkpoint_id, is_kept)
            if not is_kept:
                await self._make_room(group)
            await self._engine.load_version(version.number, base_model, folder)
            self._loaded[version.number] = version
            return version

    def all(self) -> list[Version]:
        """What can be sampled now beside the base model, the oldest first."""
        return list(self._loaded.values())

    def find(self, checkpoint_id: str) -> Version | None:
        return next((v for v in self._loaded.values() if v.checkpoint_id == checkpoint_id), None)

    @asynccontextmanager
    async def using(self, version: Version) -> AsyncIterator[None]:
        """Keep a version in the engine while a sample runs, even when it is evicted meanwhile."""
        if not version.is_loaded:
            async with self._loading:
                await self._load_again(version)
        if version.evicted:
            raise Evicted(version.evicted)
        version.users += 1
        try:
            yield
        finally:
            version.users -= 1
            if version.evicted and not version.users:
                async with self._loading:
                    await self._retire(version)

    def unload_all(self) -> None:
        """The engine lost what it held: each version is loaded again, under its number, when it is next used."""
        for version in self._loaded.values():
            version.is_loaded = False

    async def _load_again(self, version: Version) -> None:
        if not version.is_loaded and not version.evicted:
            await self._engine.load_version(version.number, version.base_model, version.folder)
            version.is_loaded = True

    async def evict(self, version: Version, reason: str) -> None:
        async with self._loading:
            await self._evict(version, reason)

    async def evict_checkpoint(self, checkpoint_id: str, reason: str) -> None:
        """Evict the version that a checkpoint was loaded as, if it was."""
        version = self.find(checkpoint_id)
        if version:
            await self.evict(version, reason)

    async def evict_group(self, group: str, reason: str) -> None:
        for version in [v for v in self._loaded.values() if v.group == group]:
            await self.evict(version, reason)

    async def _make_room(self, group: str) -> None:
        members = [v for v in self._loaded.values() if v.group == group and not v.is_kept]
        for version in members[: max(0, len(members) - self._per_group + 1)]:
            await self._evict(
                version,
                f"the weights of version {version.number} ({version.made_by}) are not loaded any more: this server keeps "
                f"the newest {self._per_group} versions of a run sampleable (server.keep_versions)",
            )

    async def _evict(self, version: Version, reason: str) -> None:
        if version.evicted:
            return
        version.evicted = reason
        self._loaded.pop(version.number, None)
        if not version.users:
            await self._retire(version)

    async def _retire(self, version: Version) -> None:
        if version.is_loaded:
            await self._engine.retire_version(version.number)
        if version.checkpoint_id is None:
            await asyncio.to_thread(shutil.rmtree, version.folder, ignore_errors=True)
