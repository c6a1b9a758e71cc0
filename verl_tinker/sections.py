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


def _key(default: Any, text: str) -> Any:
    """A key of a preset with its default, or a function that makes it, and its meaning, which docs/presets.md shows."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(**made, metadata={"text": text})


@dataclass(frozen=True)
class ServerConfig:
    """The server itself: its models' names, its address, its files, and how much it holds at once."""

    model_name: str = field(metadata={"text": "the public name by which clients ask for the model"})
    model_path: str | None = _key(None, "its weights: a folder, a hub name or a bundled model; without it "
                                  "`actor_rollout_ref.model.path` or the public name counts")
    model_aliases: dict[str, str] = _key(dict, "further public names of the same model, each with a path in the same sense")
    host: str = _key("127.0.0.1", "the address to listen on; a public one needs keys")
    port: int = _key(8000, "the port; 0 takes a free one")
    ray_address: str | None = _key(None, "a Ray cluster to join; without it the server starts a Ray of its own")
    # A folder of the user's own: checkpoints outlive the server, wherever it is started from, and no clean-up of
    # /tmp or of a checkout takes them away.
    checkpoint_dir: str = _key("~/.local/share/verl-tinker/checkpoints", "where checkpoints, versions and the journal lie")
    cache_dir: str | None = _key(None, "where bundled models are prepared; by default `VERL_TINKER_CACHE` or "
                                 "`~/.cache/verl-tinker`")
    server_max_runtime: float | None = _key(None, "seconds after which the server stops by itself")
    api_keys_file: str | None = _key(None, "a JSON file of names and digests that `python -m verl_tinker.keys` makes; "
                                     "without it everybody may call")
    allow_without_keys: bool = _key(False, "lets everybody in at a public address")
    max_concurrent_samples: int = _key(256, "samples that the sampler has at once")
    max_waiting_samples: int = _key(20_000, "samples that wait for it; more are refused with 429")
    pack_tokens: int = _key(0, "forward_backward calls of a run that wait for the trainer run as one up to so many tokens; sums "
                               "are then taken in another order, so that repeated programs agree to 1e-6 and not bit for bit")
    max_training_runs: int = _key(16, "adapter runs in the workers' memory; further ones wait on disk")
    park_after_s: float | None = _key(600.0, "seconds of rest after which a run waits on disk too; null: never")
    session_timeout_s: float = _key(900.0, "seconds without a heartbeat after which a session and its runs end")
    keep_versions: int = _key(8, "the newest versions of each run, which stay loaded")
    # Unnamed snapshots lie in host memory up to this, and on the disk of checkpoint_dir after it.
    snapshot_memory_gb: float = _key(2.0, "host memory for unnamed snapshots; what is more lies on disk")
    keep_last_checkpoints: int = _key(0, "the newest checkpoints of a run, which are kept; 0 keeps all")
    allow_shutdown: Literal["auto", True, False] = _key("auto", "whether `POST /api/v1/shutdown` is honoured; auto: on "
                                                        "loopback without keys")
    enable_offload: bool | None = _key(None, "sets `param_offload` and `optimizer_offload` of the strategy, so that trainer "
                                       "and sampler take turns in the GPUs' memory")
    client_flags: dict[str, Any] = _key(dict, "flags that clients read, where they are to differ from "
                                        "`verl_tinker/api/flags.py`")
    log_format: Literal["text", "json"] = _key("text", "one line for each operation, as text or as a JSON object")
    log_level: Literal["debug", "info", "warning", "error"] = _key("info", "the least that is logged; debug adds each sample")
    auto_merge_verl_default_config: bool = _key(True, "lays the preset over verl's defaults; false takes it as it stands")

    def __post_init__(self) -> None:
        _not_empty(self, "server")
        _at_least(self, "server", max_concurrent_samples=1, max_waiting_samples=1, max_training_runs=1,
                  pack_tokens=0, keep_versions=1, keep_last_checkpoints=0, snapshot_memory_gb=0, port=0)
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
    """How runs train."""

    mode: Literal["auto", "lora", "full"] = _key("auto", "auto lets the first run decide, lora and full refuse the other")
    lora_alpha: float = _key(32.0, "an adapter of rank r is scaled by lora_alpha / r")
    max_lora_rank: int = _key(128, "the largest rank that clients may ask for")

    def __post_init__(self) -> None:
        _at_least(self, "actor", max_lora_rank=1)
        _positive(self, "actor", "lora_alpha")


@dataclass(frozen=True)
class CpuConfig:
    """Shares of a machine without a GPU. vLLM takes whole gibibytes for its cache."""

    kv_cache_gb: int = _key(1, "GiB for the key-value cache of a sampler process")
    teacher_kv_cache_gb: int = _key(1, "GiB for that of a teacher process")
    threads: int = _key(lambda: len(os.sched_getaffinity(0)), "threads of each worker; by default all cores of this process")

    def __post_init__(self) -> None:
        _at_least(self, "cpu", kv_cache_gb=1, teacher_kv_cache_gb=1, threads=1)


@dataclass(frozen=True)
class TrainerConfig:
    """The shape of the trainer's worker group."""

    nnodes: int = _key(1, "nodes")
    n_gpus_per_node: int = _key(1, "GPUs of each; without a GPU worker processes")

    def __post_init__(self) -> None:
        _at_least(self, "trainer", nnodes=1, n_gpus_per_node=1)


@dataclass(frozen=True)
class DistillationConfig:
    """The teachers, and the GPUs that are theirs. Each replica has a placement group of its own."""

    enabled: bool = _key(False, "without it there are no teachers, whatever else the section says")
    nnodes: int = _key(0, "nodes that hold teachers at most; 0: as many as they need")
    n_gpus_per_node: int = _key(8, "GPUs of one node that one replica takes at most; a larger one takes so many on each of "
                                "several nodes")
    dedicated_resource_pools: bool = _key(True, "false: the teachers must fill nnodes * n_gpus_per_node exactly, as verl's "
                                          "one pool for all of them demands")
    strict_pack: bool = _key(False, "all replicas of a teacher on one node, or on whole nodes where one is too small; "
                              "one replica always is")
    teacher_models: dict[str, dict] = _key(dict, "the teachers, each under a word of its own")

    def __post_init__(self) -> None:
        _at_least(self, "distillation", nnodes=0, n_gpus_per_node=1)


@dataclass(frozen=True)
class TeacherEntry:
    """One of `distillation.teacher_models`, as the preset writes it."""

    key: str | None = _key(None, "the word for it in logs and placements; by default that of the entry")
    model_name: str | None = _key(None, "the public name by which clients ask for it; by default its path")
    model_path: str | None = _key(None, "its weights: a folder, a hub name or a bundled model; by default its name. Clients "
                                  "may ask for it by this too")
    num_replicas: int = _key(0, "replicas; 0: one, or as many as fill the pool when it is the only teacher and nnodes "
                             "is set")
    inference: dict = _key(dict, "verl's rollout section for it, over verl's defaults for a teacher")


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
