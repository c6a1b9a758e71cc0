"""What no key of a preset shows by itself: sizes that must fit each other, folders that must be there.

Owns those checks. Does not check single keys and their types: `schema` does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verl_tinker.schema import ConfigError

if TYPE_CHECKING:
    from verl_tinker.config import Config


def check_whole(config: Config) -> None:
    """Raise ConfigError naming the first key that does not fit the others or this machine."""
    verl, trainer = config.actor_rollout_ref, config.trainer
    if config.device == "cpu" and verl.actor.strategy != "fsdp2":
        raise ConfigError(f"actor_rollout_ref.actor.strategy is {verl.actor.strategy}; without a GPU it must be fsdp2")
    _check_sizes(config)
    _check_folders(config)
    if config.has_rollout:
        if verl.rollout.name != "vllm":
            raise ConfigError(f"actor_rollout_ref.rollout.name is {verl.rollout.name}; this server samples with vllm")
        world, share = trainer.nnodes * trainer.n_gpus_per_node, verl.rollout.get("tensor_model_parallel_size") or 1
        if world % share:
            raise ConfigError(
                f"actor_rollout_ref.rollout.tensor_model_parallel_size is {share}, which does not divide the {world} "
                "workers of trainer.nnodes * trainer.n_gpus_per_node"
            )


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


def _check_folders(config: Config) -> None:
    for name, path in config.models.items():
        if path.startswith(("/", ".", "~")) and not (Path(path).expanduser() / "config.json").is_file():
            raise ConfigError(f"the model {name} is to come from {path}, where no config.json is; "
                              "give a Hugging Face model folder in server.model_path (or server.model_aliases)")
