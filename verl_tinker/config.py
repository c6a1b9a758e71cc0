"""Presets: found, merged with verl's own defaults and with overrides, checked, and handed on as one typed Config.

Owns what wins over what, and the result. Does not start anything, and does not import verl until asked to build verl's
own objects (`Config.check_verl`).

    python -m verl_tinker.config --config configs/quick_start/cpu.yaml --set server.port=8001
"""

from __future__ import annotations

import argparse
import functools
import logging
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from verl_tinker import honoured, schema, teachers
from verl_tinker.checks import check_machine, check_whole
from verl_tinker.models import ModelMap, default_cache_dir
from verl_tinker.presets import find_preset, merged, parsed, read_preset, single
from verl_tinker.schema import ConfigError
from verl_tinker.sections import ActorConfig, CpuConfig, DistillationConfig, ServerConfig, TrainerConfig
from verl_tinker.teachers import TeacherConfig

log = logging.getLogger("verl_tinker")

ENVIRONMENT = {
    "TINKER_SERVER_MODEL_NAME": "server.model_name",
    "TINKER_SERVER_MODEL_PATH": "server.model_path",
    "TINKER_SERVER_HOST": "server.host",
    "TINKER_SERVER_PORT": "server.port",
    "TINKER_SERVER_MAX_RUNTIME": "server.server_max_runtime",
    "TINKER_SERVER_MAX_CONCURRENT_SAMPLES": "server.max_concurrent_samples",
    "TINKER_SERVER_N_GPUS_PER_NODE": "trainer.n_gpus_per_node",
    "TINKER_CHECKPOINT_DIR": "server.checkpoint_dir",
    "RAY_ADDRESS": "server.ray_address",
}
# verl composes its defaults by engine; these are the names of that choice and of the engine's section in `actor`.
ENGINES = {
    "fsdp": ("dp", "fsdp_config"),
    "fsdp2": ("dp", "fsdp_config"),
    "veomni": ("veomni", "veomni"),
    "megatron": ("megatron", "megatron"),
}

OURS = {"server": ServerConfig, "actor": ActorConfig, "cpu": CpuConfig, "trainer": TrainerConfig}
SECTIONS = {"device": 'Literal["auto", "cpu", "cuda"]', **{name: "dict" for name in OURS}, "actor_rollout_ref": "dict",
            "distillation": "dict", "global_profiler": "dict"}


@dataclass(frozen=True)
class Config:
    """A checked preset. `actor_rollout_ref` and `global_profiler` are verl's sections, OmegaConf trees with nothing left to
    resolve; `teachers` stand in the order in which they are to be placed.
    """

    source: str
    device: Literal["cpu", "cuda"]
    server: ServerConfig
    actor: ActorConfig
    cpu: CpuConfig
    trainer: TrainerConfig
    distillation: DistillationConfig
    teachers: tuple[TeacherConfig, ...]
    actor_rollout_ref: Any
    global_profiler: Any
    has_ref: bool

    @property
    def has_rollout(self) -> bool:
        from omegaconf import OmegaConf

        rollout = self.actor_rollout_ref.rollout
        return not OmegaConf.is_missing(rollout, "name") and rollout.name is not None

    @property
    def context_length(self) -> int:
        """The longest sequence in tokens; a model whose own limit is lower lowers it."""
        limit = self.actor_rollout_ref.rollout.max_model_len if self.has_rollout else None
        return int(limit or self.token_budget)

    @property
    def token_budget(self) -> int:
        """Tokens that a micro batch holds at most, over the ranks that share a sequence."""
        return int(self.actor_rollout_ref.actor.ppo_max_token_len_per_gpu) * self.sequence_parallel_size

    @property
    def sequence_parallel_size(self) -> int:
        """How many of the trainer's workers share a sequence."""
        return self._sequence_parallel[0]

    @property
    def sequence_parallel_key(self) -> str:
        """The key that says so; each strategy has its own."""
        return self._sequence_parallel[1]

    @property
    def _sequence_parallel(self) -> tuple[int, str]:
        actor = self.actor_rollout_ref.actor
        section = ENGINES[actor.strategy][1]
        names = ("ulysses_sequence_parallel_size", "ulysses_parallel_size", "context_parallel_size")
        places = (("actor_rollout_ref.actor", actor), (f"actor_rollout_ref.actor.{section}", actor.get(section) or {}))
        return max((int(found.get(name) or 1), f"{where}.{name}") for where, found in places for name in names)

    @property
    def rollout_is_apart(self) -> bool:
        """Whether the samplers have GPUs of their own, as verl's rollout.nnodes says."""
        return self.has_rollout and bool(self.actor_rollout_ref.rollout.get("nnodes"))

    @property
    def rollout_replicas(self) -> int:
        """Samplers on GPUs of their own; 0: on the trainer's, as many as fit."""
        rollout = self.actor_rollout_ref.rollout
        if not self.rollout_is_apart:
            return 0
        return int(rollout.nnodes) * int(rollout.n_gpus_per_node) // int(rollout.get("tensor_model_parallel_size") or 1)

    @property
    def models(self) -> ModelMap:
        """Every public name of the trained model, with the path, hub name or bundled name of its weights."""
        return ModelMap({self.server.model_name: self.actor_rollout_ref.model.path, **self.server.model_aliases})

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.server.checkpoint_dir).expanduser().absolute()

    @property
    def cache_dir(self) -> Path:
        return Path(self.server.cache_dir).expanduser() if self.server.cache_dir else default_cache_dir()

    @property
    def allow_shutdown(self) -> bool:
        setting = self.server.allow_shutdown
        return self.server.is_on_loopback and not self.server.api_keys_file if setting == "auto" else setting

    @property
    def api_keys_file(self) -> Path | None:
        return Path(self.server.api_keys_file).expanduser().absolute() if self.server.api_keys_file else None

    def to_yaml(self) -> str:
        """The whole result as a preset, which loads to the same Config."""
        from omegaconf import OmegaConf

        tree = {"device": self.device} | {name: asdict(getattr(self, name)) for name in OURS}
        tree["actor_rollout_ref"] = OmegaConf.to_container(self.actor_rollout_ref, throw_on_missing=False)
        tree["actor_rollout_ref"]["ref"]["enable"] = self.has_ref
        tree["distillation"] = teachers.as_tree(self.distillation, self.teachers)
        tree["global_profiler"] = OmegaConf.to_container(self.global_profiler)
        return OmegaConf.to_yaml(OmegaConf.create(tree))

    def check_verl(self) -> None:
        """Build verl's own objects of the preset, which runs verl's own checks; imports verl and takes seconds."""
        from verl.utils.config import omega_conf_to_dataclass

        trees = {"actor": self.actor_rollout_ref.actor}
        if self.has_rollout:
            trees["rollout"] = self.actor_rollout_ref.rollout
        if self.has_ref:
            trees["ref"] = _as_actor(self.actor_rollout_ref.ref)
        for part, tree in trees.items():
            try:
                omega_conf_to_dataclass(tree)
            except Exception as error:  # Hydra wraps whatever the dataclass raised: assertions, ValueError, TypeError.
                reason = str(error.__cause__ or error).splitlines()[0]
                raise ConfigError(f"{self.source}: verl refuses actor_rollout_ref.{part}: {reason}") from error
        _labelled(self.source, teachers.check_verl, self.distillation, self.teachers)


