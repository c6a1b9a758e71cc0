"""verl's keys that this server does not honour: those that it refuses, and those that it says have no effect.

Owns both lists, with the reason for each. All other keys reach verl's workers or vLLM as they stand.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

_REQUESTS = "each request of a client brings its own"
_PROGRAM = "the client's program makes batches, rewards and loss"
_OWN_FILES = "this server writes and reads checkpoints of its own"
_NO_LOOP = "verl's agent loop does not run here"
_NO_REFERENCE = "no reference worker is started; the sampler's base model answers"

# Below actor_rollout_ref. The first that fits counts; * stands for any text.
UNUSED = {
    "actor.optim.*": "each optimizer step of a client brings its own values for AdamW",
    "actor.grad_clip": "each optimizer step of a client brings its own",
    "actor.ppo_mini_batch_size": _PROGRAM,
    "actor.ppo_epochs": _PROGRAM,
    "actor.shuffle": _PROGRAM,
    "actor.data_loader_seed": _PROGRAM,
    "actor.rollout_n": _PROGRAM,
    "actor.kl_loss_*": _PROGRAM,
    "actor.calculate_*": _PROGRAM,
    "actor.use_rollout_log_probs": _PROGRAM,
    "actor.checkpoint.*": _OWN_FILES,
    "model.lora_alpha": "actor.lora_alpha is this server's key",
    "model.target_modules": "clients choose by train_attn, train_mlp and train_unembed",
    "model.exclude_modules": "clients choose by train_attn, train_mlp and train_unembed",
    "rollout.temperature": _REQUESTS,
    "rollout.top_k": _REQUESTS,
    "rollout.top_p": _REQUESTS,
    "rollout.do_sample": _REQUESTS,
    "rollout.n": _REQUESTS,
    "rollout.repetition_penalty": _REQUESTS,
    "rollout.ignore_eos": _REQUESTS,
    "rollout.prompt_length": "rollout.max_model_len bounds prompt and answer together",
    "rollout.response_length": "rollout.max_model_len bounds prompt and answer together",
    "rollout.val_kwargs.*": _PROGRAM,
    "rollout.multi_turn.*": _NO_LOOP,
    "rollout.agent.*": _NO_LOOP,
    "rollout.trace.*": _NO_LOOP,
    "rollout.over_sample_rate": _NO_LOOP,
    "rollout.calculate_log_probs": "sampled tokens always come with their log-probabilities",
    "rollout.log_prob_*": "the trainer's own limits count: actor.ppo_max_token_len_per_gpu",
    "rollout.checkpoint_engine.*": "weights go to the sampler as files, so that many versions stay sampleable",
    "rollout.checkpoint_manager_class": "weights go to the sampler as files",
    "rollout.layered_summon": "weights go to the sampler as files",
    "rollout.router_config_path": "this server chooses the replica itself",
    "ref.*": _NO_REFERENCE,
}
# Without a GPU vLLM runs in one process, which takes a few of rollout's own keys (verl_tinker/wiring.py).
UNUSED_ON_CPU = {
    "rollout.gpu_memory_utilization": "without a GPU cpu.kv_cache_gb and cpu.teacher_kv_cache_gb count",
    "rollout.engine_kwargs.*": "without a GPU only rollout's own keys reach vLLM, and of a teacher's max_logprobs",
    "rollout.scheduling_policy": "without a GPU only rollout's other keys reach vLLM",
}
UNUSED_OF_TEACHERS = {
    "rollout.load_format": "a teacher's weights always come from its folder",
    "rollout.nnodes": "num_replicas says how many there are",
}
_MAX_LOGPROBS = "rollout.engine_kwargs.vllm.max_logprobs"
# What the engine cannot work with: key -> (values that it can, why and what to do).
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "model.lora_rank": ((0, None), "clients choose the rank; bound it with actor.max_lora_rank"),
    "model.lora.rank": ((0, None), "clients choose the rank; bound it with actor.max_lora_rank"),
    "model.lora_adapter_path": ((None,), "import it: python -m verl_tinker.import_adapter"),
    "model.use_fused_kernels": ((False, None), "losses here need the logits, which fused kernels do not give"),
    "model.mtp.enable": ((False, None), "its extra layers are not trained here"),
    "actor.use_prefix_grouper": ((False, None), "losses here need one row of log-probabilities for each datum"),
    "actor.qat.enable": ((False, None), "trained and served weights are compared, and would differ"),
    "actor.fsdp_config.qat.enable": ((False, None), "trained and served weights are compared, and would differ"),
    "actor.fsdp_config.forward_only": ((False, None), "it is to be trained"),
    "rollout.data_parallel_size": ((1, None), "every tensor_model_parallel_size GPUs are a replica of their own"),
    "rollout.disaggregation.enabled": ((False, None), "a replica computes prompts and answers alike"),
    "rollout.enable_rollout_routing_replay": ((False, None), "clients have no way to hand on which experts were chosen"),
    "rollout.quantization": ((None,), "trained and served weights are compared, and would differ"),
}


def refusals(verl: Any) -> Iterator[str]:
    """Keys of the merged section that the engine cannot work with, as messages."""
    for key, (good, reason) in REFUSED.items():
        value = _at(verl, key)
        if value not in good:
            yield f"actor_rollout_ref.{key} is {value}; this server cannot use it: {reason}"


def _at(tree: Any, dotted: str) -> Any:
    for part in dotted.split("."):
        tree = tree.get(part) if hasattr(tree, "get") else None
    return tree


def without_effect(layer: Mapping[str, Any], defaults: Mapping[str, Any], on_cpu: bool) -> Iterator[tuple[str, str]]:
    """What a layer of a preset sets to another value than verl's, in vain: key and reason."""
    known = UNUSED | (UNUSED_ON_CPU if on_cpu else {})
    verl = defaults["actor_rollout_ref"]
    for key, reason in _in_vain(layer.get("actor_rollout_ref") or {}, verl, known):
        if key != "ref.enable":  # Honoured without a worker: reference log-probabilities are there either way.
            yield f"actor_rollout_ref.{key}", reason
    for entry, teacher in ((layer.get("distillation") or {}).get("teacher_models") or {}).items():
        for key, reason in _in_vain({"rollout": teacher.get("inference") or {}}, verl, known | UNUSED_OF_TEACHERS):
            if key != _MAX_LOGPROBS:
                yield f"distillation.teacher_models.{entry}.inference.{key.partition('.')[2]}", reason


def _in_vain(layer: Mapping[str, Any], defaults: Mapping[str, Any], known: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in _leaves(layer):
        default = _at(defaults, key)
        if value == default or (isinstance(default, str) and "${" in default):
            continue
        for pattern, reason in known.items():
            if fnmatchcase(key, pattern):
                yield key, reason
                break


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        here = f"{path}.{key}" if path else str(key)
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, here)
        elif key != "_target_":
            yield here, value
