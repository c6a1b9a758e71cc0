"""A real engine on the tiny model, for tests that need no HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

# verl's own replica without a GPU; with `replica="stock"` in the settings.
_EXTENSION = "engine_kwargs.vllm.worker_extension_cls=verl_tinker.engine.cpu.vllm_worker.CpuWorkerExtension"
STOCK = [f"actor_rollout_ref.rollout.{_EXTENSION}", "actor_rollout_ref.rollout.free_cache_engine=true", "server.enable_offload=true"]
# The same with (logical) GPUs for the sampler alone, and two packed replicas of a teacher on further ones.
_TEACHER = "distillation.teacher_models.t"
STOCK_APART = [
    f"actor_rollout_ref.rollout.{_EXTENSION}", "actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "cpu.threads=1", "distillation.enabled=true", "distillation.n_gpus_per_node=1", "distillation.strict_pack=true", f"{_TEACHER}.model_name=teachers/t",
    f"{_TEACHER}.model_path=bundled:tiny-tied", f"{_TEACHER}.num_replicas=2", f"{_TEACHER}.inference.{_EXTENSION}",
    *(f"{_TEACHER}.inference.{setting}" for setting in (
        "name=vllm", "dtype=float32", "tensor_model_parallel_size=1", "max_model_len=2048", "max_num_batched_tokens=2048",
        "max_num_seqs=16", "enforce_eager=true", "free_cache_engine=false", "enable_sleep_mode=false"))]
# Two samplers in processes of their own.
TWO_SAMPLERS = ["actor_rollout_ref.rollout.nnodes=1", "actor_rollout_ref.rollout.n_gpus_per_node=2", "cpu.threads=1"]


class Live:
    """An engine and the event loop that it lives on. `changes` are laid over the settings that the preset gives."""

    def __init__(self, overrides: list[str], scratch: Path, rollout: bool = True, preset: str = "configs/quick_start/cpu.yaml",
                 **changes):
        from verl_tinker.config import load_config
        from verl_tinker.start import _prepare_environment
        from verl_tinker.wiring import engine_settings

        config = load_config(preset, ["server.model_path=bundled:tiny", *overrides])
        _prepare_environment(config)
        from verl_tinker.engine.verl_engine import VerlEngine

        self.settings = replace(engine_settings(config, scratch), has_rollout=rollout, **changes)
        self.engine = VerlEngine(self.settings)
        self.runner = asyncio.Runner()
        self.name = config.server.model_name

    def do(self, coroutine):
        return self.runner.run(coroutine)

    def start(self) -> Live:
        self.do(self.engine.start(lambda phase: None))
        return self

    def close(self) -> None:
        self.do(self.engine.close())
        self.runner.close()
