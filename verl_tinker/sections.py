"""The sections of a preset that are ours: their keys, defaults and bounds.

Owns what a single key may be. Does not know what keys must be of each other or of the machine: `checks` does.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from verl_tinker.api import flags
from verl_tinker.schema import ConfigError


@dataclass(frozen=True)
class ServerConfig:
    """`model_path` is a folder, a hub name or a bundled model; without it `actor_rollout_ref.model.path` or the
    public name counts. `model_aliases` gives further public names, each with a path in the same sense.
    """

    model_name: str
    model_path: str | None = None
    model_aliases: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = 8000
    ray_address: str | None = None
    # A folder of the user's own: checkpoints outlive the server, wherever it is started from, and no clean-up of
    # /tmp or of a checkout takes them away.
    checkpoint_dir: str = "~/.local/share/verl-tinker/checkpoints"
    cache_dir: str | None = None
    server_max_runtime: float | None = None
    # A JSON file of names and digests that python -m verl_tinker.keys makes; without it everybody may call.
    api_keys_file: str | None = None
    allow_without_keys: bool = False
    max_concurrent_samples: int = 256
    max_waiting_samples: int = 20_000
    # In the workers' memory; beyond them, and after resting for park_after_s, runs wait on disk.
    max_training_runs: int = 16
    park_after_s: float | None = 600.0
    session_timeout_s: float = 900.0
    keep_versions: int = 8
    # Unnamed snapshots lie in host memory up to this, and on the disk of checkpoint_dir after it.
    snapshot_memory_gb: float = 2.0
    keep_last_checkpoints: int = 0
    allow_shutdown: Literal["auto", True, False] = "auto"
    enable_offload: bool | None = None
    # Flags that clients read from client/config, where they are to differ from verl_tinker.api.flags.
    client_flags: dict[str, Any] = field(default_factory=dict)
    # One line for each operation, as text or as a JSON object; samples that succeed are written at debug.
    log_format: Literal["text", "json"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    auto_merge_verl_default_config: bool = True

    def __post_init__(self) -> None:
        _not_empty(self, "server")
        _at_least(self, "server", max_concurrent_samples=1, max_waiting_samples=1, max_training_runs=1,
                  keep_versions=1, keep_last_checkpoints=0, snapshot_memory_gb=0, port=0)
        _positive(self, "server", "session_timeout_s", "server_max_runtime", "park_after_s")
        if self.port > 65535:
            raise ConfigError(f"server.port is {self.port}; it must be at most 65535")
        if not (self.is_on_loopback or self.api_keys_file or self.allow_without_keys):
            raise ConfigError(
                f"server.host is {self.host}, where others can reach it, and there are no API keys; make one with python -m "
                "verl_tinker.keys add NAME --file FILE and set server.api_keys_file=FILE, or say "
                "server.allow_without_keys=true to let everybody in")
        try:
            flags.chosen(self.client_flags)
        except ValueError as error:
            raise ConfigError(f"server.client_flags.{error}") from None

    @property
    def is_on_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True)
class ActorConfig:
    """How runs train. `auto` lets the first run decide; an adapter of rank r is scaled by `lora_alpha / r`."""

    mode: Literal["auto", "lora", "full"] = "auto"
    lora_alpha: float = 32.0
    max_lora_rank: int = 128

    def __post_init__(self) -> None:
        _at_least(self, "actor", max_lora_rank=1)
        _positive(self, "actor", "lora_alpha")


@dataclass(frozen=True)
class CpuConfig:
    """Shares of a machine without a GPU: the sampler's key-value cache, that of each teacher replica, and the threads of
    each worker. vLLM takes whole gibibytes.
    """

    kv_cache_gb: int = 1
    teacher_kv_cache_gb: int = 1
    threads: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    def __post_init__(self) -> None:
        _at_least(self, "cpu", kv_cache_gb=1, teacher_kv_cache_gb=1, threads=1)


@dataclass(frozen=True)
class TrainerConfig:
    """The shape of the worker group; without a GPU `n_gpus_per_node` counts worker processes."""

    nnodes: int = 1
    n_gpus_per_node: int = 1

    def __post_init__(self) -> None:
        _at_least(self, "trainer", nnodes=1, n_gpus_per_node=1)


@dataclass(frozen=True)
class DistillationConfig:
    """The teachers and the GPUs that are theirs. A replica takes at most `n_gpus_per_node` GPUs of a node; `nnodes` 0 is as
    many nodes as they need.

    Each replica has a placement group of its own. Without `dedicated_resource_pools` the teachers must fill nnodes *
    n_gpus_per_node GPUs exactly, as verl's one pool for all of them demands. With `strict_pack` all replicas of a
    teacher stand on one node, or on whole nodes where one is too small.
    """

    enabled: bool = False
    nnodes: int = 0
    n_gpus_per_node: int = 8
    dedicated_resource_pools: bool = True
    strict_pack: bool = False
    teacher_models: dict[str, dict] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _at_least(self, "distillation", nnodes=0, n_gpus_per_node=1)


def _at_least(section: Any, name: str, **limits: int) -> None:
    for key, limit in limits.items():
        if getattr(section, key) < limit:
            raise ConfigError(f"{name}.{key} is {getattr(section, key)}; it must be at least {limit}")


def _positive(section: Any, name: str, *keys: str) -> None:
    for key in keys:
        value = getattr(section, key)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}.{key} is {value}; it must be a positive, finite number")


def _not_empty(section: Any, name: str) -> None:
    for key, value in ((item.name, getattr(section, item.name)) for item in fields(section)):
        if isinstance(value, str) and not value.strip():
            raise ConfigError(f"{name}.{key} is empty; give it a value, or leave it out for the default")
