"""age encryption of exported weights, to the recipients that a client names.

Owns the check of recipients and the `.age` files. Does not keep a key: only the recipients can read what it writes.
"""

from __future__ import annotations

from pathlib import Path

import pyrage

from verl_tinker.core.errors import UserError

SUFFIX = ".age"
_MOST = 10


def check_recipients(recipients: list[str]) -> list[pyrage.x25519.Recipient | pyrage.ssh.Recipient]:
    if len(recipients) > _MOST:
        raise UserError(f"age_encryption_recipients has {len(recipients)} entries; give at most {_MOST}")
    return [_recipient(index, text.strip()) for index, text in enumerate(recipients)]


def encrypt_files(folder: Path, recipients: list[pyrage.x25519.Recipient | pyrage.ssh.Recipient]) -> None:
    """Replace every file below by its encrypted form, whose name ends in `.age`."""
    for file in [p for p in folder.rglob("*") if p.is_file()]:
        pyrage.encrypt_file(str(file), f"{file}{SUFFIX}", recipients)
        file.unlink()


def _recipient(index: int, text: str) -> pyrage.x25519.Recipient | pyrage.ssh.Recipient:
    kind = pyrage.x25519 if text.startswith("age1") else pyrage.ssh
    try:
        return kind.Recipient.from_str(text)
    except pyrage.RecipientError as error:
        raise UserError(
            f"age_encryption_recipients[{index}] is not a recipient ({error}); give a native age1... key or an SSH "
            "public key"
        ) from None
