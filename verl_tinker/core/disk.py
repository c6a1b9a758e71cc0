"""Writes that a crash leaves whole or undone, and the disk's refusals in words that help.

Owns fsync, replacement in one step and the measure of free space. Does not know what a checkpoint is.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_tinker.core.errors import StorageError

log = logging.getLogger(__name__)

_MORE_ROOM = "delete checkpoints that are not needed, or set server.checkpoint_dir to a folder on a larger disk"
_ACCESS = "give the server's user the right to write there, or set server.checkpoint_dir to a folder of its own"
_REMEDIES = {
    errno.ENOSPC: _MORE_ROOM,
    errno.EDQUOT: _MORE_ROOM,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f), or use a disk that allows larger ones",
    errno.EROFS: _ACCESS,
    errno.EACCES: _ACCESS,
    errno.EPERM: _ACCESS,
    errno.EIO: "look at the health of that disk, and set server.checkpoint_dir to a folder on another",
}
# A worker's failure arrives as text; Rust (safetensors) and Python both print the number of the error.
_NUMBER = re.compile(r"\b(?:os error|Errno) (\d+)")


def free_bytes(folder: Path) -> int:
    """What an ordinary user may still write on the disk of `folder`."""
    return shutil.disk_usage(folder).free


@contextmanager
def explained(folder: Path, what: str) -> Iterator[None]:
    """Turn a refusal of the disk inside the block into one StorageError; let every other error pass."""
    try:
        yield
    except StorageError:
        raise
    except Exception as error:
        number = _refusal(error)
        if number is None:
            raise
        reason = os.strerror(number)
        log.error("%s was not written: %s in %s", what, reason, folder)
        raise StorageError(f"{what} was not written: {reason} in server.checkpoint_dir; {_REMEDIES[number]}") from error


def _refusal(error: BaseException | None) -> int | None:
    """The disk's error number behind an error, None when it was not the disk."""
    while error is not None:
        found = _NUMBER.search(str(error))
        number = error.errno if isinstance(error, OSError) else int(found[1]) if found else None
        if number in _REMEDIES:
            return number
        error = error.__cause__ or error.__context__
    return None


def write_json(target: Path, content: dict) -> None:
    """Replace a file in one step; on failure the old one stands and nothing else is left."""
    # A name of its own, so that two writers cannot mix their halves.
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        part.write_text(json.dumps(content, indent=1))
        sync(part)
        part.replace(target)
        sync(target.parent)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def sync_tree(folder: Path) -> None:
    """Put every file and folder below on the disk, what is inside before what holds it."""
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            sync(Path(parent) / name)
        sync(Path(parent))


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(folder: Path) -> None:
    """Make a folder whose name survives a crash, its parents too."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for made in missing:
        sync(made.parent)


def replace_folder(new: Path, final: Path) -> None:
    """Give a synced folder its name. `undo_half_replaced` mends what a crash between the two renames leaves."""
    aside = _aside(final)
    replaces = final.exists()
    if replaces:
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    try:
        new.rename(final)
    except BaseException:
        if replaces:
            aside.rename(final)
        raise
    sync(final.parent)
    shutil.rmtree(aside, ignore_errors=True)


def undo_half_replaced(folder: Path) -> None:
    """Put the old folders back whose replacement has not come, and remove every other hidden leftover."""
    for aside in folder.glob(".*"):
        final = aside.with_name(aside.name[1:].removesuffix(".replaced"))
        if aside == _aside(final) and not final.exists():
            aside.rename(final)
        elif aside.is_dir():
            shutil.rmtree(aside, ignore_errors=True)
        else:
            aside.unlink(missing_ok=True)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")
