"""What no key of a preset shows by itself: sizes that must fit each other, files and folders that must be there.

Owns those checks. Does not check single keys and their types: `schema` does.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

from verl_tinker.core.access import Keys
from verl_tinker.core.errors import UserError
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
    remedy = "give a Hugging Face model folder in server.model_path (or server.model_aliases)"
    for name, path in config.models.items():
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


def check_machine(config: Config) -> None:
    """Raise ConfigError naming the first key whose file or folder a server could not use; changes nothing on the disk."""
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
