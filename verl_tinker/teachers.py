"""The teachers of a preset: frozen models with names of their own, each with verl's whole rollout configuration.

Owns what the `distillation` section becomes. Does not start a teacher, and does not place one: `core.placement` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from verl_tinker import schema
from verl_tinker.presets import merged, single
from verl_tinker.schema import ConfigError
from verl_tinker.sections import DistillationConfig, TeacherEntry

SECTION = "distillation"
ENVIRONMENT = {"TINKER_TEACHER_MODEL_NAME": "model_name", "TINKER_TEACHER_MODEL_PATH": "model_path"}
# verl's defaults for them follow the actor's model, or describe its training.
_OF_THE_ACTOR = ("profiler", "mtp", "qat", "prometheus")
# vLLM reserves for that many candidates a position unless the preset says otherwise.
DEFAULT_MAX_LOGPROBS = 128


@dataclass(frozen=True)
class TeacherConfig:
    """A frozen model, and verl's RolloutConfig for it as an OmegaConf tree (`rollout`).

    Clients ask for it by any of `names`: its `name`, and its `path` where that names no other model. `entry` is its key in
    distillation.teacher_models, `key` the word that logs and placements use.
    """

    entry: str
    key: str
    name: str
    names: tuple[str, ...]
    path: str
    num_replicas: int
    rollout: Any

    @property
    def replica_size(self) -> int:
        """GPUs of one replica, as verl counts them."""
        return _replica_size(self.rollout)

    @property
    def world_size(self) -> int:
        """GPUs of all replicas."""
        return self.num_replicas * self.replica_size

    @property
    def max_logprobs(self) -> int:
        """The most candidates for each position that its engine gives."""
        return int(_engine_kwargs(self.rollout).get("max_logprobs") or DEFAULT_MAX_LOGPROBS)

    def preset_key(self, key: str) -> str:
        """Where the preset sets a key of this teacher's inference, for messages that say what to change."""
        return f"{SECTION}.teacher_models.{self.entry}.inference.{key}"


def check_layer(values: Any, rollout_defaults: Mapping[str, Any], verl_defaults: Mapping[str, Any]) -> None:
    """Check one layer's `distillation` section: keys, types, and that nothing in it would have no effect."""
    known = schema.annotations(DistillationConfig)
    if isinstance(values, Mapping):
        for key in values:
            if key in verl_defaults and key not in known:
                raise ConfigError(f"{SECTION}.{key} has no effect here: the client's program owns the loss and chooses the "
                                  "teacher by its name; remove it")
    schema.check_section(values, known, SECTION)
    for entry, teacher in (values.get("teacher_models") or {}).items():
        path = f"{SECTION}.teacher_models.{entry}"
        schema.check_section(teacher, schema.annotations(TeacherEntry), path)
        schema.check_verl(teacher.get("inference") or {}, rollout_defaults, f"{path}.inference", "RolloutConfig")


def environment_layers(tree: Mapping[str, Any], environ: Mapping[str, str]) -> list[tuple[str, dict[str, Any]]]:
    """What the environment says of the preset's only teacher, as layers over it."""
    layers = []
    for variable, field in ENVIRONMENT.items():
        if not environ.get(variable):
            continue
        entries = list((tree.get(SECTION) or {}).get("teacher_models") or {})
        if len(entries) != 1:
            there = ", ".join(entries) or "none"
            raise ConfigError(f"{variable}: it names the preset's only teacher, and the preset has {there}; use "
                              f"--set {SECTION}.teacher_models.NAME.{field}=... instead")
        layers.append((variable, single(f"{SECTION}.teacher_models.{entries[0]}.{field}", environ[variable])))
    return layers


