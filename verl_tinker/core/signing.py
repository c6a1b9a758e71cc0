"""Signed links: what lets a plain HTTP client fetch one file for a while without a key.

Owns the secret of a checkpoint folder and the form of a signature. Does not know what a link leads to.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import time
from pathlib import Path

from verl_tinker.core import disk

_FILE = ".link-secret"


class Signer:
    """HMAC-SHA256 over the words of a resource and its end. One secret a folder, so that links outlive the server."""

    def __init__(self, root: Path):
        self._secret = _read_or_make(Path(root) / _FILE)

    def sign(self, expires: int, *resource: str) -> str:
        """`expires`: seconds since 1970."""
        return hmac.new(self._secret, "\n".join((str(expires), *resource)).encode(), hashlib.sha256).hexdigest()

    def holds(self, signature: str, expires: int, *resource: str) -> bool:
        """Whether the signature is ours, for this resource, and not expired."""
        expected = self.sign(expires, *resource)
        return hmac.compare_digest(signature.encode(), expected.encode()) and time.time() < expires


def _read_or_make(file: Path) -> bytes:
    # An empty one would sign every link with a key that anybody knows.
    if not file.exists() or file.stat().st_size < 32:
        part = file.with_name(f"{file.name}.{secrets.token_hex(4)}")
        # The mode is given at creation: set afterwards, others could read the file for a moment.
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(secrets.token_bytes(32))
        disk.sync(part)
        part.replace(file)
        disk.sync(file.parent)
    return file.read_bytes()
