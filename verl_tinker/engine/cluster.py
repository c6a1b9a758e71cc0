"""Starts or joins Ray, and leaves it as it was found.

Owns the Ray connection of this process. Does not place workers: `trainer` and `sampler` do.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import threading
import uuid
from contextlib import suppress
from pathlib import Path
from typing import IO

import ray

_TEMP, _PREFIX = Path("/tmp"), "vt-"


class Cluster:
    """A Ray of our own on this machine (loopback, own folder), or one that RAY_ADDRESS names. `scratch` ends with the server.

    `logical_gpus` None leaves the count to Ray; a number lets placement for GPUs run where there are none.
    """

    def __init__(self, address: str | None, scratch: Path, logical_gpus: int | None = None, logical_cpus: int = 16):
        self.address = address
        self.scratch = scratch
        self.logical_gpus = logical_gpus
        self.logical_cpus = logical_cpus
        self._folder: Path | None = None
        self._busy = threading.Lock()

    def start(self) -> None:
        # A stop may come meanwhile, from another thread; it has to wait, for Ray cannot be left half way in.
        with self._busy:
            self._start()

    def _start(self) -> None:
        if self.address:
            ray.init(address=self.address, log_to_driver=False, configure_logging=False)
            return
        _remove_folders_of_dead_servers()
        # Ray puts sockets below this folder, whose path may not exceed 107 bytes.
        self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=_TEMP))
        self._lock = _locked(self._folder)
        # Without an explicit address Ray joins whatever cluster it finds on the host.
        ray.init(
            address="local",
            num_cpus=self.logical_cpus,
            num_gpus=self.logical_gpus,
            include_dashboard=False,
            _temp_dir=str(self._folder),
            object_store_memory=512 * 2**20,
            log_to_driver=os.environ.get("VERL_TINKER_WORKER_LOGS") == "1",
            configure_logging=False,
        )

    def logs(self) -> str:
        """Where the workers' logs are."""
        return str((self._folder / "session_latest" / "logs") if self._folder else "the Ray cluster's log folder")

    def rendezvous_file(self) -> str:
        """A path that no worker group has used before."""
        return str(self.scratch / f"rendezvous-{uuid.uuid4().hex}")

    def stop(self) -> None:
        with self._busy:
            self._stop()

    def _stop(self) -> None:
        if ray.is_initialized():
            ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.close()
            self._folder = None


def _locked(folder: Path) -> IO:
    """A lock that the system lets go when its owner ends, however it ends; BlockingIOError when it has an owner."""
    lock = open(folder / "lock", "a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise
    return lock


def _remove_folders_of_dead_servers() -> None:
    """A server that was killed could not remove its own."""
    for file in _TEMP.glob(f"{_PREFIX}*/lock"):
        with suppress(OSError), _locked(file.parent):
            shutil.rmtree(file.parent, ignore_errors=True)
