"""What a server leaves behind on the machine: processes, its port, shared memory, folders.

Owns the look at them. Does not start or stop a server.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import psutil

TINY = "server.model_path=bundled:tiny"


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def folders() -> set[Path]:
    return set(Path("/tmp").glob("vt-*"))


def assert_nothing_left(processes: list[psutil.Process], url: str, memory: set[str], before: set[Path]) -> None:
    """`memory` and `before` are what there was before the server started."""
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, [p.cmdline()[:3] for p in alive]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0, "the port still answers"
    assert shared_memory() <= memory
    assert folders() <= before
