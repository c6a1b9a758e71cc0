"""Checkpoints on disk: their folders, their `meta.json`, their `tinker://` names, their lives.

Owns everything under `checkpoint_dir`; the disk is the only record, so listings survive a restart. Does not write
weights: the engine fills the folder that this module hands it.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from verl_tinker.core.errors import NotFound, UserError
from verl_tinker.core.types import LoraSpec, ModelSpec

log = logging.getLogger(__name__)

KINDS = {"weights": "training", "sampler_weights": "sampler"}
_RUN_ID = re.compile(r"[A-Za-z0-9._-]+:train:[0-9]+")
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
    """What `meta.json` says. `uid` tells apart checkpoints that bore the same path; times are seconds since 1970."""

    uid: str
    path: CheckpointPath
    spec: ModelSpec
    created: float
    seq: int | None = None
    size_bytes: int = 0
    user_metadata: dict[str, str] = field(default_factory=dict)
    ttl_seconds: int | None = None
    expires_at: float | None = None


@dataclass(frozen=True)
class RunRecord:
    """What a run leaves in its `run.json`: enough to describe it after a restart."""

    run_id: str
    spec: ModelSpec
    created: float
    user_metadata: dict[str, str]


def parse_path(text: str) -> CheckpointPath:
    parts = text.removeprefix("tinker://").split("/") if text.startswith("tinker://") else []
    if len(parts) != 3 or parts[1] not in KINDS or not _RUN_ID.fullmatch(parts[0]):
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


class CheckpointStore:
    """The folder tree `{root}/{run}/{kind}/{name}`, with hidden siblings for what is not finished.

    One server at a time owns a root.
    """

    def __init__(self, root: Path):
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)
        self._boot = self.root / ".unfinished" / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._sweep()

    # Writing

    def scratch(self) -> Path:
        """A new empty folder on the checkpoint disk: for an unnamed snapshot, or a checkpoint in the making."""
        folder = self._boot / secrets.token_hex(8)
        folder.mkdir(parents=True)
        return folder

    def admit(self, path: CheckpointPath, overwrite: bool) -> None:
        """Refuse, before any work is done, a name that `publish` would refuse."""
        if not overwrite and self._read(path) is not None:
            raise UserError(f"path: {path} exists already; choose another name, delete it, or pass overwrite=True")

    def publish(self, scratch: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Give a filled scratch folder its name. A reader sees the old content or the new, never a part."""
        checkpoint = replace(checkpoint, size_bytes=_size(scratch))
        _write_json(scratch / "meta.json", _to_json(checkpoint))
        final = self.folder(checkpoint.path)
        final.parent.mkdir(parents=True, exist_ok=True)
        aside = final.with_name(f".{final.name}.replaced")
        if final.exists():
            shutil.rmtree(aside, ignore_errors=True)
            final.rename(aside)
        scratch.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
        return checkpoint

    def record_run(self, record: RunRecord) -> None:
        folder = self._run_folder(record.run_id)
        folder.mkdir(parents=True, exist_ok=True)
        content = {
            "run_id": record.run_id,
            "created": record.created,
            "user_metadata": record.user_metadata,
            **_spec_to_json(record.spec),
        }
        _write_json(folder / "run.json", content)

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        checkpoint = self.get(path)
        check_ttl(ttl_seconds)
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        checkpoint = replace(checkpoint, ttl_seconds=ttl_seconds, expires_at=expires)
        _write_json(self.folder(path) / "meta.json", _to_json(checkpoint))

    def delete(self, path: CheckpointPath) -> None:
        self.get(path)
        self._remove(path)

    def close(self) -> None:
        shutil.rmtree(self._boot, ignore_errors=True)

    # Reading

    def folder(self, path: CheckpointPath) -> Path:
        return self._run_folder(path.run_id) / path.kind / path.name

    def get(self, path: CheckpointPath) -> Checkpoint:
        checkpoint = self._read(path)
        if checkpoint is None:
            raise NotFound(
                f"path: there is no checkpoint {path}; it was never saved, has expired or was deleted. "
                f"GET /api/v1/training_runs/{path.run_id}/checkpoints lists what there is"
            )
        return checkpoint

    def list(self, run_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of one run or of all, newest first; expired ones are removed on the way."""
        runs = [self._run_folder(run_id)] if run_id else self._run_folders()
        found = [c for run in runs for c in self._list_folder(run) if run_id in (None, c.path.run_id)]
        return sorted(found, key=lambda c: c.created, reverse=True)

    def runs(self) -> list[RunRecord]:
        """The runs that were ever created here, newest first."""
        records = [r for r in (self._read_run(folder) for folder in self._run_folders()) if r]
        return sorted(records, key=lambda r: r.created, reverse=True)

    def run(self, run_id: str) -> RunRecord | None:
        record = self._read_run(self._run_folder(run_id)) if _RUN_ID.fullmatch(run_id) else None
        return record if record and record.run_id == run_id else None

    def _run_folder(self, run_id: str) -> Path:
        # A colon breaks hub-style path handling and some file systems; meta.json keeps the true id.
        return self.root / run_id.replace(":", "_")

    def _run_folders(self) -> list[Path]:
        return [p for p in self.root.iterdir() if p.is_dir() and not p.name.startswith(".")]

    def _list_folder(self, run: Path) -> Iterator[Checkpoint]:
        for kind in KINDS:
            folder = run / kind
            for entry in folder.iterdir() if folder.is_dir() else ():
                if not entry.name.startswith("."):
                    checkpoint = self._read_folder(entry)
                    if checkpoint:
                        yield checkpoint

    def _read(self, path: CheckpointPath) -> Checkpoint | None:
        checkpoint = self._read_folder(self.folder(path))
        return checkpoint if checkpoint and checkpoint.path == path else None

    def _read_folder(self, folder: Path) -> Checkpoint | None:
        try:
            checkpoint = _from_json(json.loads((folder / "meta.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not a readable checkpoint: %s", folder, error)
            return None
        if checkpoint.expires_at is not None and checkpoint.expires_at <= time.time():
            self._remove(checkpoint.path)
            return None
        return checkpoint

    def _read_run(self, folder: Path) -> RunRecord | None:
        try:
            content = json.loads((folder / "run.json").read_text())
            return RunRecord(
                content["run_id"], _spec_from_json(content), content["created"], content["user_metadata"]
            )
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s is not a readable run: %s", folder, error)
            return None

    def _remove(self, path: CheckpointPath) -> None:
        folder = self.folder(path)
        aside = folder.with_name(f".{folder.name}.removed-{secrets.token_hex(4)}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return
        shutil.rmtree(aside, ignore_errors=True)

    def _sweep(self) -> None:
        """Undo what a killed server left: half-made folders of dead processes, half-done replacements."""
        unfinished = self.root / ".unfinished"
        for folder in unfinished.iterdir() if unfinished.is_dir() else ():
            host, pid, _ = (folder.name.rsplit("-", 2) + ["", ""])[:3]
            if host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        for aside in self.root.glob("*/*/.*"):
            final = aside.with_name(aside.name[1:].removesuffix(".replaced"))
            if aside.name.endswith(".replaced") and not final.exists():
                aside.rename(final)
            else:
                shutil.rmtree(aside, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _size(folder: Path) -> int:
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


def _write_json(target: Path, content: dict) -> None:
    part = target.with_name(f".{target.name}.part")
    part.write_text(json.dumps(content, indent=1))
    part.replace(target)


def _spec_to_json(spec: ModelSpec) -> dict:
    return {"base_model": spec.base_model, "lora": asdict(spec.lora) if spec.lora else None}


def _spec_from_json(content: dict) -> ModelSpec:
    return ModelSpec(content["base_model"], LoraSpec(**content["lora"]) if content["lora"] else None)


def _to_json(checkpoint: Checkpoint) -> dict:
    return {
        "format": 1,
        "uid": checkpoint.uid,
        "tinker_path": str(checkpoint.path),
        "type": KINDS[checkpoint.path.kind],
        **_spec_to_json(checkpoint.spec),
        "created": checkpoint.created,
        "seq": checkpoint.seq,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.user_metadata,
        "ttl_seconds": checkpoint.ttl_seconds,
        "expires_at": checkpoint.expires_at,
    }


def _from_json(content: dict) -> Checkpoint:
    return Checkpoint(
        uid=content["uid"],
        path=parse_path(content["tinker_path"]),
        spec=_spec_from_json(content),
        created=content["created"],
        seq=content["seq"],
        size_bytes=content["size_bytes"],
        user_metadata=content["user_metadata"],
        ttl_seconds=content["ttl_seconds"],
        expires_at=content["expires_at"],
    )
