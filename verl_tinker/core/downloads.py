"""Downloads: signed links to the files of a checkpoint, and all of them as one tar.

Owns how long a link holds and which files it may lead to. Does not speak HTTP: `verl_tinker.api.routes_external` does.
"""

from __future__ import annotations

import asyncio
import io
import tarfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from verl_tinker.core.checkpoints import Checkpoint, CheckpointPath
from verl_tinker.core.errors import NotFound, UserError
from verl_tinker.core.signing import Signer
from verl_tinker.core.store import CheckpointStore

LINK_SECONDS = 3600
_ARCHIVE = "archive"
_STEP = 1 << 20


@dataclass(frozen=True)
class Link:
    """What a link says beside where it leads: it holds until `expires`, in seconds since 1970."""

    expires: int
    signature: str


class Archive:
    """A tar of a checkpoint's files, made while it is read. All are opened first, so a deletion does not break it."""

    def __init__(self, files: dict[str, Path]):
        self._open = ExitStack()
        members = [(name, self._open.enter_context(file.open("rb"))) for name, file in files.items()]
        # Older SDKs take an archive without this for an incomplete one.
        self._members = [*members, ("checkpoint_complete", io.BytesIO())]
        self._headers = [_header(name, file) for name, file in self._members]
        contents = sum(_padded(_length(file)) for _, file in self._members)
        self.size_bytes = sum(map(len, self._headers)) + contents + 2 * tarfile.BLOCKSIZE

    def parts(self) -> Iterator[bytes]:
        with self._open:
            for header, (_, file) in zip(self._headers, self._members, strict=True):
                yield header
                length = _length(file)
                while part := file.read(_STEP):
                    yield part
                yield bytes(_padded(length) - length)
            yield bytes(2 * tarfile.BLOCKSIZE)


class Downloads:
    """Makes links for those who may read a checkpoint, and opens what a link leads to for whoever holds it.

    A link names the checkpoint by uid, so that it ends with the checkpoint even when another takes its name.
    """

    def __init__(self, store: CheckpointStore, signer: Signer):
        self._store = store
        self._signer = signer

    async def file_links(self, checkpoint: Checkpoint) -> dict[str, Link]:
        """A link for each file, by its name relative to the checkpoint; all expire at once."""
        if checkpoint.path.kind != "external_weights":
            raise UserError(
                f"{checkpoint.path} is not an external weights checkpoint; save one with save_weights_external and use "
                "the path it returns"
            )
        await asyncio.to_thread(self._store.intact, checkpoint)
        names, expires = await asyncio.to_thread(self._store.files, checkpoint), _end()
        return {name: self._link(checkpoint, expires, "file", name) for name in names}

    def archive_link(self, checkpoint: Checkpoint) -> Link:
        return self._link(checkpoint, _end(), _ARCHIVE)

    async def file(self, path: CheckpointPath, name: str, link: Link) -> Path:
        checkpoint = await self._opened(path, link, "file", name)
        file = (await asyncio.to_thread(self._store.files, checkpoint)).get(name)
        if file is None:
            raise NotFound(f"{path} has no file {name!r}; get_external_weights_urls lists what it has")
        return file

    async def archive(self, path: CheckpointPath, link: Link) -> Archive:
        checkpoint = await self._opened(path, link, _ARCHIVE)
        return await asyncio.to_thread(self._archive, checkpoint)

    def _archive(self, checkpoint: Checkpoint) -> Archive:
        self._store.intact(checkpoint)
        try:
            return Archive(self._store.files(checkpoint))
        except FileNotFoundError:
            raise NotFound(f"{checkpoint.path} was deleted just now") from None

    def _link(self, checkpoint: Checkpoint, expires: int, *resource: str) -> Link:
        return Link(expires, self._signer.sign(expires, checkpoint.uid, *resource))

    async def _opened(self, path: CheckpointPath, link: Link, *resource: str) -> Checkpoint:
        checkpoint = await asyncio.to_thread(self._store.get, path)
        if not self._signer.holds(link.signature, link.expires, checkpoint.uid, *resource):
            raise NotFound(
                f"this link does not open {path}: it has expired, is not whole, or was made for weights that are gone; "
                "ask for a new one"
            )
        return checkpoint


def _end() -> int:
    return int(time.time()) + LINK_SECONDS


def _header(name: str, file: BinaryIO) -> bytes:
    member = tarfile.TarInfo(name)
    member.size = _length(file)
    member.mtime = int(time.time())
    return member.tobuf(tarfile.GNU_FORMAT)


def _length(file: BinaryIO) -> int:
    length = file.seek(0, io.SEEK_END)
    file.seek(0)
    return length


def _padded(size: int) -> int:
    return -(-size // tarfile.BLOCKSIZE) * tarfile.BLOCKSIZE
