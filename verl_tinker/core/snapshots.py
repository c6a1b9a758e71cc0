"""Where unnamed snapshots lie: in host memory while the budget lasts, on the checkpoint disk after that.

Owns the folder in memory and its budget. Does not remove single snapshots: `verl_tinker.core.versions` does.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import shutil
from pathlib import Path

from verl_tinker.core import disk
from verl_tinker.core.store import CheckpointStore, tree_bytes

log = logging.getLogger(__name__)

HOST_MEMORY = Path("/dev/shm")
_RESERVE = 64 << 20


class Snapshots:
    """Gives each snapshot an empty folder. `budget_bytes` bounds those in memory; 0 has all of them on disk."""

    def __init__(self, checkpoints: CheckpointStore, budget_bytes: int, memory: Path = HOST_MEMORY):
        self._checkpoints = checkpoints
        self._budget = budget_bytes
        # Of one owner of the checkpoint folder, so that the next finds what a killed one left.
        owner = hashlib.blake2b(str(checkpoints.root.resolve()).encode(), digest_size=8).hexdigest()
        self._memory = memory / f"verl-tinker-{owner}"
        self.close()

    def folder(self, run_id: str) -> Path:
        """A new empty folder for the sampler weights of a run; UserError when the disk has no room for them."""
        expected = self._checkpoints.expected_bytes(run_id, "sampler_weights")
        if self._has_room(expected):
            folder = self._memory / secrets.token_hex(8)
            folder.mkdir(parents=True)
            return folder
        self._checkpoints.require_room(run_id, "sampler_weights")
        return self._checkpoints.scratch()

    def _has_room(self, expected: int) -> bool:
        if not self._budget or not self._memory.parent.is_dir():
            return False
        used = tree_bytes(self._memory) if self._memory.exists() else 0
        return used + expected <= self._budget and disk.free_bytes(self._memory.parent) > expected + _RESERVE

    def close(self) -> None:
        shutil.rmtree(self._memory, ignore_errors=True)
