"""The trained model's sampler: every version on every replica, and each of them checked against the trainer.

Owns which versions its replicas hold. Does not choose versions, nor the replica that answers: `replicas` does.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from verl.workers.rollout.replica import RolloutReplica

from verl_tinker.core.errors import WorkerDied
from verl_tinker.core.types import SampleRequest, SampleResult
from verl_tinker.engine.replicas import Launch, Replicas, Seen
from verl_tinker.engine.rollout import actor_replica
from verl_tinker.engine.settings import EngineSettings

# Asks one replica, which alone is to answer.
AskOne = Callable[[SampleRequest, int], Awaitable[SampleResult]]


class Sampler:
    """`verify(version, folder, ask)` raises unless the replica that `ask` asks has the trainer's weights; version 0 is
    the base, without a folder."""

    def __init__(self, settings: EngineSettings, environment: dict[str, str], with_lora: bool,
                 verify: Callable[[int, str | None, AskOne], Awaitable[None]]):
        self.settings = settings
        self.environment = environment
        self.with_lora = with_lora
        self.verify = verify
        self.versions: dict[int, tuple[str, int]] = {}
        self.replicas: Replicas | None = None
        self._trainer_group: Any = None
        self._built = 0

    async def start(self, trainer_group: Any = None) -> None:
        """`trainer_group` is verl's worker group whose GPUs the stock replicas share, unless they have their own."""
        s = self.settings
        self._trainer_group = trainer_group
        count = s.rollout_replicas or 1
        if not s.rollout_replicas and s.replica == "stock":
            count = trainer_group.world_size // s.verl_config.rollout.tensor_model_parallel_size
        # A sampler that shares its memory with the trainer starts again with it, for it may be the trainer's turn.
        self.replicas = Replicas("the sampler", count, Launch(self._build, self._launch, self._restore), s.timeout_s,
                                 s.start_timeout_s, replaces=not s.takes_turns)
        await self.replicas.start()

    def _build(self, rank: int) -> RolloutReplica:
        self._built += 1
        return actor_replica(self.settings, rank, self.environment, self.with_lora, self._built)

    async def _launch(self, replica: RolloutReplica) -> None:
        if self.settings.replica == "in_process" or self.settings.rollout_replicas:
            await replica.init_standalone()
        else:
            await replica.init_hybrid(self._trainer_group)

    async def _restore(self, replicas: Replicas, rank: int) -> None:
        await self._verify(rank, 0, None)
        for version, (folder, lora_rank) in self.versions.items():
            await replicas.ask(rank, "load_version", version, folder, lora_rank)
            await self._verify(rank, version, folder)

    async def _verify(self, rank: int, version: int, folder: str | None) -> None:
        await self.verify(version, folder, lambda request, number: self.replicas.ask(rank, "sample", request, number))

    async def verify_base(self) -> None:
        for rank in self.replicas.ranks:
            await self._verify(rank, 0, None)

    async def generate(self, request: SampleRequest, version: int, seen: Seen = None) -> SampleResult:
        return await self.replicas.generate(request, version, seen)

    async def load_version(self, version: int, folder: str, lora_rank: int) -> None:
        """On every replica, compared on each, or on none."""
        async with self.replicas.changing:
            try:
                if not await self.replicas.ask_all("load_version", version, folder, lora_rank) and not self.replicas.replaces:
                    raise WorkerDied("no replica of the sampler answers")
                for rank in self.replicas.ranks:
                    await self._verify(rank, version, folder)
            except BaseException:
                await self.replicas.ask_all("unload_version", version)
                raise
            # A replica that starts meanwhile loads it too.
            self.versions[version] = folder, lora_rank

    async def unload_version(self, version: int) -> None:
        async with self.replicas.changing:
            self.versions.pop(version, None)
            await self.replicas.ask_all("unload_version", version)

    async def check(self) -> None:
        await self.replicas.check()

    async def sleep(self) -> None:
        """Give the GPUs' memory away: base weights go to host memory, adapters and versions survive."""
        await self.replicas.each("sleep")

    async def wake_up(self) -> None:
        await self.replicas.each("wake_up")

    async def close(self) -> None:
        if self.replicas is not None:
            await self.replicas.close()