def load_config(
    path: str | Path | None = None, overrides: Iterable[str] = (), environ: Mapping[str, str] = os.environ
) -> Config:
    """Read a preset; then the environment counts more than it, and `overrides` ("key=value") most of all.

    Without `path`: the CPU preset where there is no GPU, else actor_rollout.
    """
    if path is None:
        path = "configs/quick_start/" + ("actor_rollout.yaml" if _has_gpu() else "cpu.yaml")
    file = find_preset(path)
    preset = read_preset(file)
    layers = [(str(path), preset)]
    layers += [(name, _typed(key, environ[name])) for name, key in ENVIRONMENT.items() if environ.get(name)]
    layers += teachers.environment_layers(preset, environ)
    layers += [(f"--set {text}", _override(text)) for text in overrides]
    tree: dict[str, Any] = {}
    for _, layer in layers:
        tree = merged(tree, layer)
    defaults = _verl_defaults(_strategy(tree))
    for label, layer in layers:
        _labelled(label, _check_layer, layer, defaults)
    config = _labelled(str(path), _build, str(path), tree, defaults)
    _tell_what_has_no_effect(layers, defaults, config.device == "cpu")
    return config


def _tell_what_has_no_effect(layers: list[tuple[str, dict[str, Any]]], defaults: dict[str, Any], on_cpu: bool) -> None:
    for label, layer in layers:
        for key, reason in honoured.without_effect(layer, defaults, on_cpu):
            log.warning("%s: %s has no effect here: %s", label, key, reason)


def _build(source: str, tree: dict[str, Any], defaults: dict[str, Any]) -> Config:
    sections = {name: _section(name, cls, tree.get(name) or {}) for name, cls in OURS.items()}
    distillation = DistillationConfig(**(tree.get("distillation") or {}))
    verl = merged({}, tree.get("actor_rollout_ref") or {})
    has_ref = bool((verl.get("ref") or {}).pop("enable", False))
    if not sections["server"].auto_merge_verl_default_config:
        defaults = {**defaults, "actor_rollout_ref": {section: {} for section in ("actor", "rollout", "ref", "model")}}
    whole = _resolved(defaults, {
        "trainer": asdict(sections["trainer"]),
        "actor_rollout_ref": _with_model(verl, sections["server"], _strategy(tree)),
        "global_profiler": tree.get("global_profiler") or {},
        "teachers": teachers.unresolved(distillation, defaults),
    })
    config = Config(
        source=source,
        device=_device(tree.get("device", "auto")),
        **sections,
        distillation=distillation,
        teachers=teachers.built(
            distillation, whole.teachers, [sections["server"].model_name, *sections["server"].model_aliases]),
        actor_rollout_ref=whole.actor_rollout_ref,
        global_profiler=whole.global_profiler,
        has_ref=has_ref,
    )
    check_whole(config)
    return config


