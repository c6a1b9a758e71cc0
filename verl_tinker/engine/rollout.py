"""Makes verl's rollout replicas: which class, and what vLLM is told.

Owns vLLM's arguments for the trained model and for teachers. Does not start replicas or choose among them.
"""

from __future__ import annotations

from typing import Any

from omegaconf import OmegaConf
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry

from verl_tinker.core.types import MAX_TOPK
from verl_tinker.engine import sampler_server
from verl_tinker.engine.settings import EngineSettings, TeacherSettings

# Both spellings: vLLM matches its own fused layers and the adapter files name the parts.
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj", "down_proj", "lm_head"]
# What vLLM's engine would take 8, 16, ... for: its kernels know these ranks.
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


def in_process_args(model_folder: Any, max_context: int, rollout_args: dict[str, Any], version_args: dict[str, Any]) -> dict[str, Any]:
    """All that vLLM is told in process; the stock replica makes most of it from verl's rollout section."""
    return {
        "model": str(model_folder),
        "tokenizer": str(model_folder),
        "max_model_len": max_context,
        "disable_log_stats": True,
        # Samples of one prompt share its whole blocks. vLLM's 128 tokens without a GPU leave much of a prompt to be
        # computed for each, and all of a short one; 32 is the least that its kernels are fast with.
        "block_size": 32,
        **rollout_args,
        **version_args,
    }


def version_args(settings: EngineSettings, with_lora: bool) -> dict[str, Any]:
    """What versions and their checks need of vLLM, beyond verl's rollout section."""
    args = frozen_args(MAX_TOPK)
    if with_lora:
        args |= {
            "enable_lora": True,
            "max_lora_rank": next(r for r in _LORA_RANKS if r >= settings.max_lora_rank),
            "max_loras": min(4, settings.keep_versions),
            "max_cpu_loras": 2 * settings.keep_versions,
            "lora_target_modules": LORA_TARGETS,
        }
    return args


def frozen_args(max_logprobs: int) -> dict[str, Any]:
    """What a model without versions needs: log-probabilities of the distribution that is sampled from."""
    return {"logprobs_mode": "processed_logprobs", "max_logprobs": max_logprobs}


def actor_replica(settings: EngineSettings, rank: int, environment: dict[str, str], with_lora: bool, nth: int) -> RolloutReplica:
    """The trained model's replica `rank`; `nth` counts the replicas that this place has had."""
    versions, context = version_args(settings, with_lora), settings.max_context
    verl = settings.verl_config
    if settings.replica == "in_process":
        args = in_process_args(settings.model_folder, context, settings.rollout_args, versions)
        return _in_process(rank, verl.rollout, verl.model, args, environment)
    per_node = verl.rollout.n_gpus_per_node if settings.rollout_replicas else settings.n_workers_per_node
    return _stock(rank, _told(verl.rollout, versions, context), verl.model, per_node, environment, f"{nth}")


def teacher_replica(settings: EngineSettings, teacher: TeacherSettings, rank: int, environment: dict[str, str],
                    nth: int) -> RolloutReplica:
    """A replica of a frozen model on GPUs of its own."""
    frozen = frozen_args(teacher.max_logprobs)
    model = OmegaConf.create({"_target_": "verl.workers.config.HFModelConfig", "path": str(teacher.model_folder)})
    if settings.replica == "in_process":
        args = in_process_args(teacher.model_folder, teacher.max_context, teacher.rollout_args, frozen)
        return _in_process(rank, teacher.rollout, model, args, environment)
    # Its weights never come from a trainer.
    rollout = OmegaConf.merge(_told(teacher.rollout, frozen, teacher.max_context), {"load_format": "auto"})
    return _stock(rank, rollout, model, rollout.n_gpus_per_node, environment, f"{teacher.key}_{nth}", is_teacher_model=True)


def _in_process(rank: int, rollout: Any, model: Any, args: dict[str, Any], environment: dict[str, str]) -> RolloutReplica:
    replica = RolloutReplicaRegistry.get("vllm_in_process")(replica_rank=rank, config=rollout, model_config=model)
    replica.settings = sampler_server.SamplerSettings(
        model_folder=args["model"], engine_args=args, environment=environment, cpus=1)
    return replica


def _told(rollout: Any, args: dict[str, Any], max_context: int) -> Any:
    # The preset's own arguments for vLLM win.
    return OmegaConf.merge({"engine_kwargs": {"vllm": args}}, rollout, {"max_model_len": max_context})


def _stock(rank: int, rollout: Any, model: Any, gpus_per_node: int, environment: dict[str, str], suffix: str,
           **kind: bool) -> RolloutReplica:
    return RolloutReplicaRegistry.get("vllm_versions")(
        replica_rank=rank, config=rollout, model_config=model, gpus_per_node=gpus_per_node,
        # Ray gives a dead server's name back late, so none is used twice.
        name_suffix=suffix,
        # `prompt_logprobs` corrects the first version of vLLM's model runner.
        environment={**environment, "VLLM_USE_V2_MODEL_RUNNER": "0"}, **kind)


def _load_version_replica() -> type[RolloutReplica]:
    # The module imports all of vLLM, which the in-process replica keeps out of the server's process.
    from verl_tinker.engine.vllm_server import VersionReplica

    return VersionReplica


RolloutReplicaRegistry.register("vllm_versions", _load_version_replica)