def unresolved(section: DistillationConfig, defaults: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Each teacher's rollout tree over verl's defaults, with verl's interpolations still in it."""
    base = {key: value for key, value in defaults["actor_rollout_ref"]["rollout"].items() if key not in _OF_THE_ACTOR}
    if base:
        base = merged(base, defaults[SECTION]["teacher_models"]["teacher_model"]["inference"])
        # The most of a node that one of its replicas may take.
        base = merged(base, {"nnodes": 0, "n_gpus_per_node": section.n_gpus_per_node, "data_parallel_size": 1})
    teachers = section.teacher_models if section.enabled else {}
    return {entry: merged(base, teacher.get("inference") or {}) for entry, teacher in teachers.items()}


def built(section: DistillationConfig, rollouts: Mapping[str, Any], trained: Iterable[str]) -> tuple[TeacherConfig, ...]:
    """The teachers as they are placed: largest replica first, then the most GPUs, then the preset's order.

    `trained`: the public names of the trained model.
    """
    if section.enabled and not section.teacher_models:
        raise ConfigError(f"{SECTION}.enabled is true, and {SECTION}.teacher_models names no teacher")
    teachers = [_built(entry, section, rollouts[entry]) for entry in rollouts]
    teachers.sort(key=lambda teacher: (-teacher.replica_size, -teacher.world_size))
    taken = {*trained, *(teacher.name for teacher in teachers)}
    named = []
    for teacher in teachers:
        further = () if teacher.path in taken else (teacher.path,)
        taken |= {*further}
        named.append(replace(teacher, names=(teacher.name, *further)))
    return tuple(named)


def _built(entry: str, section: DistillationConfig, rollout: Any) -> TeacherConfig:
    given = section.teacher_models[entry]
    path = f"{SECTION}.teacher_models.{entry}"
    name = given.get("model_name") or given.get("model_path")
    if not name:
        raise ConfigError(f"{path}.model_path is missing; it is the folder, hub name or bundled model that the teacher is")
    for key in ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size"):
        if rollout.get(key) is not None and rollout.get(key) < 1:
            raise ConfigError(f"{path}.inference.{key} is {rollout.get(key)}; it must be at least 1")
    replicas = given.get("num_replicas") or 0
    if replicas < 0:
        raise ConfigError(f"{path}.num_replicas is {replicas}; it must be at least 1, or 0 to fill the pool")
    return TeacherConfig(
        entry=entry, key=given.get("key") or entry, name=name, names=(name,), path=given.get("model_path") or name,
        num_replicas=replicas or _replicas_that_fill(section, _replica_size(rollout)), rollout=rollout)


def _replicas_that_fill(section: DistillationConfig, replica_size: int) -> int:
    """verl gives its whole pool to an only teacher without a number of replicas."""
    pool = section.nnodes * section.n_gpus_per_node if len(section.teacher_models) == 1 else 0
    return max(1, pool // replica_size)


def _replica_size(rollout: Any) -> int:
    return ((rollout.get("tensor_model_parallel_size") or 1) * (rollout.get("data_parallel_size") or 1)
            * (rollout.get("pipeline_model_parallel_size") or 1))


def _engine_kwargs(rollout: Any) -> Mapping[str, Any]:
    return (rollout.get("engine_kwargs") or {}).get(rollout.get("name")) or {}


def as_tree(section: DistillationConfig, teachers: tuple[TeacherConfig, ...]) -> dict[str, Any]:
    """The section as a preset, with all that was filled in."""
    from omegaconf import OmegaConf

    tree = asdict(section)
    if teachers:
        tree["teacher_models"] = {
            t.entry: {"key": t.key, "model_name": t.name, "model_path": t.path, "num_replicas": t.num_replicas,
                      "inference": OmegaConf.to_container(t.rollout)}
            for t in teachers}
    return tree


def check_verl(section: DistillationConfig, teachers: tuple[TeacherConfig, ...]) -> None:
    """Build verl's own teacher configurations, which runs verl's own checks; imports verl and takes seconds."""
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.config import DistillationTeacherModelConfig

    for teacher in teachers:
        try:
            config = DistillationTeacherModelConfig(
                key=teacher.key, model_path=teacher.path, num_replicas=teacher.num_replicas,
                inference=omega_conf_to_dataclass(teacher.rollout))
            config.check_configured()
        except Exception as error:  # Hydra wraps whatever the dataclass raised: assertions, ValueError, TypeError.
            reason = str(error.__cause__ or error).splitlines()[0]
            raise ConfigError(f"verl refuses {SECTION}.teacher_models.{teacher.entry}: {reason}") from error
        if config.world_size != teacher.world_size:
            raise ConfigError(f"{SECTION}.teacher_models.{teacher.entry}: verl counts {config.world_size} GPUs for it, "
                              f"this server {teacher.world_size}")
