"""Memory of this machine's processes and GPUs, as the operating system and the driver tell it.

Owns the reading, and how often it is done. What lies on other machines is not seen.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass
from typing import Any

import psutil

_UNTITLED = "other"
# Reading goes through all processes of the machine, which holds up other threads for some milliseconds.
_SECONDS = 5.0


@dataclass(frozen=True)
class Memory:
    """Resident bytes of this process and of those below it by title, and number, used and whole bytes of each GPU."""

    own: int
    workers: dict[str, int]
    gpus: list[tuple[str, int, int]]


class Machine:
    """Reads the memory in a thread, and again when what it has is older than some seconds."""

    def __init__(self):
        self._read: Memory | None = None
        self._at = 0.0
        self._reading = asyncio.Lock()

    async def memory(self) -> Memory:
        async with self._reading:
            if self._read is None or time.monotonic() - self._at > _SECONDS:
                self._read = await asyncio.to_thread(lambda: Memory(own_memory(), worker_memory(), gpu_memory()))
                self._at = time.monotonic()
            return self._read


def own_memory() -> int:
    """Resident bytes of this process."""
    return psutil.Process().memory_info().rss


def worker_memory() -> dict[str, int]:
    """Resident bytes of the processes below this one, by title; Ray gives its workers the names of their classes."""
    found: dict[str, int] = {}
    for process in psutil.Process().children(recursive=True):
        try:
            title, size = _title(process), process.memory_info().rss
        except psutil.Error:
            # It has ended, or is not ours to look at.
            continue
        found[title] = found.get(title, 0) + size
    return found


def _title(process: psutil.Process) -> str:
    """The names that Ray and vLLM give to processes, without numbers; one word for all else."""
    command = process.cmdline()
    first = command[0] if command else ""
    if first.startswith("ray::"):
        return first.split(".")[0].split("(")[0].strip()
    if first.startswith("VLLM::"):
        return first.rstrip("_0123456789 ")
    return first.rsplit("/", 1)[-1] if first.endswith(("raylet", "gcs_server")) else _UNTITLED


def gpu_memory() -> list[tuple[str, int, int]]:
    """For each GPU its number, and its used and whole memory in bytes; nothing without NVIDIA's driver.

    The driver is asked, since torch would take memory of the GPU for a context of this process.
    """
    nvml = _nvml()
    if nvml is None:
        return []
    found = []
    for number in range(nvml.nvmlDeviceGetCount()):
        memory = nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(number))
        found.append((str(number), int(memory.used), int(memory.total)))
    return found


@functools.cache
def _nvml() -> Any:
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
