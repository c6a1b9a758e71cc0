"""The engine behind the API: verl's actor workers train, vLLM samples, every transfer is checked.

Owns which runs and versions exist on the workers. Does not order commands: `verl_tinker.core` does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from verl_tinker.core.errors import EngineError, UserError
from verl_tinker.core.types import (
    AdamParams,
    BaseModelInfo,
    Datum,
    ForwardBackwardResult,
    ModelInfo,
    ModelSpec,
    SampleRequest,
    SampleResult,
    SamplingParams,
)
from verl_tinker.engine import probe
from verl_tinker.engine.cluster import Cluster
from verl_tinker.engine.cpu.environment import rollout_environment, worker_environment
from verl_tinker.engine.sampler import Sampler
from verl_tinker.engine.settings import EngineSettings
from verl_tinker.engine.trainer import Trainer


class VerlEngine:
    """Implements `verl_tinker.engine.base.Engine`."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.cluster = Cluster(settings.ray_address)
        self.trainer: Trainer | None = None
        self.sampler: Sampler | None = None
        self.runs: dict[str, ModelSpec] = {}
        self._base_probe: np.ndarray | None = None

    def base_models(self) -> list[BaseModelInfo]:
        return self.settings.models

    async def start(self, report: Callable[[str], None]) -> None:
        s = self.settings
        report("starting Ray")
        await asyncio.to_thread(self.cluster.start)
        report("starting the trainer" + (" and the sampler" if s.has_rollout else ""))
        on_cpu = s.device == "cpu"
        self.trainer = Trainer(s, worker_environment(s.threads, self.cluster.rendezvous_file()) if on_cpu else {})
        starts = [self.trainer.start()]
        if s.has_rollout:
            environment = rollout_environment(s.threads, s.kv_cache_gb, str(s.work_folder)) if on_cpu else {}
            self.sampler = Sampler(s, environment, with_lora=s.mode != "full")
            starts.append(self.sampler.start())
        await asyncio.gather(*starts)
        report("comparing trainer and sampler")
        self._base_probe = await self.trainer.logprobs(None, self._probe_tokens())
        if self.sampler is not None:
            await self._compare(0, self._base_probe)

    async def close(self) -> None:
        for part in (self.sampler, self.trainer):
            if part is not None:
                part.close()
        self.sampler = self.trainer = None
        await asyncio.to_thread(self.cluster.stop)

    async def check(self) -> None:
        await self.trainer.call("ping")
        if self.sampler is not None:
            await self.sampler.ping()

    def _info(self, name: str) -> BaseModelInfo:
        for info in self.settings.models:
            if info.name == name:
                return info
        known = ", ".join(m.name for m in self.settings.models)
        raise UserError(f"base_model: {name!r} is not served here; this server has {known}")

    async def create_model(self, model_id: str, spec: ModelSpec) -> ModelInfo:
        info = self._info(spec.base_model)
        s = self.settings
        if spec.lora is None and s.mode == "lora":
            raise UserError("lora_config.rank: 0 asks for full fine-tuning, but the preset has actor.mode lora; "
                            "set it to auto or full")
        if spec.lora is not None and s.mode == "full":
            raise UserError(f"lora_config.rank: {spec.lora.rank} asks for an adapter, but the preset has actor.mode "
                            "full; set it to auto or lora, or ask for rank 0")
        notes = []
        if spec.lora is not None:
            if not 1 <= spec.lora.rank <= s.max_lora_rank:
                raise UserError(f"lora_config.rank: {spec.lora.rank} is outside 1..{s.max_lora_rank}; "
                                "raise actor.max_lora_rank in the preset")
            if spec.lora.train_unembed and info.tied_embeddings:
                spec = replace(spec, lora=replace(spec.lora, train_unembed=False))
                notes.append(f"train_unembed is off: {info.name} ties its unembedding to the embedding")
            if not (spec.lora.train_attn or spec.lora.train_mlp or spec.lora.train_unembed):
                raise UserError("lora_config: nothing is left to train; set train_attn or train_mlp")
        await self.trainer.call("create_run", model_id, spec.lora, s.lora_alpha)
        self.runs[model_id] = spec
        return ModelInfo(spec, notes)

    async def drop_model(self, model_id: str) -> None:
        if self.runs.pop(model_id, None) is not None:
            await self.trainer.call("drop_run", model_id)

    async def forward_backward(
        self, model_id: str, data: list[Datum], loss_fn: str, config: dict[str, float], backward: bool
    ) -> ForwardBackwardResult:
        return await self.trainer.forward_backward(model_id, data, loss_fn, config, backward)

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        return await self.trainer.call("step_run", model_id, adam)

    async def save_state(self, model_id: str, folder: Path) -> None:
        await self.trainer.call("save_weights", model_id, str(folder), self.runs[model_id].base_model)
        await self.trainer.call("save_optimizer", model_id, str(folder))

    async def load_state(self, model_id: str, folder: Path, optimizer: bool) -> None:
        await self.trainer.call("load_run", model_id, str(folder), optimizer)

    async def export_sampler(self, model_id: str, folder: Path) -> None:
        await self.trainer.call("save_weights", model_id, str(folder), self.runs[model_id].base_model)
        tokens = self._probe_tokens()
        logprobs = await self.trainer.logprobs(model_id, tokens)
        probe.write(folder, tokens, logprobs, self._base_probe)

    async def load_version(self, version: int, base_model: str, folder: Path) -> None:
        if self.sampler is None:
            raise UserError("this preset has no sampler; start the server with configs/quick_start/actor_rollout.yaml")
        self._info(base_model)
        saved = probe.read(folder)
        if saved is None:
            raise EngineError(f"{folder.name} has no {probe.FILE}; export it from a training run")
        await self.sampler.load_version(version, str(folder), _adapter_rank(folder))
        try:
            await self._compare(version, saved[1])
        except BaseException:
            await self.sampler.unload_version(version)
            raise

    async def retire_version(self, version: int) -> None:
        await self.sampler.unload_version(version)

    async def sample(self, base_model: str, version: int, request: SampleRequest) -> SampleResult:
        if self.sampler is None:
            raise UserError("this preset has no sampler; start the server with configs/quick_start/actor_rollout.yaml")
        return await self.sampler.generate(request, version)

    def _probe_tokens(self) -> np.ndarray:
        return probe.probe_tokens(min(m.vocab_size for m in self.settings.models))

    async def _compare(self, version: int, trainer: np.ndarray) -> None:
        request = SampleRequest(self._probe_tokens(), 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
        result = await self.sampler.generate(request, version)
        exact = self.settings.rollout_args.get("dtype") == "float32"
        probe.compare(version, trainer, result.prompt_logprobs[1:], self._base_probe, exact)


def _adapter_rank(folder: Path) -> int:
    file = folder / "adapter_config.json"
    return int(json.loads(file.read_text())["r"]) if file.exists() else 0
