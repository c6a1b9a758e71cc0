"""The sampler seen from the server: start its replicas, load versions, generate, with a limit on every wait.

Owns the replicas and which of them answers a request. Does not choose versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any

from omegaconf import OmegaConf
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from verl_tinker.core.types import SampleRequest, SampleResult
from verl_tinker.core.validate_sampling import MAX_TOPK
from verl_tinker.engine import sampler_server
from verl_tinker.engine.settings import EngineSettings
from verl_tinker.engine.waiting import answer_of

# Both spellings: vLLM matches its own fused layers and the adapter files name the parts.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "lm_head"]


class Sampler:
    """Replicas that all hold every version; a request goes to the one with the fewest in flight."""

    def __init__(self, settings: EngineSettings, environment: dict[str, str], with_lora: bool):
        self.settings = settings
        self.environment = environment
        self.with_lora = with_lora
        self.replicas: list[RolloutReplica] = []
        self.in_flight: list[int] = []

    async def start(self, trainer_group: Any = None) -> None:
        """`trainer_group` is verl's worker group whose GPUs the stock replicas share."""
        if self.settings.replica == "in_process":
            self.replicas = [self._in_process()]
            starts = [self.replicas[0].init_standalone()]
        else:
            count = trainer_group.world_size // self.settings.verl_config.rollout.tensor_model_parallel_size
            self.replicas = [self._stock(rank) for rank in range(count)]
            starts = [replica.init_hybrid(trainer_group) for replica in self.replicas]
        self.in_flight = [0] * len(self.replicas)
        await asyncio.gather(*(self._bounded(i, "start", start, self.settings.start_timeout_s)
                               for i, start in enumerate(starts)))

    def _in_process(self) -> RolloutReplica:
        s = self.settings
        replica_class = RolloutReplicaRegistry.get("vllm_in_process")
        replica = replica_class(replica_rank=0, config=s.verl_config.rollout, model_config=s.verl_config.model)
        replica.settings = sampler_server.SamplerSettings(
            model_folder=str(s.model_folder), engine_args=self._engine_args(), environment=self.environment, cpus=1)
        return replica

    def _stock(self, rank: int) -> RolloutReplica:
        s = self.settings
        # The preset's own arguments for vLLM win.
        rollout = OmegaConf.merge({"engine_kwargs": {"vllm": self._version_args()}}, s.verl_config.rollout,
                                  {"max_model_len": self._max_context()})
        return RolloutReplicaRegistry.get("vllm_versions")(
            replica_rank=rank, config=rollout, model_config=s.verl_config.model, gpus_per_node=s.n_workers_per_node,
            # `prompt_logprobs` corrects the first version of vLLM's model runner.
            environment={**self.environment, "VLLM_USE_V2_MODEL_RUNNER": "0"})

    def _max_context(self) -> int:
        return min(m.max_context for m in self.settings.models)

    def _engine_args(self) -> dict[str, Any]:
        """All that vLLM is told in process; the stock replica makes most of it from verl's rollout section."""
        return {
            "model": str(self.settings.model_folder),
            "tokenizer": str(self.settings.model_folder),
            "max_model_len": self._max_context(),
            "disable_log_stats": True,
            # Samples of one prompt share its whole blocks. vLLM's 128 tokens without a GPU leave much of a prompt to be
            # computed for each, and all of a short one; 32 is the least that its kernels are fast with.
            "block_size": 32,
            **self.settings.rollout_args,
            **self._version_args(),
        }

    def _version_args(self) -> dict[str, Any]:
        """What versions and their checks need of vLLM, beyond verl's rollout section."""
        s = self.settings
        args: dict[str, Any] = {"logprobs_mode": "processed_logprobs", "max_logprobs": MAX_TOPK}
        if self.with_lora:
            args |= {
                "enable_lora": True,
                "max_lora_rank": next(r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= s.max_lora_rank),
                "max_loras": min(4, s.keep_versions),
                "max_cpu_loras": 2 * s.keep_versions,
                "lora_target_modules": LORA_TARGETS,
            }
        return args

    async def generate(self, request: SampleRequest, version: int) -> SampleResult:
        i = min(range(len(self.replicas)), key=self.in_flight.__getitem__)
        self.in_flight[i] += 1
        try:
            return await self._ask(i, "sample", request, version)
        finally:
            self.in_flight[i] -= 1

    async def load_version(self, version: int, folder: str, rank: int) -> dict[str, str]:
        """On every replica or on none."""
        answers = await asyncio.gather(
            *(self._ask(i, "load_version", version, folder, rank) for i in range(len(self.replicas))),
            return_exceptions=True)
        errors = [answer for answer in answers if isinstance(answer, BaseException)]
        if errors:
            await self.unload_version(version)
            raise errors[0]
        return answers[0]

    async def unload_version(self, version: int) -> None:
        await self._ask_all("unload_version", version)

    async def ping(self) -> list[int]:
        return await self._ask_all("ping", limit=60)

    async def sleep(self) -> None:
        """Give the GPUs' memory away: base weights go to host memory, adapters and versions survive."""
        await asyncio.gather(*(self._bounded(i, "sleep", replica.sleep()) for i, replica in enumerate(self.replicas)))

    async def wake_up(self) -> None:
        await asyncio.gather(*(self._bounded(i, "wake_up", replica.wake_up()) for i, replica in enumerate(self.replicas)))

    async def _ask_all(self, method: str, *args, limit: float | None = None) -> list[Any]:
        return await asyncio.gather(*(self._ask(i, method, *args, limit=limit) for i in range(len(self.replicas))))

    async def _ask(self, i: int, method: str, *args, limit: float | None = None) -> Any:
        return await self._bounded(i, method, getattr(self.replicas[i].server_handle, method).remote(*args), limit)

    async def _bounded(self, i: int, name: str, answer: Awaitable, limit: float | None = None) -> Any:
        limit = limit or self.settings.timeout_s
        who = "the sampler" if len(self.replicas) == 1 else f"sampler replica {i}"
        return await answer_of(who, name, answer, limit)

    async def close(self) -> None:
        await asyncio.gather(*(replica.close() for replica in self.replicas), return_exceptions=True)
        self.replicas = []


def _load_version_replica() -> type[RolloutReplica]:
    # The module imports all of vLLM, which the in-process replica keeps out of the server's process.
    from verl_tinker.engine.vllm_server import VersionReplica

    return VersionReplica


RolloutReplicaRegistry.register("vllm_versions", _load_version_replica)
