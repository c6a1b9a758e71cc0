"""Frozen models beside the trained one: each on replicas of its own, none with versions.

Owns which replicas belong to which public name, and the placement that packed ones share. Places no other: verl and Ray do, in
the order of the settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import ray
from verl.single_controller.ray.base import RayResourcePool, SubRayResourcePool, split_resource_pool
from verl.workers.rollout.replica import RolloutReplica

from verl_tinker.core.types import BaseModelInfo, SampleRequest, SampleResult
from verl_tinker.engine.cpu.environment import rollout_environment
from verl_tinker.engine.replicas import Launch, Replicas, Seen
from verl_tinker.engine.rollout import teacher_replica
from verl_tinker.engine.settings import EngineSettings, TeacherSettings


class Teachers:
    """All teachers of a preset, the largest first."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.replicas: dict[str, Replicas] = {}
        self._packs: list[_Pack] = []
        self._built = 0

    @property
    def models(self) -> list[BaseModelInfo]:
        return [info for teacher in self.settings.teachers for info in teacher.models]

    async def start(self) -> None:
        # One after the other: the largest needs whole nodes, which smaller ones would take from it.
        for teacher in self.settings.teachers:
            group = Replicas(f"teacher {teacher.key}", teacher.replicas,
                             Launch(lambda rank, t=teacher: self._build(t, rank), self._launch_of(teacher), _restore),
                             self.settings.timeout_s, self.settings.start_timeout_s)
            self.replicas |= {info.name: group for info in teacher.models}
            await group.start()

    def _launch_of(self, teacher: TeacherSettings) -> Callable[[RolloutReplica], Awaitable[None]]:
        if not teacher.packed or teacher.replicas == 1 or self.settings.replica == "in_process":
            # verl packs the GPUs of one replica by itself.
            return _launch
        self._packs.append(_Pack(teacher))
        return self._packs[-1].launch

    def _build(self, teacher: TeacherSettings, rank: int) -> RolloutReplica:
        s = self.settings
        on_cpu = s.device == "cpu"
        environment = rollout_environment(s.threads, teacher.kv_cache_gb, str(s.work_folder)) if on_cpu else {}
        self._built += 1
        return teacher_replica(s, teacher, rank, environment, self._built)

    def knows(self, name: str) -> bool:
        return name in self.replicas

    async def generate(self, name: str, request: SampleRequest, seen: Seen = None) -> SampleResult:
        return await self.replicas[name].generate(request, 0, seen)

    async def check(self) -> None:
        for group in set(self.replicas.values()):
            await group.check()

    async def close(self) -> None:
        for group in set(self.replicas.values()):
            await group.close()
        for pack in self._packs:
            pack.close()
        self._packs.clear()
        self.replicas.clear()


class _Pack:
    """One placement for all replicas of a teacher; one that is started again takes the place of the one that died."""

    def __init__(self, teacher: TeacherSettings):
        self._teacher = teacher
        self._placing = asyncio.Lock()
        self._pool: RayResourcePool | None = None
        self._shares: list[SubRayResourcePool] = []

    async def launch(self, replica: RolloutReplica) -> None:
        async with self._placing:
            if not self._shares:
                self._shares = await asyncio.to_thread(self._place, replica.world_size)
        await replica.init_colocated(self._shares[replica.replica_rank])

    def _place(self, replica_size: int) -> list[SubRayResourcePool]:
        size = self._teacher.replicas * replica_size
        # Where one node is too small the planner has made sure that whole ones hold them.
        node = min(size, int(max(found["Resources"].get("GPU", 0) for found in ray.nodes() if found["Alive"])))
        # As many places on a GPU as verl gives a replica that stands alone.
        self._pool = RayResourcePool([node] * (size // node), name_prefix=f"teacher_{self._teacher.key}", max_colocate_count=2)
        return split_resource_pool(self._pool, replica_size)

    def close(self) -> None:
        for group in self._pool.pgs or [] if self._pool else []:
            ray.util.remove_placement_group(group)


async def _launch(replica: RolloutReplica) -> None:
    await replica.init_standalone()


async def _restore(replicas: Replicas, rank: int) -> None:
    """It read its weights from the folder, and there is nothing else."""
