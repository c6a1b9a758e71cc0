"""A checked preset in the words of the engine: folders, limits, and vLLM's arguments.

Owns what becomes of each key that the engine reads. Does not start anything; models are fetched or converted here.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from verl_tinker.config import Config
from verl_tinker.core.types import MAX_TOPK, BaseModelInfo
from verl_tinker.engine.settings import EngineSettings, TeacherSettings
from verl_tinker.models import ModelError, resolve_model
from verl_tinker.plan.roles import roles, takes_turns
from verl_tinker.schema import ConfigError


def engine_settings(config: Config, work_folder: Path) -> EngineSettings:
    """What the engine needs of a preset. Downloads or converts models that are not there yet."""
    from omegaconf import OmegaConf

    folder = resolve_model(config.models[config.server.model_name], config.cache_dir)
    for name, place in config.server.model_aliases.items():
        if resolve_model(place, config.cache_dir) != folder:
            raise ConfigError(f"server.model_aliases.{name}: {place} is another model than server.model_path; one server trains "
                              "one base model, and a frozen one is a teacher (distillation.teacher_models)")
    verl = OmegaConf.merge(config.actor_rollout_ref, {"model": {"path": str(folder)}})
    on_cpu = config.device == "cpu"
    return EngineSettings(
        device=config.device,
        verl_config=verl,
        models=_infos(config.models, folder, config.context_length, trainable=True, sampleable=config.has_rollout),
        model_folder=folder,
        work_folder=work_folder,
        n_workers_per_node=config.trainer.n_gpus_per_node,
        nnodes=config.trainer.nnodes,
        sequence_parallel=_shared_by(config, folder),
        mode=config.actor.mode,
        lora_alpha=config.actor.lora_alpha,
        max_lora_rank=config.actor.max_lora_rank,
        keep_versions=config.server.keep_versions,
        has_rollout=config.has_rollout,
        rollout_args=_rollout_args(verl.rollout, "actor_rollout_ref.rollout") if config.has_rollout else {},
        replica="in_process" if on_cpu else "stock",
        rollout_replicas=config.rollout_replicas,
        takes_turns=takes_turns(config),
        teachers=tuple(_teacher(config, teacher) for teacher in config.teachers),
        roles=tuple(roles(config)),
        profiled_requests=tuple(config.global_profiler.get("steps") or ()),
        threads=config.cpu.threads,
        kv_cache_gb=config.cpu.kv_cache_gb,
        ray_address=config.server.ray_address,
    )


def _shared_by(config: Config, folder: Path) -> int:
    """How many workers share a sequence: each then computes some of the attention heads."""
    ranks, model = config.sequence_parallel_size, _description(folder)
    heads, groups = model.heads, model.key_value_heads
    if heads % ranks or (groups % ranks and ranks % groups):
        raise ConfigError(f"{config.sequence_parallel_key} is {ranks}; the model has {heads} attention heads in {groups} "
                          "key-value groups, and the workers that share a sequence must divide them evenly")
    return ranks


def _infos(names, folder: Path, context: int, **flags) -> list[BaseModelInfo]:
    model = _description(folder)
    return [BaseModelInfo(name, min(context, model.context), model.vocabulary, model.is_tied, **flags) for name in names]


def _teacher(config: Config, teacher) -> TeacherSettings:
    where = f"distillation.teacher_models.{teacher.entry}"
    folder = resolve_model(teacher.path, config.cache_dir)
    most = int((teacher.rollout.engine_kwargs.get("vllm") or {}).get("max_logprobs") or MAX_TOPK)
    context = int(teacher.rollout.max_model_len or _description(folder).context)
    return TeacherSettings(
        key=teacher.key,
        models=_infos(teacher.names, folder, context, trainable=False, sampleable=True, max_topk=most,
                      max_topk_key=f"{where}.inference.engine_kwargs.vllm.max_logprobs"),
        model_folder=folder,
        rollout=teacher.rollout,
        replicas=teacher.num_replicas,
        packed=config.distillation.strict_pack,
        max_logprobs=most,
        rollout_args=_rollout_args(teacher.rollout, f"{where}.inference"),
        kv_cache_gb=config.cpu.teacher_kv_cache_gb,
    )


class _Description(NamedTuple):
    """`context` is a model's longest sequence in tokens; `is_tied` whether input and output share an embedding."""

    context: int
    vocabulary: int
    is_tied: bool
    heads: int
    key_value_heads: int


def _description(folder: Path) -> _Description:
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(folder)
        heads = model.num_attention_heads
        return _Description(model.max_position_embeddings, model.vocab_size, bool(model.tie_word_embeddings), heads,
                            getattr(model, "num_key_value_heads", None) or heads)
    except Exception as error:  # Each architecture checks its own description, with errors of any type.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"server.model_path: transformers cannot read {folder / 'config.json'} ({reason}); give the folder "
                         "of a causal language model that this version of transformers knows") from error


def _rollout_args(rollout, where: str) -> dict:
    """verl's rollout section in vLLM's words, for vLLM in one process; verl's own replica translates it itself."""
    if rollout.data_parallel_size != 1:
        raise ConfigError(f"{where}.data_parallel_size is {rollout.data_parallel_size}; it must be 1: "
                          "every tensor_model_parallel_size GPUs are a replica of their own")
    return {
        "dtype": rollout.dtype,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "seed": rollout.get("seed", 0) or 0,
    }
