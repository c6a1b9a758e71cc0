"""A real engine on the tiny model, for tests that need no HTTP."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

# verl's own replica without a GPU; with `replica="stock"` in the settings.
STOCK = [
    "actor_rollout_ref.rollout.engine_kwargs.vllm.worker_extension_cls=verl_tinker.engine.cpu.vllm_worker.CpuWorkerExtension",
    "actor_rollout_ref.rollout.free_cache_engine=true", "server.enable_offload=true"]
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
