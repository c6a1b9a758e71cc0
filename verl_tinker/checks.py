"""What no key of a preset shows by itself: sizes that must fit each other, files and folders that must be there.

Owns those checks. Does not check single keys and their types: `schema` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tinker import honoured
from verl_tinker.core.access import Keys
from verl_tinker.core.errors import UserError
from verl_tinker.schema import ConfigError

if TYPE_CHECKING:
    from verl_tinker.config import Config
    from verl_tinker.teachers import TeacherConfig


# What the engine behind this server is built on. verl knows more, and presets may name it; see check_served.
STRATEGIES = ("fsdp2",)
INFERENCE_ENGINES = ("vllm",)


def check_whole(config: Config) -> None:
    """Raise ConfigError naming the first key that does not fit the others or this machine."""
    verl, trainer = config.actor_rollout_ref, config.trainer
    if config.device == "cpu" and verl.actor.strategy != "fsdp2":
        raise ConfigError(f"actor_rollout_ref.actor.strategy is {verl.actor.strategy}; without a GPU it must be fsdp2")
    _check_sizes(config)
    _check_sequence_parallel(config)
    _check_folders(config)
    _check_names(config)
    for teacher in config.teachers:
        _check_teacher(config, teacher)
    _check_teacher_pool(config)
    _check_profiler(config)
    if config.has_rollout:
        _check_rollout(config)


def _check_rollout(config: Config) -> None:
    trainer, rollout = config.trainer, config.actor_rollout_ref.rollout
    share = rollout.get("tensor_model_parallel_size") or 1
    if config.rollout_is_apart:
        world, whose = rollout.nnodes * rollout.n_gpus_per_node, "GPUs of rollout.nnodes * rollout.n_gpus_per_node"
    else:
        world, whose = trainer.nnodes * trainer.n_gpus_per_node, "workers of trainer.nnodes * trainer.n_gpus_per_node"
    if world % share:
        raise ConfigError("actor_rollout_ref.rollout.tensor_model_parallel_size is "
                          f"{share}, which does not divide the {world} {whose}")


def _check_sizes(config: Config) -> None:
    for key, tokens in (("actor.ppo_max_token_len_per_gpu", config.token_budget),
                        ("rollout.max_model_len", config.context_length)):
        if tokens < 1:
            raise ConfigError(f"actor_rollout_ref.{key} is {tokens}; it must be at least 1")
    if config.context_length > config.token_budget:
        raise ConfigError(
            f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu is {config.token_budget}, less than "
            f"actor_rollout_ref.rollout.max_model_len ({config.context_length}): what was sampled could not be trained on"
        )


def _check_sequence_parallel(config: Config) -> None:
    ranks, workers = config.sequence_parallel_size, config.trainer.nnodes * config.trainer.n_gpus_per_node
    if ranks == 1:
        return
    if workers % ranks:
        raise ConfigError(f"{config.sequence_parallel_key} is {ranks}, which does not divide the {workers} workers of "
                          "trainer.nnodes * trainer.n_gpus_per_node")
    attention = config.actor_rollout_ref.model.override_config.get("attn_implementation") or "flash_attention_2"
    if config.device == "cuda" and config.actor_rollout_ref.actor.strategy == "fsdp2" and not attention.startswith("flash"):
        raise ConfigError(f"actor_rollout_ref.model.override_config.attn_implementation is {attention}; where workers share a "
                          f"sequence ({config.sequence_parallel_key}) it must be flash_attention_2, whose calls verl changes "
                          "for it")


def _check_folders(config: Config) -> None:
    remedy = "give a Hugging Face model folder in server.model_path (or server.model_aliases)"
    places = [(name, path, remedy) for name, path in config.models.items()]
    places += [(t.name, t.path, f"give a Hugging Face model folder in distillation.teacher_models.{t.entry}.model_path")
               for t in config.teachers]
    for name, path, remedy in places:
        if not path.startswith(("/", ".", "~")):
            continue
        file = Path(path).expanduser() / "config.json"
        if not file.is_file():
            raise ConfigError(f"the model {name} is to come from {path}, where no config.json is; {remedy}")
        try:
            is_object = isinstance(json.loads(file.read_text()), dict)
        except (OSError, ValueError):
            is_object = False
        if not is_object:
            raise ConfigError(f"the model {name} is to come from {path}, whose config.json is no JSON object; {remedy}")


def _check_names(config: Config) -> None:
    """Every public name means one model. Teachers answer to their paths too, which must not name other weights."""
    trained = config.models
    taken = {name: f"server.model_aliases.{name}" for name in trained} | {config.server.model_name: "server.model_name"}
    keys: dict[str, str] = {}
    for teacher in config.teachers:
        here = f"distillation.teacher_models.{teacher.entry}"
        if teacher.name in taken:
            raise ConfigError(f"{here}.model_name is {teacher.name}, and so is {taken[teacher.name]}; "
                              "give each model a name of its own")
        taken[teacher.name] = f"{here}.model_name"
        if teacher.key in keys:
            raise ConfigError(f"{here}.key is {teacher.key}, and so is that of {keys[teacher.key]}; "
                              "give each teacher one of its own")
        keys[teacher.key] = teacher.entry
    for teacher in config.teachers:
        if teacher.path in trained and trained[teacher.path] != teacher.path:
            raise ConfigError(
                f"distillation.teacher_models.{teacher.entry}.model_path is {teacher.path}, which is also "
                f"{taken[teacher.path]}, a model from {trained[teacher.path]}; give the teacher the folder of its weights")


def _check_teacher(config: Config, teacher: TeacherConfig) -> None:
    rollout, section = teacher.rollout, config.distillation
    if rollout.get("name") is None:
        raise ConfigError(f"{teacher.preset_key('name')} is missing; give vllm")
    limit = rollout.get("max_model_len")
    if limit is not None and limit < 1:
        raise ConfigError(f"{teacher.preset_key('max_model_len')} is {limit}; it must be at least 1")
    if config.device == "cpu" and teacher.replica_size > 1:
        sizes = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
        key = next(key for key in sizes if (rollout.get(key) or 1) > 1)
        raise ConfigError(f"{teacher.preset_key(key)} is {rollout.get(key)}; without a GPU it must be 1")
    size, most = teacher.replica_size, section.n_gpus_per_node
    if size > most and size % most:
        raise ConfigError(
            f"{teacher.preset_key('tensor_model_parallel_size')}: a replica takes {size} GPUs, which is neither within one "
            f"node nor whole nodes of distillation.n_gpus_per_node ({most}); change one of them")


def _check_teacher_pool(config: Config) -> None:
    section, needed = config.distillation, sum(teacher.world_size for teacher in config.teachers)
    pool = section.nnodes * section.n_gpus_per_node
    if config.teachers and pool and needed > pool:
        raise ConfigError(f"distillation.nnodes * distillation.n_gpus_per_node is {pool}, and the teachers take {needed} "
                          "GPUs; raise them, or lower num_replicas or tensor_model_parallel_size of a teacher")
    if config.teachers and not section.dedicated_resource_pools and needed != pool:
        raise ConfigError(f"distillation.nnodes * distillation.n_gpus_per_node is {pool}, and the teachers take {needed} "
                          "GPUs; without distillation.dedicated_resource_pools they must fill it exactly")


def _check_profiler(config: Config) -> None:
    from omegaconf import OmegaConf

    profiler = config.global_profiler
    if profiler.get("tool") not in (None, "torch"):
        raise ConfigError(f"global_profiler.tool is {profiler.tool}; this server knows torch")
    if profiler.get("profile_continuous_steps"):
        raise ConfigError("global_profiler.profile_continuous_steps is true; this server gives each request a trace")
    steps = profiler.get("steps")
    if steps is None:
        return
    if not (OmegaConf.is_list(steps) and all(type(step) is int and step >= 1 for step in steps)):
        raise ConfigError(f"global_profiler.steps is {steps}; it must be a list of training requests' numbers, the first of "
                          "which is 1, as in [2, 3]")
    actor = config.actor_rollout_ref.actor.get("profiler") or {}
    if profiler.get("tool") is None or not actor.get("enable") or not (actor.get("all_ranks") or actor.get("ranks")):
        raise ConfigError("global_profiler.steps names requests, and nothing would be traced; set "
                          "global_profiler.tool=torch, actor_rollout_ref.actor.profiler.enable=true, and its all_ranks or ranks")


def check_served(config: Config) -> None:
    """Raise ConfigError naming the first key of a valid preset that this server cannot start yet."""
    verl = config.actor_rollout_ref
    if verl.actor.strategy not in STRATEGIES:
        raise ConfigError(f"actor_rollout_ref.actor.strategy is {verl.actor.strategy}; runs and adapters of this server are "
                          f"built on {', '.join(STRATEGIES)}, so it can check such a preset and plan it, not start it")
    _check_strict_pack(config)
    for refusal in honoured.refusals(verl):
        raise ConfigError(refusal)
    if config.has_rollout:
        _check_engine("actor_rollout_ref.rollout.name", verl.rollout.name)
    for teacher in config.teachers:
        _check_engine(teacher.preset_key("name"), teacher.rollout.name)


def _check_strict_pack(config: Config) -> None:
    several = [teacher.entry for teacher in config.teachers if teacher.num_replicas > 1]
    if config.distillation.strict_pack and several and config.device == "cpu":
        raise ConfigError(f"distillation.strict_pack is true, and teacher {several[0]} has several replicas; without a GPU they "
                          "are processes, which stand on as many nodes as there are, so leave it out")


def _check_engine(key: str, name: str) -> None:
    if name not in INFERENCE_ENGINES:
        raise ConfigError(f"{key} is {name}; this server samples with {', '.join(INFERENCE_ENGINES)}, so it can check "
                          "such a preset and plan it, not start it")


def check_machine(config: Config) -> None:
    """Raise ConfigError naming the first key that a server could not use here: engines that it has not, files and folders
    that are not there or may not be written to. Changes nothing on the disk."""
    check_served(config)
    check_checkpoint_dir(config.checkpoint_dir)
    if config.api_keys_file:
        _check_keys(config.api_keys_file)


def check_checkpoint_dir(folder: Path) -> None:
    try:
        nearest = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise unwritable(folder, error.strerror) from None
    if not nearest.is_dir():
        raise unwritable(folder, f"{nearest} is a file")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise unwritable(folder, f"{nearest} may not be written to")


def _check_keys(file: Path) -> None:
    if not file.exists():
        raise ConfigError(f"server.api_keys_file: there is no {file}, so nobody could get in; make the first key with "
                          f"python -m verl_tinker.keys add NAME --file {file}")
    try:
        Keys(file)
    except UserError as error:
        raise ConfigError(str(error)) from None


def unwritable(folder: Path, reason: str) -> ConfigError:
    return ConfigError(f"server.checkpoint_dir: {folder} cannot be written to ({reason}); give a folder of your own, as in "
                       "--set server.checkpoint_dir=~/checkpoints")
