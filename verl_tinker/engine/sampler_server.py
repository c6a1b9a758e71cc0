"""The Ray actor that holds vLLM in one process, and the RolloutReplica through which verl knows it.

Owns the process boundary of sampling without a GPU. Does not decide versions or order: `sampler_loop` does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode, RolloutReplica, RolloutReplicaRegistry

from verl_tinker.core.types import Drawn, SampleRequest, SampleResult


@dataclass(frozen=True)
class SamplerSettings:
    """What one sampler process needs. `engine_args` are vLLM's own."""

    model_folder: str
    engine_args: dict[str, Any]
    environment: dict[str, str]
    cpus: float


class SamplerServer:
    """Runs as an async Ray actor; every method may be called while others wait."""

    def __init__(self, settings: SamplerSettings):
        self.settings = settings
        self.loop = None

    async def start(self) -> None:
        self.loop = await asyncio.to_thread(self._build)

    def _build(self):
        from verl_tinker.engine.cpu import vllm_cpu
        from verl_tinker.engine.sampler_loop import SamplerLoop

        vllm_cpu.install()
        return SamplerLoop(self.settings.engine_args, self.settings.model_folder)

    async def ping(self) -> int:
        """The process id, once the engine's thread has answered too."""
        await asyncio.wrap_future(self.loop.call(int))
        return os.getpid()

    async def sample(self, request: SampleRequest, version: int) -> SampleResult:
        return await asyncio.wrap_future(self.loop.submit(request, version))

    async def sample_seen(self, request: SampleRequest, version: int) -> AsyncIterator[Drawn | SampleResult]:
        """What is drawn, as it is drawn, and at last the whole result."""
        here, parts = asyncio.get_running_loop(), asyncio.Queue()
        seen = lambda part: here.call_soon_threadsafe(parts.put_nowait, part)  # noqa: E731
        result = asyncio.wrap_future(self.loop.submit(request, version, seen))
        result.add_done_callback(lambda _: parts.put_nowait(None))
        while (part := await parts.get()) is not None:
            yield part
        yield await result

    async def load_version(self, version: int, folder: str, rank: int) -> dict[str, str]:
        """Fingerprints of the adapter tensors now in the engine, by name."""
        return await asyncio.wrap_future(self.loop.call(self.loop.load, version, folder, rank))

    async def unload_version(self, version: int) -> None:
        await asyncio.wrap_future(self.loop.call(self.loop.unload, version))


class InProcessReplica(RolloutReplica):
    """verl's rollout replica over one SamplerServer: no HTTP server, no worker processes of its own."""

    settings: SamplerSettings

    async def launch_servers(self) -> None:
        actor = ray.remote(SamplerServer).options(
            num_cpus=self.settings.cpus,
            # On as many nodes as there are, so that the loss of one leaves others.
            scheduling_strategy="SPREAD",
            max_concurrency=self.max_concurrency,
            runtime_env={"env_vars": self.settings.environment},
        )
        server = actor.remote(self.settings)
        self.servers = [server]
        self._server_handle = server
        await server.start.remote()

    async def init_standalone(self) -> None:
        """verl's own version reserves GPUs for worker processes, of which there are none here."""
        self.rollout_mode = RolloutMode.STANDALONE
        await self.launch_servers()

    async def close(self) -> None:
        for server in self.servers:
            ray.kill(server)
        self.servers = []


RolloutReplicaRegistry.register("vllm_in_process", lambda: InProcessReplica)
