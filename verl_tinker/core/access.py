"""API keys: who calls, and what they may see.

Owns the key file and the rule of ownership. Does not read headers: `verl_tinker.api.auth` does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import re
import secrets
from pathlib import Path

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
        self._read_at = -1.0
        self._refresh()

    def _refresh(self) -> None:
        """Read the file when it has changed, so that a new key works at once and a removed one no more."""
        file = self._file
        try:
            changed = file.stat().st_mtime if file.exists() else 0.0
            if changed == self._read_at:
                return
            content = json.loads(file.read_text()) if changed else {}
            digests = {str(name): bytes.fromhex(digest) for name, digest in content.items()}
            self._read_at = changed
            self._digests = digests
        except (OSError, ValueError, AttributeError, TypeError) as error:
            text = f"server.api_keys_file: {file} is not a key file ({error}); make one with python -m verl_tinker.keys add NAME"
            if self._read_at < 0:
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
        if name in self._digests:
            raise UserError(f"name {name!r} has a key already; remove it first, or choose another name")
        key = f"tml-{secrets.token_urlsafe(32)}"
        self._digests[name] = _digest(key)
        self._save()
        return key

    def remove(self, name: str) -> None:
        if name not in self._digests:
            raise UserError(f"name {name!r} has no key; there are {', '.join(self.names()) or 'none'}")
        del self._digests[name]
        self._save()

    def _save(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        part = self._file.with_name(f".{self._file.name}.part")
        part.touch(mode=0o600)
        part.write_text(json.dumps({name: digest.hex() for name, digest in self._digests.items()}, indent=1))
        part.replace(self._file)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
