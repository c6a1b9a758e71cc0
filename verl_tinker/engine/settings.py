"""What the engine needs to know, already validated: the shape that `verl_tinker.start` makes of a preset.

Owns no defaults of its own where verl has them. Does not read files.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from verl_tinker.core.placement import Role
from verl_tinker.core.types import BaseModelInfo


@dataclass(frozen=True)
class TeacherSettings:
    """A frozen model under one or several public names, on `replicas` of its own.

    `key` is its name in processes and errors, `rollout` verl's rollout section for it. With `packed` its replicas stand
    together on one node, or on whole ones where one is too small.
    """

    key: str
    models: list[BaseModelInfo]
    model_folder: Path
    rollout: Any
    replicas: int = 1
    packed: bool = False
    max_logprobs: int = 128
    rollout_args: dict[str, Any] = field(default_factory=dict)
    kv_cache_gb: int = 1

    @property
    def max_context(self) -> int:
        return min(model.max_context for model in self.models)


@dataclass(frozen=True)
class EngineSettings:
    """`verl_config` is verl's actor_rollout_ref section; `model_folder` holds the base model's weights.

    Each sequence is shared by `sequence_parallel` of the trainer's workers. `mode` auto lets the first run decide between
    an adapter and full fine-tuning. `replica` is vLLM in one process, or verl's own replicas; with `takes_turns` one
    side's memory is given to the other. `rollout_replicas` 0 is as many as fit on the trainer's GPUs, on those; otherwise
    they have GPUs of their own. In one process 0 is one. `rollout_args` are vLLM's arguments in one process. `roles` are
    what a cluster must have room for. `profiled_requests` numbers the training requests that are traced. `timeout_s`
    bounds each wait for a worker's answer, `start_timeout_s` the start of one.
    """

    device: Literal["cpu", "cuda"]
    verl_config: Any
    models: list[BaseModelInfo]
    model_folder: Path
    work_folder: Path
    n_workers_per_node: int = 1
    nnodes: int = 1
    sequence_parallel: int = 1
    mode: Literal["auto", "lora", "full"] = "auto"
    lora_alpha: float = 32.0
    max_lora_rank: int = 128
    keep_versions: int = 8
    has_rollout: bool = True
    replica: Literal["in_process", "stock"] = "in_process"
    rollout_replicas: int = 0
    takes_turns: bool = False
    rollout_args: dict[str, Any] = field(default_factory=dict)
    teachers: tuple[TeacherSettings, ...] = ()
    roles: tuple[Role, ...] = ()
    profiled_requests: tuple[int, ...] = ()
    threads: int = 2
    kv_cache_gb: int = 1
    ray_address: str | None = None
    timeout_s: float = 1800.0
    start_timeout_s: float = 600.0

    @property
    def max_context(self) -> int:
        """Tokens that a sequence of the trained model may have."""
        return min(model.max_context for model in self.models)

    @property
    def gpus_apart(self) -> int:
        """GPUs of samplers and teachers, beside those of the trainer."""
        rollouts = [(self.rollout_replicas, self.verl_config.rollout)] if self.has_rollout else []
        rollouts += [(teacher.replicas, teacher.rollout) for teacher in self.teachers]
        return sum(n * r.tensor_model_parallel_size * r.pipeline_model_parallel_size for n, r in rollouts)

    @property
    def logical_gpus(self) -> int | None:
        """GPUs that Ray is told of where verl's own replicas are placed without any; None leaves the count to Ray."""
        if self.device == "cuda" or self.replica == "in_process":
            return None
        return self.n_workers_per_node * self.nnodes + self.gpus_apart
