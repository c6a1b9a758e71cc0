"""Checkpoints on disk: their folders, their lives, and the room for them.

Owns everything under `checkpoint_dir`; the disk is the only record, so listings survive a restart. Does not write
weights: the engine fills the folder that this module hands it.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from verl_tinker.core import disk
from verl_tinker.core.access import Caller, may_see
from verl_tinker.core.checkpoints import (
    KINDS,
    RUN_ID,
    Checkpoint,
    CheckpointPath,
    RunRecord,
    check_ttl,
    checkpoint_from_json,
    checkpoint_to_json,
    run_from_json,
    run_to_json,
)
from verl_tinker.core.errors import NotFound, StorageError, UserError

log = logging.getLogger(__name__)

META = "meta.json"
# A training checkpoint holds AdamW's two moments beside the parameters.
_COPIES = {"weights": 3, "sampler_weights": 1, "external_weights": 1}
# What must stay free beside a checkpoint: for the small files that every step writes.
_RESERVE = 16 << 20


class CheckpointStore:
    """The folder tree `{root}/{run}/{kind}/{name}`, with hidden siblings for what is not finished.

    One server at a time owns a root; `recover` False is for a visitor beside it, who must not tidy up its work.
    `keep_last` is how many checkpoints of a kind a run keeps; 0 keeps all. See `surplus`.
    """

    def __init__(self, root: Path, *, keep_last: int = 0, recover: bool = True):
        self.root = Path(root)
        self.keep_last = keep_last
        disk.make_folder(self.root)
        # Readers must not look between the two renames of a replacement, nor a change be made from what has changed since.
        self._renaming, self._changing = threading.Lock(), threading.Lock()
        self._boot = self.root / ".unfinished" / f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        if recover:
            self._recover()

    # Writing

    def scratch(self) -> Path:
        """A new empty folder on the checkpoint disk: for an unnamed snapshot, or a checkpoint in the making."""
        folder = self._boot / secrets.token_hex(8)
        with disk.explained(self.root, "a new checkpoint"):
            folder.mkdir(parents=True)
        return folder

    def admit(self, path: CheckpointPath, overwrite: bool) -> None:
        """Refuse, before any work is done, a name that is taken or a save that the disk has no room for."""
        if not overwrite and self._read(path) is not None:
            raise UserError(f"path: {path} exists already; choose another name, delete it, or pass overwrite=True")
        if not overwrite and self.folder(path).exists() and self._read_folder(self.folder(path)) is None:
            raise UserError(
                f"path: {path} exists and its {META} cannot be read; mend it, choose another name, or pass overwrite=True"
            )
        self.require_room(path.run_id, path.kind)

    def require_room(self, run_id: str, kind: str) -> None:
        self.require_bytes(self.expected_bytes(run_id, kind), f"saving {kind} of {run_id}")

    def require_bytes(self, size: int, what: str) -> None:
        """Refuse what the disk has no room for, before the first byte of it is written."""
        needed, free = size + _RESERVE, disk.free_bytes(self.root)
        if free < needed:
            raise UserError(
                f"the disk of server.checkpoint_dir has {free} bytes free and {what} needs {needed}; delete checkpoints "
                "that are not needed, or have the server use a larger disk"
            )

    def publish(self, scratch: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Give a filled scratch folder its name. A reader or a crash meets the old content or the new, never a part."""
        with disk.explained(self.root, str(checkpoint.path)):
            checkpoint = replace(checkpoint, size_bytes=tree_bytes(scratch))
            disk.write_json(scratch / META, checkpoint_to_json(checkpoint))
            disk.sync_tree(scratch)
            final = self.folder(checkpoint.path)
            disk.make_folder(final.parent)
            with self._renaming:
                disk.replace_folder(scratch, final)
        return checkpoint

    def link_files(self, source: Checkpoint, scratch: Path) -> None:
        """Fill a scratch folder with a checkpoint's files, which share the disk with the source where it can be."""
        what = f"a copy of {source.path}"
        self.intact(source)
        self.require_bytes(0, what)
        with disk.explained(self.root, what):
            for name, file in self.files(source).items():
                target = scratch / name
                target.parent.mkdir(parents=True, exist_ok=True)
                if not _linked(file, target):
                    self.require_bytes(file.stat().st_size, what)
                    shutil.copyfile(file, target)

    def record_run(self, record: RunRecord) -> None:
        folder = self._run_folder(record.run_id)
        is_new = not folder.exists()
        try:
            with disk.explained(self.root, f"the record of {record.run_id}"):
                disk.make_folder(folder)
                disk.write_json(folder / "run.json", run_to_json(record))
        except BaseException:
            if is_new:
                shutil.rmtree(folder, ignore_errors=True)
            raise

    def set_ttl(self, path: CheckpointPath, ttl_seconds: int | None) -> None:
        check_ttl(ttl_seconds)
        expires = None if ttl_seconds is None else time.time() + ttl_seconds
        self._amend(path, ttl_seconds=ttl_seconds, expires_at=expires)

    def set_public(self, path: CheckpointPath, public: bool) -> None:
        self._amend(path, public=public)

    def _amend(self, path: CheckpointPath, **changes: object) -> None:
        with self._changing, disk.explained(self.root, f"the change of {path}"):
            checkpoint = replace(self.get(path), **changes)
            disk.write_json(self.folder(path) / META, checkpoint_to_json(checkpoint))

    # Removing

    def delete(self, path: CheckpointPath) -> None:
        """Free the disk now; the name is gone even when the disk then refuses to let go of a file."""
        self.get(path)
        self._remove(path)

    def sweep_expired(self) -> list[Checkpoint]:
        """Remove every checkpoint whose time is over, and tell which."""
        now = time.time()
        expired = [c for run in self._run_folders() for c in self._list_folder(run) if c.expired(now)]
        for checkpoint in expired:
            self._remove(checkpoint.path)
        return expired

    def surplus(self, run_id: str, kind: str) -> list[Checkpoint]:
        """The run's checkpoints of a kind that are older than its newest `keep_last`.

        Published ones and those with a time to live are not counted and stay: somebody decided how long they live.
        """
        if not self.keep_last:
            return []
        found = [c for c in self.list(run_id) if c.path.kind == kind and not c.public and c.expires_at is None]
        return found[self.keep_last :]

    def close(self) -> None:
        shutil.rmtree(self._boot, ignore_errors=True)

    # Reading

    def folder(self, path: CheckpointPath) -> Path:
        return self._run_folder(path.run_id) / path.kind / path.name

    def intact(self, checkpoint: Checkpoint) -> Path:
        """The folder of a checkpoint to read all of; StorageError when a file of it is missing or cut short."""
        folder = self.folder(checkpoint.path)
        held = tree_bytes(folder) - _size_of(folder / META)
        if held < checkpoint.size_bytes:
            raise StorageError(
                f"path: {checkpoint.path} is damaged: {checkpoint.size_bytes} bytes were saved and {held} are left; put its "
                "files back, or use another checkpoint"
            )
        return folder

    def get(self, path: CheckpointPath, reader: Caller = None) -> Checkpoint:
        """The checkpoint of a path, if `reader` may read it: its owner may, and everybody once it is public."""
        checkpoint = self._read(path)
        if checkpoint is None or not (checkpoint.public or may_see(reader, checkpoint.owner)):
            raise NotFound(
                f"path: there is no checkpoint {path}; it was never saved, has expired or was deleted. "
                f"GET /api/v1/training_runs/{path.run_id}/checkpoints lists what there is"
            )
        return checkpoint

    def files(self, checkpoint: Checkpoint) -> dict[str, Path]:
        """What the engine wrote, by its name relative to the checkpoint's folder."""
        folder = self.folder(checkpoint.path)
        found = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        return {name: file for name, file in found.items() if name != META and not file.name.startswith(".")}

    def list(self, run_id: str | None = None) -> list[Checkpoint]:
        """The checkpoints of one run or of all, newest first."""
        now = time.time()
        runs = [self._run_folder(run_id)] if run_id else self._run_folders()
        found = [c for run in runs for c in self._list_folder(run) if run_id in (None, c.path.run_id)]
        return sorted((c for c in found if not c.expired(now)), key=lambda c: c.created, reverse=True)

    def runs(self) -> list[RunRecord]:
        """The runs that were ever created here, newest first."""
        records = [r for r in (self._read_run(folder) for folder in self._run_folders()) if r]
        return sorted(records, key=lambda r: r.created, reverse=True)

    def run(self, run_id: str) -> RunRecord | None:
        record = self._read_run(self._run_folder(run_id)) if RUN_ID.fullmatch(run_id) else None
        return record if record and record.run_id == run_id else None

    def expected_bytes(self, run_id: str, kind: str) -> int:
        """What the next save takes: as much as the last of its kind, or as the parameters say if that is more."""
        record = self.run(run_id)
        by_parameters = record.parameter_bytes * _COPIES[kind] if record else 0
        return max(by_parameters, next((c.size_bytes for c in self.list(run_id) if c.path.kind == kind), 0))

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
        return checkpoint if checkpoint and checkpoint.path == path and not checkpoint.expired(time.time()) else None

    def _read_folder(self, folder: Path) -> Checkpoint | None:
        try:
            with self._renaming:
                text = (folder / META).read_text()
            checkpoint = checkpoint_from_json(json.loads(text))
            if self.folder(checkpoint.path) != folder:
                # A copy made by hand: what is done to its path would be done to the original.
                raise ValueError(f"it says that it is {checkpoint.path}, which lies elsewhere")
            return checkpoint
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, UserError) as error:
            log.warning("%s is not a readable checkpoint: %s", folder, error)
            return None

    def _read_run(self, folder: Path) -> RunRecord | None:
        try:
            return run_from_json(json.loads((folder / "run.json").read_text()))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s is not a readable run: %s", folder, error)
            return None

    def _remove(self, path: CheckpointPath) -> None:
        folder = self.folder(path)
        aside = folder.with_name(f".{folder.name}.removed-{secrets.token_hex(4)}")
        with suppress(FileNotFoundError), disk.explained(self.root, f"the removal of {path}"):
            folder.rename(aside)
            disk.sync(folder.parent)
            shutil.rmtree(aside)

    def _recover(self) -> None:
        """Undo what a killed server left: half-made folders of dead processes, half-done replacements."""
        unfinished = self.root / ".unfinished"
        for folder in unfinished.iterdir() if unfinished.is_dir() else ():
            host, pid, _ = (folder.name.rsplit("-", 2) + ["", ""])[:3]
            if host == socket.gethostname() and pid.isdigit() and not _alive(int(pid)):
                shutil.rmtree(folder, ignore_errors=True)
        for run in self._run_folders():
            for folder in (run, *(run / kind for kind in KINDS)):
                disk.undo_half_replaced(folder)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _linked(file: Path, target: Path) -> bool:
    """Not every file system has hard links."""
    try:
        os.link(file, target)
    except OSError:
        return False
    return True


def tree_bytes(folder: Path) -> int:
    """The size of a folder's files together."""
    return sum(_size_of(p) for p in folder.rglob("*") if p.is_file())


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:
        # A change of the checkpoint's description replaces files meanwhile.
        return 0
