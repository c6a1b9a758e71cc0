"""The files of a $TASK folder: where each lies, what they may say, and the checks of one against another.

Owns config/{engine,harbor,runtime,admin}.yaml as typed values. Does not write them: `configure` does.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from harbor_env.budget import Budget
from harbor_env.errors import SettingError
from harbor_env.rock_sandbox import RockSettings

ADMIN_PORT, BACKEND_PORT, WORKER_PORT, MODEL_SERVICE_PORT = 18080, 19210, 22555, 28080
AGENTS = ("swe-agent", "mini-swe-agent", "bash-agent")


@dataclass(frozen=True)
class TaskFolder:
    """The places below one $TASK folder."""

    root: Path

    @classmethod
    def found(cls, given: str | None) -> TaskFolder:
        """From a flag, or from the variable TASK."""
        text = given or os.environ.get("TASK")
        if not text:
            raise SettingError("no task folder: set TASK, or give --task-root")
        if not Path(text).is_absolute():
            raise SettingError(f"the task folder is {text}; it must be an absolute path")
        return cls(Path(text))

    def config(self, name: str) -> Path:
        return self.root / "config" / f"{name}.yaml"

    @property
    def tasks(self) -> Path:
        return self.root / "assets" / "harbor-tasks"

    @property
    def notes(self) -> Path:
        """The notes of open sandboxes."""
        return self.root / "state" / "sandboxes"


@dataclass(frozen=True)
class AgentSettings:
    """The agent's share of the budget, under SWE-agent's names."""

    name: str = "swe-agent"
    max_input_tokens: int = 32768
    max_output_tokens: int = 8192
    per_instance_call_limit: int = 32
    temperature: float = 1.0
    completion_kwargs: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 8192})
    max_observation_length: int = 12000
    last_n_observations: int = 8

    def __post_init__(self):
        if self.name not in AGENTS:
            raise SettingError(f"agent.name is {self.name!r}; it must be one of {', '.join(AGENTS)}")


@dataclass(frozen=True)
class TaskSettings:
    id: str
    path: str


@dataclass(frozen=True)
class ModelServiceSettings:
    """`bind_host` is where it listens inside the sandbox; a task's container reaches it at the sandbox's first address."""

    port: int = MODEL_SERVICE_PORT
    bind_host: str = "0.0.0.0"
    rock: str = "rock"
    python: str = "python3"


@dataclass(frozen=True)
class JobSettings:
    """Harbor inside the sandbox. `start_engine`: bring up the sandbox's own Docker engine first."""

    jobs_dir: str = "/data/logs/user-defined/jobs"
    work_dir: str = "/data/harbor-env"
    timeout_sec: float = 7200
    harbor: str = "harbor"
    start_engine: bool = True
    images_dir: str = "/opt/images"
    agent_runtime: str = "/opt/agent-runtime"


@dataclass(frozen=True)
class HarborSettings:
    environment: RockSettings
    task: TaskSettings
    agent: AgentSettings = AgentSettings()
    model_service: ModelServiceSettings = ModelServiceSettings()
    job: JobSettings = JobSettings()


@dataclass(frozen=True)
class BackendSettings:
    """Our server, as a run starts it. `python` is that of the server's environment."""

    python: str
    checkpoint_dir: str
    host: str = "127.0.0.1"
    port: int = BACKEND_PORT
    start_seconds: float = 1800
    download_type: str = "HUGGINGFACE"


@dataclass(frozen=True)
class ClientSettings:
    """What the Tinker client asks for. `model` is the public name, `tokenizer` a hub name or a folder."""

    model: str
    tokenizer: str
    renderer: str
    max_tokens: int = 8192
    temperature: float = 1.0
    turn_seconds: float = 1800
    silence_seconds: float = 1800


@dataclass(frozen=True)
class RockServiceSettings:
    admin_port: int = ADMIN_PORT
    worker_port: int = WORKER_PORT
    ray_port: int = 6390
    node_ip: str = "127.0.0.1"
    venv: str = ""


@dataclass(frozen=True)
class RuntimeSettings:
    backend: BackendSettings
    client: ClientSettings
    rock: RockServiceSettings = RockServiceSettings()
    rollout_only: bool = False


