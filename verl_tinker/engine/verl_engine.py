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
    Drawn,
    ForwardBackwardResult,
    ModelInfo,
    ModelSpec,
    SampleRequest,
    SampleResult,
    SamplingParams,
)
from verl_tinker.engine import nodes, probe
from verl_tinker.engine.cluster import Cluster
from verl_tinker.engine.cpu.environment import rollout_environment, worker_environment
from verl_tinker.engine.sampler import AskOne, Sampler
from verl_tinker.engine.settings import EngineSettings
from verl_tinker.engine.teachers import Teachers
from verl_tinker.engine.threads import Threads
from verl_tinker.engine.trainer import Trainer
from verl_tinker.engine.turns import Side, SideBySide, Turns


class VerlEngine:
    """Implements `verl_tinker.engine.base.Engine`."""

    def __init__(self, settings: EngineSettings):
        self.settings = settings
        self.cluster = Cluster(settings.ray_address, settings.work_folder, settings.logical_gpus)
        self.threads = Threads()
        self.trainer: Trainer | None = None
        self.sampler: Sampler | None = None
        self.teachers = Teachers(settings)
        self.turns: SideBySide | Turns = SideBySide()
        self.runs: dict[str, ModelSpec] = {}
        self._trainer_ping: asyncio.Task | None = None
        # What the trainer says of the probe's tokens with the base weights: float32[P - 1].
        self._base_logprobs = np.empty(0, np.float32)
        self.comparison = probe.Comparison(exact=settings.rollout_args.get("dtype") == "float32")

    def base_models(self) -> list[BaseModelInfo]:
        return [*self.settings.models, *(info for teacher in self.settings.teachers for info in teacher.models)]

    async def start(self, report: Callable[[str], None]) -> None:
        s = self.settings
        report("starting Ray")
        self.threads.renew()
        await self.threads.run(self.cluster.start)
        if s.device == "cuda" or s.ray_address:
            await nodes.wait_for(s, s.start_timeout_s if s.ray_address else 0, report)
        if s.ray_address:
            await self.threads.run(nodes.check_packages)
        report("starting the trainer" + (" and the sampler" if s.has_rollout else ""))
        on_cpu = s.device == "cpu"
        self.trainer = Trainer(s, self.threads, worker_environment(s.threads, self.cluster.rendezvous_file()) if on_cpu else {})
        if s.has_rollout:
            environment = rollout_environment(s.threads, s.kv_cache_gb, str(s.work_folder)) if on_cpu else {}
            self.sampler = Sampler(s, environment, s.mode != "full", self._verify)
        await self._start_workers()
        report("comparing trainer and sampler")
        async with self.turns.turn("training"):
            self._base_logprobs = await self.trainer.logprobs(None, self._probe_tokens())
        if self.sampler is not None:
            async with self.turns.turn("sampling"):
                await self.sampler.verify_base()
        if s.teachers:
            report("starting the teachers")
            await self.teachers.start()

    async def _start_workers(self) -> None:
        if self.sampler is None:
            await self.trainer.start()
        elif self.settings.replica == "in_process":
            if self.settings.ray_address:
                # Samplers that came first might leave no node with room for all of the trainer.
                await self.trainer.start()
                await self.sampler.start()
            else:
                await asyncio.gather(self.trainer.start(), self.sampler.start())
        else:
            # vLLM measures the memory that the trainer leaves, and takes its place on the trainer's GPUs.
            await self.trainer.start()
            await self.sampler.start(self.trainer.group)
        if self.settings.takes_turns:
            self.turns = Turns(self._give_memory_to, "sampling")

    async def _give_memory_to(self, side: Side) -> None:
        """The trainer needs no word: verl loads it for each command and offloads it afterwards."""
        await (self.sampler.sleep() if side == "training" else self.sampler.wake_up())

    async def close(self) -> None:
        """Also after a part of it died; `start` may be called again afterwards."""
        if self._trainer_ping is not None:
            self._trainer_ping.cancel()
        if self.sampler is not None:
            await self.sampler.close()
        if self.trainer is not None:
            await self.threads.run(self.trainer.close)
        await self.teachers.close()
        self.sampler = self.trainer = self._trainer_ping = None
        self.runs, self.turns = {}, SideBySide()
        await self.threads.run(self.cluster.stop)

    def worker_logs(self) -> str:
        return self.cluster.logs()

    async def check(self) -> None:
        """Raise when a worker is dead or stuck. A trainer answers between commands only, so its answer may be to an
        earlier call."""
        if self.trainer.stuck:
            raise self.trainer.stuck
        if self._trainer_ping is None:
            self._trainer_ping = asyncio.create_task(self.trainer.call("ping"))
        if self.sampler is not None:
            await self.sampler.check()
        await self.teachers.check()
        if self._trainer_ping.done():
            answered, self._trainer_ping = self._trainer_ping, None
            answered.result()

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
        async with self.turns.turn("training"):
            parameter_bytes = await self.trainer.call("create_run", model_id, spec.lora, s.lora_alpha)
        self.runs[model_id] = spec
        return ModelInfo(spec, notes, parameter_bytes)

    async def drop_model(self, model_id: str) -> None:
        if self.runs.pop(model_id, None) is not None:
            # Needs no turn: it only lets go.
            await self.trainer.call("drop_run", model_id)

    async def forward_backward(
        self, model_id: str, data: list[Datum], loss_fn: str, config: dict[str, float], backward: bool
    ) -> ForwardBackwardResult:
        async with self.turns.turn("training"):
            return await self.trainer.forward_backward(model_id, data, loss_fn, config, backward)

    async def optim_step(self, model_id: str, adam: AdamParams) -> dict[str, float]:
        async with self.turns.turn("training"):
            return await self.trainer.call("step_run", model_id, adam)

    async def save_state(self, model_id: str, folder: Path) -> None:
        async with self.turns.turn("training"):
            await self.trainer.call("save_weights", model_id, str(folder), self.runs[model_id].base_model)
            await self.trainer.call("save_optimizer", model_id, str(folder))

    async def load_state(self, model_id: str, folder: Path, optimizer: bool) -> None:
        async with self.turns.turn("training"):
            await self.trainer.call("load_run", model_id, str(folder), optimizer)

    async def park(self, model_id: str, folder: Path) -> None:
        async with self.turns.turn("training"):
            await self.trainer.call("park_run", model_id, str(folder), self.runs[model_id].base_model)
            await self.trainer.call("drop_run", model_id)
        del self.runs[model_id]

    async def unpark(self, model_id: str, spec: ModelSpec, folder: Path) -> None:
        async with self.turns.turn("training"):
            await self.trainer.call("create_run", model_id, spec.lora, self.settings.lora_alpha)
            try:
                await self.trainer.call("load_run", model_id, str(folder), True)
            except BaseException:
                await self.trainer.call("drop_run", model_id)
                raise
        self.runs[model_id] = spec

    async def export_weights(self, model_id: str, folder: Path) -> None:
        async with self.turns.turn("training"):
            await self.trainer.call("save_weights", model_id, str(folder), self.runs[model_id].base_model)

    async def export_sampler(self, model_id: str, folder: Path) -> None:
        tokens = self._probe_tokens()
        async with self.turns.turn("training"):
            await self.trainer.call("save_weights", model_id, str(folder), self.runs[model_id].base_model)
            logprobs = await self.trainer.logprobs(model_id, tokens)
        if not np.isfinite(logprobs).all():
            # Such weights must not reach the sampler: its key-value cache would carry the NaN into other requests.
            raise UserError("the run's weights give log-probabilities that are not finite, so there is nothing to sample "
                            "from; load an earlier checkpoint and lower adam_params.learning_rate")
        probe.write(folder, model_id, tokens, logprobs)

    async def load_version(self, version: int, base_model: str, folder: Path) -> None:
        if self.sampler is None:
            raise UserError("this preset has no sampler; start the server with configs/quick_start/actor_rollout.yaml")
        self._info(base_model)
        if probe.read(folder) is None:
            raise EngineError(f"{folder.name} has no {probe.FILE}; export it from a training run")
        async with self.turns.turn("sampling"):
            await self.sampler.load_version(version, str(folder), _adapter_rank(folder))

    async def retire_version(self, version: int) -> None:
        async with self.turns.turn("sampling"):
            await self.sampler.unload_version(version)

    async def sample(
        self, base_model: str, version: int, request: SampleRequest, seen: Callable[[Drawn], None] | None = None
    ) -> SampleResult:
        if self.teachers.knows(base_model):
            return await self.teachers.generate(base_model, request, seen)
        if self.sampler is None:
            raise UserError("this preset has no sampler; start the server with configs/quick_start/actor_rollout.yaml")
        async with self.turns.turn("sampling"):
            return await self.sampler.generate(request, version, seen)

    def _probe_tokens(self) -> np.ndarray:
        return probe.probe_tokens(min(m.vocab_size for m in self.settings.models))

    async def _verify(self, version: int, folder: str | None, ask: AskOne) -> None:
        """Compare one replica of the sampler with what the trainer said of the same weights."""
        run_id, trainer = ("", self._base_logprobs) if folder is None else probe.read(Path(folder))
        request = SampleRequest(self._probe_tokens(), 1, SamplingParams(max_tokens=1), prompt_logprobs=True)
        result = await ask(request, version)
        self.comparison.check(version, run_id, trainer, result.prompt_logprobs[1:])


def _adapter_rank(folder: Path) -> int:
    file = folder / "adapter_config.json"
    return int(json.loads(file.read_text())["r"]) if file.exists() else 0
