"""The sampler seen from the server: start its replica, load versions, generate, with a limit on every wait.

Owns the Ray handle of the sampler. Does not choose versions.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutReplicaRegistry

from verl_tinker.core.errors import EngineError, TinkerError
from verl_tinker.core.types import SampleRequest, SampleResult
from verl_tinker.engine import sampler_server
from verl_tinker.engine.settings import EngineSettings

# Both spellings: vLLM matches its own fused layers and the adapter files name the parts.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "lm_head"]


class Sampler:
    """One replica; requests go to it side by side."""

    def __init__(self, settings: EngineSettings, environment: dict[str, str], with_lora: bool):
        self.settings = settings
        self.environment = environment
        self.with_lora = with_lora
        self.server: Any = None

    def _engine_args(self) -> dict[str, Any]:
        s = self.settings
        args = {
            "model": str(s.model_folder),
            "tokenizer": str(s.model_folder),
            "max_model_len": min(m.max_context for m in s.models),
            "logprobs_mode": "processed_logprobs",
            "disable_log_stats": True,
            **s.rollout_args,
        }
        if self.with_lora:
            args |= {
                "enable_lora": True,
                "max_lora_rank": next(r for r in (8, 16, 32, 64, 128, 256, 320, 512) if r >= s.max_lora_rank),
                "max_loras": min(4, s.keep_versions),
                "max_cpu_loras": 2 * s.keep_versions,
                "lora_target_modules": LORA_TARGETS,
            }
        return args

    async def start(self) -> None:
        s = self.settings
        settings = sampler_server.SamplerSettings(
            model_folder=str(s.model_folder), engine_args=self._engine_args(), environment=self.environment,
            cpus=1, gpus=s.rollout_gpus, on_cpu=s.device == "cpu")
        replica_class = RolloutReplicaRegistry.get("vllm_in_process")
        replica = replica_class(replica_rank=0, config=s.verl_config.rollout, model_config=s.verl_config.model)
        replica.settings = settings
        await self._bounded("start", replica.init_standalone(), s.start_timeout_s)
        self.server = replica.server_handle

    async def generate(self, request: SampleRequest, version: int) -> SampleResult:
        return await self._bounded("generate", self.server.generate.remote(request, version))

    async def load_version(self, version: int, folder: str, rank: int) -> dict[str, str]:
        return await self._bounded("load_version", self.server.load_version.remote(version, folder, rank))

    async def unload_version(self, version: int) -> None:
        await self._bounded("unload_version", self.server.unload_version.remote(version))

    async def ping(self) -> int:
        return await self._bounded("ping", self.server.ping.remote(), 60)

    async def _bounded(self, name: str, reference, limit: float | None = None) -> Any:
        limit = limit or self.settings.timeout_s
        try:
            return await asyncio.wait_for(_awaitable(reference), limit)
        except TimeoutError:
            raise EngineError(f"the sampler did not answer {name} within {limit:.0f} s") from None
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TinkerError):
                raise error.cause from None
            raise EngineError(f"the sampler failed in {name}: {error.cause!r}") from error
        except ray.exceptions.RayActorError as error:
            raise EngineError(f"the sampler process died ({error.error_msg or 'no message'}); restart the server") from error

    def close(self) -> None:
        if self.server is not None:
            ray.kill(self.server)
            self.server = None


async def _awaitable(reference):
    return await reference