@dataclass(frozen=True)
class Settings:
    """All that a run reads, checked against each other."""

    folder: TaskFolder
    harbor: HarborSettings
    runtime: RuntimeSettings
    budget: Budget


def load(folder: TaskFolder, *, max_tokens: int | None = None, task_id: str | None = None) -> Settings:
    """The configuration of a task folder; SettingError names the file, the field and the remedy."""
    harbor = read(folder.config("harbor"), HarborSettings)
    runtime = read(folder.config("runtime"), RuntimeSettings)
    if task_id is not None and task_id != harbor.task.id:
        raise SettingError(
            f"--task-id is {task_id}, and config/harbor.yaml is for {harbor.task.id}; configure a new folder for it")
    if max_tokens is not None:
        runtime = dataclasses.replace(runtime, client=dataclasses.replace(runtime.client, max_tokens=max_tokens))
    context = context_tokens(folder.config("engine"))
    return Settings(folder, harbor, runtime, budget_of(harbor.agent, runtime.client, context))


def budget_of(agent: AgentSettings, client: ClientSettings, context: int) -> Budget:
    """The three places of the output limit must agree, and input and output must fit the context."""
    limits = {"agent.max_output_tokens": agent.max_output_tokens,
              "agent.completion_kwargs.max_tokens": agent.completion_kwargs.get("max_tokens"),
              "the client's max_tokens (--max-tokens)": client.max_tokens}
    if len(set(limits.values())) > 1:
        raise SettingError("the output limits differ: " + ", ".join(f"{name} is {value}" for name, value in limits.items())
                           + "; set all three to one number")
    return Budget(agent.max_input_tokens, agent.max_output_tokens, context, agent.max_observation_length,
                  agent.last_n_observations, agent.per_instance_call_limit)


def context_tokens(engine: Path) -> int:
    """The context length of the server's preset."""
    preset = _yaml(engine)
    try:
        length = preset["actor_rollout_ref"]["rollout"]["max_model_len"]
    except (KeyError, TypeError):
        length = None
    if type(length) is not int:
        raise SettingError(f"{engine}: actor_rollout_ref.rollout.max_model_len is {length!r}; it must be the context length "
                           "in tokens")
    return length


def read(file: Path, kind: type) -> Any:
    """A YAML file as the dataclass `kind`, with the sections it has inside."""
    return _made(_yaml(file), kind, f"{file.parent.name}/{file.name}", "")


def _yaml(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except FileNotFoundError:
        raise SettingError(f"{file} is missing; run `python -m harbor_env configure` first") from None
    except (OSError, yaml.YAMLError) as error:
        raise SettingError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _made(values: Any, kind: type, file: str, path: str) -> Any:
    if not isinstance(values, dict):
        raise SettingError(f"{file}: {path.rstrip('.') or 'the file'} is {values!r}; it must be a section of keys")
    known = {f.name: f for f in dataclasses.fields(kind)}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, 1)
            hint = f"the nearest is {near[0]}" if near else f"there are {', '.join(known)}"
            raise SettingError(f"{file}: unknown key {path}{name}; {hint}")
    made = {}
    for name, described in known.items():
        inner = _class_of(described.type)
        if name in values:
            here = f"{path}{name}"
            value = values[name]
            made[name] = _made(value, inner, file, f"{here}.") if inner else _checked(value, described.type, file, here)
        elif described.default is dataclasses.MISSING and described.default_factory is dataclasses.MISSING:
            raise SettingError(f"{file}: {path}{name} is missing")
    return kind(**made)


def _class_of(annotation: str) -> type | None:
    found = globals().get(annotation)
    return found if dataclasses.is_dataclass(found) else None


def _checked(value: Any, annotation: str, file: str, path: str) -> Any:
    base = annotation.partition("[")[0]
    kinds = {"int": int, "float": (int, float), "str": str, "bool": bool, "dict": dict}[base]
    if not isinstance(value, kinds) or (isinstance(value, bool) and base != "bool"):
        words = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false",
                 "dict": "a section"}[base]
        raise SettingError(f"{file}: {path} is {value!r}; it must be {words}")
    return value
