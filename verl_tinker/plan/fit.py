"""Does each role fit into its GPUs' memory, and which key of the preset changes it?

Owns what is held against what. Holds no formula: `memory` does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from verl_tinker.config import Config
from verl_tinker.plan import memory
from verl_tinker.plan.memory import GIB, Serving
from verl_tinker.plan.roles import (
    ROLLOUT,
    TENSOR_PARALLEL,
    how_it_samples,
    how_it_teaches,
    how_it_trains,
    takes_turns,
)
from verl_tinker.plan.size import ModelSize
from verl_tinker.teachers import TeacherConfig

_TOKENS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
_RUNS = "server.max_training_runs"


@dataclass
class Part:
    """What one role takes of each of its GPUs, in bytes by purpose. `problems` name the keys to change."""

    role: str
    what: str
    bytes: dict[str, float]
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def total(self) -> float:
        return sum(self.bytes.values())

    def check(self, needed: float, there: float, *keys: str) -> None:
        if needed > there:
            self.problems.append(f"{gib(needed)} GiB of each GPU are needed and {gib(there)} are there; {' or '.join(keys)}")


def gib(size: float) -> str:
    return f"{size / GIB:.1f}"


def parts(config: Config, sizes: Callable[[str], ModelSize], gpu: float, lora_rank: int) -> list[Part]:
    """Every role of the preset on GPUs of `gpu` bytes, or as processes without a GPU. `sizes` knows a model by its path."""
    trained = sizes(config.models[config.server.model_name])
    sampler = _sampler(config, trained, gpu) if config.has_rollout else None
    found = _trainers(config, trained, lora_rank)
    if config.device == "cuda":
        for part in found:
            _check_trainer(config, part, sampler, gpu)
    found += [sampler] if sampler is not None else []
    return found + [_teacher(config, teacher, sizes(teacher.path), gpu) for teacher in config.teachers]


def _trainers(config: Config, size: ModelSize, lora_rank: int) -> list[Part]:
    """The ways of training that the preset allows."""
    how, found = how_it_trains(config), []
    reserve = float(memory.RESERVE if config.device == "cuda" else memory.CPU_RESERVE)
    if config.actor.mode != "full":
        runs, rank = config.server.max_training_runs, min(lora_rank, config.actor.max_lora_rank)
        found.append(Part("trainer", f"{runs} adapter runs, rank {rank}",
                          memory.training(size, how, rank, runs) | {"reserve": reserve}))
        one = gib(memory.run_bytes(size, how, rank))
        found[-1].notes.append(f"an adapter run of rank {rank} takes {one} GiB while it is in memory ({_RUNS} is {runs})")
    if config.actor.mode != "lora":
        found.append(Part("trainer", "full fine-tuning", memory.training(size, how, None, 1) | {"reserve": reserve}))
    return found


def _check_trainer(config: Config, part: Part, sampler: Part | None, gpu: float) -> None:
    together = sampler is not None and not config.rollout_is_apart
    if not together:
        part.check(part.total, gpu, *_remedies(part))
    elif takes_turns(config):
        part.check(part.total, gpu, *_remedies(part))
        # Runs that are not selected stay on the GPU while the sampler has its turn.
        part.check(_of_the_sampler(config, sampler, gpu) + part.bytes.get("adapters", 0), gpu,
                   f"lower {_RUNS}", f"lower {ROLLOUT}.max_num_batched_tokens", f"lower {ROLLOUT}.gpu_memory_utilization")
    else:
        part.check(part.total + _of_the_sampler(config, sampler, gpu), gpu, *_remedies(part),
                   f"lower {ROLLOUT}.gpu_memory_utilization", "set server.enable_offload=true")


def _of_the_sampler(config: Config, sampler: Part, gpu: float) -> float:
    return float(config.actor_rollout_ref.rollout.gpu_memory_utilization) * gpu + sampler.bytes["scores"]


def _remedies(part: Part) -> list[str]:
    """The key for the largest share that a key of its own lowers, and always more GPUs."""
    positions, adapters = part.bytes["activations"] + part.bytes["logits"], part.bytes.get("adapters", 0.0)
    key = f"lower {_RUNS}" if adapters > positions else f"lower {_TOKENS}"
    return [key, "raise trainer.n_gpus_per_node", "raise trainer.nnodes"]


def _sampler(config: Config, size: ModelSize, gpu: float) -> Part:
    how = how_it_samples(config, size)
    what = f"a replica on {how.tensor_parallel} GPU{'s' * (how.tensor_parallel > 1)}"
    if config.device == "cpu":
        return Part("sampler", "a process", memory.serving_on_cpu(size, how, config.cpu.kv_cache_gb * GIB))
    part = Part("sampler", what, memory.serving(size, how, gpu))
    _check_cache(part, how, size, lambda key: f"{ROLLOUT}.{key}")
    if config.rollout_is_apart:
        part.check(_of_the_sampler(config, part, gpu), gpu,
                   f"lower {ROLLOUT}.max_num_batched_tokens", f"lower {ROLLOUT}.gpu_memory_utilization")
    return part


def _teacher(config: Config, teacher: TeacherConfig, size: ModelSize, gpu: float) -> Part:
    how, role = how_it_teaches(teacher, size), f"teacher {teacher.key}"
    if config.device == "cpu":
        return Part(role, "a process", memory.serving_on_cpu(size, how, config.cpu.teacher_kv_cache_gb * GIB))
    part = Part(role, f"a replica on {teacher.replica_size} GPU{'s' * (teacher.replica_size > 1)}",
                memory.serving(size, how, gpu))
    _check_cache(part, how, size, teacher.preset_key)
    part.check(how.share * gpu + part.bytes["scores"], gpu, f"lower {teacher.preset_key('max_num_batched_tokens')}",
               f"lower {teacher.preset_key('gpu_memory_utilization')}")
    return part


def _check_cache(part: Part, how: Serving, size: ModelSize, key: Callable[[str], str]) -> None:
    token = memory.cache_bytes_per_token(size, how)
    tokens = int(part.bytes["cache"] // token)
    more = f"raise {key(TENSOR_PARALLEL)} or raise {key('gpu_memory_utilization')}"
    if tokens < 0:
        taken = gib(part.total - part.bytes["cache"] - part.bytes["scores"])
        part.problems.append(f"weights, adapters and reserve take {taken} GiB, more than the {how.share:.0%} of each GPU "
                             f"that the engine may have; {more}")
        part.bytes["cache"] = 0.0
    elif tokens < how.context:
        part.problems.append(f"the key-value cache has room for {tokens:,} tokens, less than one sequence of "
                             f"{how.context:,}; lower {key('max_model_len')} or {more}")
    else:
        whole = tokens / how.context
        part.notes.append(f"the key-value cache holds {tokens:,} tokens, {whole:.1f} sequences of {how.context:,}")


def host_bytes(config: Config, size: ModelSize) -> float:
    """Host memory of one node while trainer and sampler take turns: what each leaves there, and unnamed snapshots."""
    if not takes_turns(config):
        return 0.0
    how = how_it_trains(config)
    away = memory.offloaded(size, how, None if config.actor.mode != "lora" else 1)
    asleep = memory.serving_weights(size, how_it_samples(config, size))
    return config.trainer.n_gpus_per_node * (away + asleep) + config.server.snapshot_memory_gb * GIB
