"""API keys: who calls, and what they may see.

Owns the key file and the rule of ownership. Does not read headers: `verl_tinker.api.auth` does.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import logging
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from verl_tinker.core import disk
from verl_tinker.core.errors import UserError

log = logging.getLogger(__name__)

Caller = str | None
"""The name of the caller's API key; None on a server without keys, where everybody sees everything."""

_NAME = re.compile(r"[A-Za-z0-9._@-]{1,64}")


def may_see(caller: Caller, owner: str) -> bool:
    return caller is None or caller == owner


class Keys:
    """The keys of a file: one JSON object of names and SHA-256 digests. Keys are random, so a plain digest hides them."""

    def __init__(self, file: Path):
        self._file = file
        self._seen: tuple[int, ...] | None = None
        self._digests: dict[str, bytes] = {}
        self._refresh()

    def _refresh(self) -> None:
        """Read the file when it has changed, so that a new key works at once and a removed one no more."""
        try:
            seen = _stamp(self._file)
            if seen != self._seen:
                self._digests = _read(self._file) if seen else {}
                self._seen = seen
        except (OSError, ValueError, AttributeError, TypeError) as error:
            text = (f"server.api_keys_file: {self._file} is not a key file ({error}); mend it, or move it away and make one "
                    f"with python -m verl_tinker.keys add NAME --file {self._file}")
            if self._seen is None:
                raise UserError(text) from None
            # Somebody is writing it; the keys that were good a moment ago still are.
            log.error("%s", text)

    def __len__(self) -> int:
        return len(self._digests)

    def names(self) -> list[str]:
        return sorted(self._digests)

    def caller(self, key: str) -> str | None:
        """The name of a key, None when nobody has it; takes the same time for every key."""
        self._refresh()
        digest = _digest(key)
        found = None
        for name, known in self._digests.items():
            if hmac.compare_digest(digest, known):
                found = name
        return found

    def add(self, name: str) -> str:
        """A new key of the form that clients demand; it is shown once and kept as a digest only."""
        if not _NAME.fullmatch(name):
            raise UserError(f"name {name[:80]!r}: give 1 to 64 letters, digits, '.', '_', '@' and '-'")
        with self._changing():
            if name in self._digests:
                raise UserError(f"name {name!r} has a key already; remove it first, or choose another name")
            key = f"tml-{secrets.token_urlsafe(32)}"
            self._digests[name] = _digest(key)
        return key

    def remove(self, name: str) -> None:
        with self._changing():
            if name not in self._digests:
                raise UserError(f"name {name!r} has no key; there are {', '.join(self.names()) or 'none'}")
            del self._digests[name]

    @contextmanager
    def _changing(self) -> Iterator[None]:
        """Change what the file holds by now and write it; whoever else wants to change it waits until then."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with open(self._file.with_name(f".{self._file.name}.lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._seen = None
            self._refresh()
            yield
            self._save()

    def _save(self) -> None:
        part = self._file.with_name(f".{self._file.name}.part")
        part.touch(mode=0o600)
        part.write_text(json.dumps({name: digest.hex() for name, digest in self._digests.items()}, indent=1))
        disk.sync(part)
        part.replace(self._file)
        disk.sync(self._file.parent)


def _stamp(file: Path) -> tuple[int, ...]:
    """What differs once a file was written or replaced, even twice within a tick of the clock; empty without a file."""
    try:
        found = file.stat()
    except FileNotFoundError:
        return ()
    return found.st_mtime_ns, found.st_ino, found.st_size


def _read(file: Path) -> dict[str, bytes]:
    digests = {str(name): bytes.fromhex(digest) for name, digest in json.loads(file.read_text()).items()}
    for name, digest in digests.items():
        if len(digest) != hashlib.sha256().digest_size:
            raise ValueError(f"what it has for {name} is no SHA-256 digest")
    return digests


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
