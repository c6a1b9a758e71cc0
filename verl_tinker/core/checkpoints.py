"""Checkpoints and runs as records: their `tinker://` names, what is said of them, and their JSON.

Owns the grammar of names and of `meta.json` and `run.json`. Does not touch the disk: `verl_tinker.core.store` does.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field, fields

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import LoraSpec, ModelSpec

KINDS = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
RUN_ID = re.compile(r"[A-Za-z0-9._-]+:train:[0-9]+")
_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
_MAX_NAME = 200


@dataclass(frozen=True)
class CheckpointPath:
    """The parts of `tinker://{run_id}/{kind}/{name}`."""

    run_id: str
    kind: str
    name: str

    def __str__(self) -> str:
        return f"tinker://{self.run_id}/{self.kind}/{self.name}"

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"


@dataclass(frozen=True)
class Checkpoint:
    """What `meta.json` says. `uid` tells apart checkpoints that bore the same path; times are seconds since 1970.

    `owner` is the name of the API key that saved it, "" without keys. `public` opens it to every key.
    `source_uid`: the checkpoint that this one is a copy of.
    """

    uid: str
    path: CheckpointPath
    spec: ModelSpec
    created: float
    seq: int | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)
    ttl_seconds: int | None = None
    expires_at: float | None = None
    owner: str = ""
    public: bool = False
    source_uid: str = ""

    def expired(self, now: float) -> bool:
        return self.expires_at is not None and self.expires_at <= now


@dataclass(frozen=True)
class RunRecord:
    """What a run leaves in its `run.json`: enough to describe it after a restart.

    `parameter_bytes`: the size of what it trains, 0 when that is not known.
    """

    run_id: str
    spec: ModelSpec
    created: float
    user_metadata: dict[str, str]
    owner: str = ""
    project_id: str | None = None
    parameter_bytes: int = 0

    @property
    def session_id(self) -> str:
        return self.run_id.partition(":")[0]


def parse_path(text: str) -> CheckpointPath:
    if not isinstance(text, str):
        raise UserError(f"path {text!r} is not text")
    parts = text.removeprefix("tinker://").split("/") if text.startswith("tinker://") else []
    if len(parts) != 3 or parts[1] not in KINDS or not RUN_ID.fullmatch(parts[0]):
        raise UserError(
            f"path {text!r} is not a checkpoint path; expected tinker://SESSION:train:N/weights/NAME or "
            "tinker://SESSION:train:N/sampler_weights/NAME, as returned when the checkpoint was saved"
        )
    return CheckpointPath(parts[0], parts[1], check_name(parts[2]))


def check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME:
        raise UserError(
            f"path: checkpoint name {name[:_MAX_NAME]!r} cannot be used; a name is 1 to {_MAX_NAME} letters, digits, "
            "'_', '-' and '.', and does not begin with '.'"
        )
    return name


# A hundred years: a time that every calendar can still show.
_LONGEST_TTL = 100 * 365 * 86400


def check_ttl(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is not None and not 0 < ttl_seconds <= _LONGEST_TTL:
        raise UserError(f"ttl_seconds is {ttl_seconds}; give 1 to {_LONGEST_TTL} seconds, or leave it out to keep")
    return ttl_seconds


def checkpoint_to_json(checkpoint: Checkpoint) -> dict:
    plain = {f.name: getattr(checkpoint, f.name) for f in fields(checkpoint) if f.name not in ("path", "spec")}
    path, kind = str(checkpoint.path), KINDS[checkpoint.path.kind]
    return {"format": 1, "tinker_path": path, "type": kind, **_spec_to_json(checkpoint.spec), **plain}


def checkpoint_from_json(content: dict) -> Checkpoint:
    """ValueError, KeyError or TypeError when the content is no checkpoint's; unknown keys are ignored."""
    path, spec = parse_path(content["tinker_path"]), _spec_from_json(content)
    return Checkpoint(path=path, spec=spec, **_known(Checkpoint, content))


def run_to_json(record: RunRecord) -> dict:
    plain = {f.name: getattr(record, f.name) for f in fields(record) if f.name != "spec"}
    return {**plain, **_spec_to_json(record.spec)}


def run_from_json(content: dict) -> RunRecord:
    return RunRecord(spec=_spec_from_json(content), **_known(RunRecord, content))


_NUMBERS = ("created", "size_bytes", "parameter_bytes")
_NUMBERS_OR_NONE = ("expires_at", "ttl_seconds", "seq")


def _known(kind: type, content: dict) -> dict:
    """The fields of a dataclass; TypeError or ValueError for what a hand has changed into another type."""
    names = {f.name for f in fields(kind)} - {"path", "spec"}
    known = {name: value for name, value in content.items() if name in names}
    for name, value in known.items():
        if name in _NUMBERS or (name in _NUMBERS_OR_NONE and value is not None):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name} is {value!r}, which is not a number")
        elif name in ("owner", "uid", "run_id", "source_uid") and not isinstance(value, str):
            raise TypeError(f"{name} is {value!r}, which is not text")
        elif name == "user_metadata" and not isinstance(value, dict):
            raise TypeError("user_metadata is no object")
    return known


def _spec_to_json(spec: ModelSpec) -> dict:
    return {"base_model": spec.base_model, "lora": asdict(spec.lora) if spec.lora else None}


def _spec_from_json(content: dict) -> ModelSpec:
    return ModelSpec(content["base_model"], LoraSpec(**content["lora"]) if content["lora"] else None)
