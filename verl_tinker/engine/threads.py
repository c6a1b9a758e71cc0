"""The threads in which Ray is started and called.

Owns them, and that none outlives its cluster. Does not bound waits: `waiting` does.

Ray numbers tasks by thread, and the thread that starts a cluster has a fixed number. A thread that started an earlier cluster
in this process still has it, so two of them would give two tasks one id, at which Ray ends the process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

# Trainer calls come one at a time; the others are its ping, and looks at the cluster.
_COUNT = 8


class Threads:
    def __init__(self):
        self._pool = ThreadPoolExecutor(_COUNT, "ray")

    def renew(self) -> None:
        """From here on calls run in new threads; those that are still busy end by themselves."""
        self._pool.shutdown(wait=False)
        self._pool = ThreadPoolExecutor(_COUNT, "ray")

    def run(self, function: Callable[..., Any], *args: Any) -> Awaitable[Any]:
        return asyncio.get_running_loop().run_in_executor(self._pool, function, *args)
