"""What the engine needs to know, already validated: the shape that `verl_tinker.start` makes of a preset.

Owns no defaults of its own where verl has them. Does not read files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_tinker.core.types import BaseModelInfo


@dataclass(frozen=True)
class EngineSettings:
    """`verl_config` is verl's actor_rollout_ref section; `model_folder` holds the base model's weights.

    `mode` auto lets the first run decide between an adapter and full fine-tuning. `replica` is vLLM in one process, or
    verl's own replicas on the trainer's GPUs; with `takes_turns` one side's memory is given to the other. `rollout_args`
    are vLLM's arguments in one process. `timeout_s` bounds each wait for a worker's answer, `start_timeout_s` the
    start of one.
    """

    device: Literal["cpu", "cuda"]
    verl_config: Any
    models: list[BaseModelInfo]
    model_folder: Path
    work_folder: Path
    n_workers_per_node: int = 1
    nnodes: int = 1
    mode: Literal["auto", "lora", "full"] = "auto"
    lora_alpha: float = 32.0
    max_lora_rank: int = 128
    keep_versions: int = 8
    has_rollout: bool = True
    replica: Literal["in_process", "stock"] = "in_process"
    takes_turns: bool = False
    rollout_args: dict[str, Any] = field(default_factory=dict)
    threads: int = 2
    kv_cache_gb: int = 1
    ray_address: str | None = None
    timeout_s: float = 1800.0
    start_timeout_s: float = 600.0