def _section(name: str, cls: type, values: Mapping[str, Any]) -> Any:
    needed = [f.name for f in fields(cls) if f.name == "model_name" and f.name not in values]
    if needed:
        raise ConfigError(f"{name}.{needed[0]} is missing; it is the name by which clients ask for the model")
    return cls(**values)


def _with_model(verl: dict[str, Any], server: ServerConfig, strategy: str) -> dict[str, Any]:
    """verl's section with the server's model and offload in it."""
    path = server.model_path or (verl.get("model") or {}).get("path") or server.model_name
    verl = merged(verl, {"model": {"path": path}})
    if server.enable_offload is None:
        return verl
    engine = {"param_offload": server.enable_offload, "optimizer_offload": server.enable_offload}
    return merged({"actor": {ENGINES[strategy][1]: engine}}, verl)


def _resolved(defaults: dict[str, Any], sections: dict[str, Any]) -> Any:
    """The sections over verl's defaults, everything filled in, as an OmegaConf tree."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    # Merged before OmegaConf sees it, which takes a third of a second for each tree of this size.
    whole = OmegaConf.create(merged(defaults, sections))
    try:
        return OmegaConf.create({
            name: OmegaConf.to_container(whole[name], resolve=True)
            for name in sections if name != "trainer"})
    except OmegaConfBaseException as error:
        raise ConfigError(str(error).splitlines()[0]) from error


def _check_layer(layer: dict[str, Any], defaults: dict[str, Any]) -> None:
    for key, value in layer.items():
        if key in OURS:
            schema.check_section(value, schema.annotations(OURS[key]), key)
        elif key == "actor_rollout_ref":
            schema.check_verl(value, merged(defaults[key], {"ref": {"enable": False}}), key)
        elif key == "distillation":
            teachers.check_layer(value, defaults["actor_rollout_ref"]["rollout"], defaults[key])
        elif key == "global_profiler":
            schema.check_verl(value, defaults[key], key)
        else:
            schema.check_section({key: value}, SECTIONS, "")


@functools.cache
def _verl_defaults(strategy: str) -> dict[str, Any]:
    """verl's own defaults for the engine that trains, of the sections that concern a server; to be read only."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    with initialize_config_dir(str(schema.verl_folder() / "trainer" / "config"), version_base=None):
        whole = OmegaConf.to_container(compose("ppo_trainer", overrides=[f"model_engine={ENGINES[strategy][0]}"]))
    # The others, of programs that own their loss and reward, are a third of what each preset would be laid over.
    return {name: whole[name] for name in ("actor_rollout_ref", "data", "algorithm", "distillation", "trainer", "global_profiler")}


def _as_actor(ref: Any) -> Any:
    """The reference's section under the names of the actor's dataclass, as verl's worker renames it."""
    from omegaconf import OmegaConf

    tree = OmegaConf.to_container(ref)
    tree["use_dynamic_bsz"] = tree.pop("log_prob_use_dynamic_bsz", False)
    for key in ("micro_batch_size", "micro_batch_size_per_gpu", "max_token_len_per_gpu"):
        tree[f"ppo_{key}"] = tree.pop(f"log_prob_{key}", None)
    return OmegaConf.create(tree)


def _strategy(tree: Mapping[str, Any]) -> str:
    here: Any = tree
    for key in ("actor_rollout_ref", "actor", "strategy"):
        here = here.get(key) if isinstance(here, Mapping) else None
    if here is not None and here not in ENGINES:
        raise ConfigError(f"actor_rollout_ref.actor.strategy is {here!r}; it must be one of {', '.join(ENGINES)}")
    return here or "fsdp2"


def _device(setting: str) -> Literal["cpu", "cuda"]:
    return setting if setting != "auto" else "cuda" if _has_gpu() else "cpu"


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def _override(text: str) -> dict[str, Any]:
    key, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not key:
        raise ConfigError(f"--set {text}: write key=value, as in --set server.port=8001")
    return _typed(key, value)


def _typed(dotted: str, text: str) -> dict[str, Any]:
    """One value as a tree: its text read as YAML, save where the key asks for text."""
    section, _, key = dotted.partition(".")
    is_text = section in OURS and schema.annotations(OURS[section]).get(key, "").startswith("str")
    return single(dotted, text if is_text else parsed(text))


def _labelled(label: str, function: Any, *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except ConfigError as error:
        raise ConfigError(f"{label}: {error}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options that every command with a preset shares."""
    parser.add_argument("--config", metavar="FILE", help="a preset; by default the one that suits this machine")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="overrides",
                        help="lay one value over the preset; may be repeated")


def print_config(config: Config) -> None:
    """Check the preset against this machine and with verl's own classes too, then print it; starts nothing."""
    check_machine(config)
    if config.device == "cpu":
        from verl_tinker.engine.cpu.environment import driver_environment

        os.environ.update(driver_environment())
    config.check_verl()
    print(config.to_yaml(), end="")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.config", description="Print the processed preset.")
    add_arguments(parser)
    parser.add_argument("--check", action="store_true", help="accepted for symmetry: checking is all this command does")
    options = parser.parse_args(arguments)
    try:
        print_config(load_config(options.config, options.overrides))
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
