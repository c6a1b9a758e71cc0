"""Who of a preset needs GPUs, how many, and how each role trains or serves.

Owns what a preset's keys mean for the planner and for the estimates. Holds no formula: `memory` does.
"""

from __future__ import annotations

from typing import Any

from verl_tinker.config import ENGINES, Config
from verl_tinker.core.placement import Role
from verl_tinker.plan.memory import BYTES, Serving, Training
from verl_tinker.plan.size import ModelSize
from verl_tinker.teachers import TeacherConfig

ROLLOUT = "actor_rollout_ref.rollout"
TENSOR_PARALLEL = "tensor_model_parallel_size"
# Adapters that vLLM has room for at once (verl_tinker/engine/rollout.py).
_ADAPTER_SLOTS = 4


def roles(config: Config) -> list[Role]:
    """In the order in which they are placed; without a GPU each counts processes. Trainer and sampler are one where they
    share GPUs."""
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    groups = [(_megatron_tensor_parallel(config), f"actor_rollout_ref.actor.megatron.{TENSOR_PARALLEL}")]
    together = config.device == "cuda" and config.has_rollout and not config.rollout_is_apart
    if together:
        groups.append((_of(rollout, TENSOR_PARALLEL), f"{ROLLOUT}.{TENSOR_PARALLEL}"))
    found = [Role("trainer and sampler" if together else "trainer", 1, trainer.nnodes * trainer.n_gpus_per_node,
                  trainer.n_gpus_per_node, "trainer.n_gpus_per_node", tuple(groups))]
    if config.has_rollout and not together:
        share = _of(rollout, TENSOR_PARALLEL)
        found.append(Role("sampler", max(1, config.rollout_replicas), share, min(share, int(rollout.n_gpus_per_node)),
                          f"{ROLLOUT}.nnodes", ((share, f"{ROLLOUT}.{TENSOR_PARALLEL}"),)))
    return found + [_teacher(config, teacher) for teacher in config.teachers]


def _teacher(config: Config, teacher: TeacherConfig) -> Role:
    parallel = teacher.preset_key(TENSOR_PARALLEL)
    key = parallel if teacher.num_replicas == 1 else f"distillation.teacher_models.{teacher.entry}.num_replicas"
    return Role(f"teacher {teacher.key}", teacher.num_replicas, teacher.replica_size,
                min(teacher.replica_size, config.distillation.n_gpus_per_node), key,
                ((_of(teacher.rollout, TENSOR_PARALLEL), parallel),), config.distillation.strict_pack)


def _megatron_tensor_parallel(config: Config) -> int:
    actor = config.actor_rollout_ref.actor
    return _of(actor.megatron, TENSOR_PARALLEL) if actor.strategy == "megatron" else 1


def _of(section: Any, key: str) -> int:
    return int(section.get(key) or 1)


def takes_turns(config: Config) -> bool:
    """Whether trainer and sampler have the same GPUs, one after the other."""
    actor = config.actor_rollout_ref.actor
    together = config.device == "cuda" and config.has_rollout and not config.rollout_is_apart
    return together and bool(actor[ENGINES[actor.strategy][1]].get("param_offload"))


def how_it_trains(config: Config) -> Training:
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    engine = actor[ENGINES[actor.strategy][1]]
    world = config.trainer.nnodes * config.trainer.n_gpus_per_node
    tokens, checkpointing = int(actor.ppo_max_token_len_per_gpu), bool(model.get("enable_gradient_checkpointing"))
    if actor.strategy == "megatron":
        tensor, pipeline = _of(engine, TENSOR_PARALLEL), _of(engine, "pipeline_model_parallel_size")
        expert = _of(engine, "expert_model_parallel_size") * int(engine.get("expert_tensor_parallel_size") or tensor)
        return Training(world, tokens, master=2, compute=2, checkpointing=checkpointing, megatron=True,
                        model_shards=tensor * pipeline, expert_shards=expert * pipeline, tensor_parallel=tensor)
    shards = int(engine.get("fsdp_size") or -1)
    mixed = engine.get("mixed_precision")
    # VeOmni says it with one word, FSDP names each type.
    compute = BYTES.get(str(mixed.get("param_dtype", "bf16")), 2) if hasattr(mixed, "get") else 2
    master = BYTES.get(str(engine.get("model_dtype")), 4 if mixed else 2)
    return Training(shards if 0 < shards < world else world, tokens, master, compute, checkpointing,
                    gathered_whole=engine.get("reshard_after_forward") is False)


def how_it_samples(config: Config, size: ModelSize) -> Serving:
    slots = 0 if config.actor.mode == "full" else min(_ADAPTER_SLOTS, config.server.keep_versions)
    return _serving(config.actor_rollout_ref.rollout, size, slots, config.actor.max_lora_rank)


def how_it_teaches(teacher: TeacherConfig, size: ModelSize) -> Serving:
    return _serving(teacher.rollout, size, 0, 0)


def _serving(rollout: Any, size: ModelSize, slots: int, lora_rank: int) -> Serving:
    context = min(int(rollout.get("max_model_len") or size.max_context), size.max_context)
    return Serving(_of(rollout, TENSOR_PARALLEL), _of(rollout, "expert_parallel_size"), BYTES.get(str(rollout.dtype), 2),
                   float(rollout.gpu_memory_utilization), int(rollout.max_num_batched_tokens), context, slots, lora_rank)
