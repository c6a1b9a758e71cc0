"""Frozen models beside the trained one: each on replicas of its own, none with versions.

Owns which replicas belong to which public name. Does not place them: verl and Ray do, in the order of the settings.
"""

from __future__ import annotations

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
        self._built = 0

    @property
    def models(self) -> list[BaseModelInfo]:
        return [info for teacher in self.settings.teachers for info in teacher.models]

    async def start(self) -> None:
        # One after the other: the largest needs whole nodes, which smaller ones would take from it.
        for teacher in self.settings.teachers:
            group = Replicas(f"teacher {teacher.key}", teacher.replicas,
                             Launch(lambda rank, t=teacher: self._build(t, rank), _launch, _restore),
                             self.settings.timeout_s, self.settings.start_timeout_s)
            self.replicas |= {info.name: group for info in teacher.models}
            await group.start()

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
        self.replicas.clear()


async def _launch(replica: RolloutReplica) -> None:
    await replica.init_standalone()


async def _restore(replicas: Replicas, rank: int) -> None:
    """It read its weights from the folder, and there is nothing else."""
