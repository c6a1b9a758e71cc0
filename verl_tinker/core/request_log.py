"""A line in the log for each operation that ends: its id, run, weights version, and how long it waited and ran.

Owns the fields of such lines. Does not format or write them: `verl_tinker.logs` does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from verl_tinker.core.errors import EngineError
from verl_tinker.core.futures import Future
from verl_tinker.core.watch import Watcher

log = logging.getLogger("verl_tinker.requests")
FIELD = "operation"


class RequestLog(Watcher):
    """`version_of` knows the weights version of a live run, `worker_logs` the folder of the workers' own logs.

    What failed is logged as a warning or an error, a sample that succeeded for debugging only, all else as information.
    """

    def __init__(self, version_of: Callable[[str], int | None], worker_logs: Callable[[], str]):
        self._version_of = version_of
        self._worker_logs = worker_logs
        self._running: ContextVar[Future | None] = ContextVar("running", default=None)
        self._sampled: dict[str, int] = {}

    def began(self, future: Future) -> None:
        self._running.set(future)

    def engine_returned(self, name: str, arguments: tuple, result: Any) -> None:
        future = self._running.get()
        if name == "sample" and future is not None and not future.done:
            self._sampled[future.request_id] = result.version

    def settled(self, future: Future) -> None:
        began = future.settled_at if future.began_at is None else future.began_at
        fields: dict[str, Any] = {
            "request_id": future.request_id,
            "kind": future.kind,
            "run": future.model_id,
            "version": self._version(future),
            "queue_s": round(began - future.accepted_at, 4),
            "run_s": round(future.settled_at - began, 4),
        }
        if future.error is None:
            level = logging.DEBUG if future.kind == "sample" else logging.INFO
            log.log(level, "%s ended", future.kind, extra={FIELD: fields})
            return
        fields |= {"category": future.error.category, "error": str(future.error)}
        if isinstance(future.error, EngineError):
            fields["worker_logs"] = self._worker_logs()
        level = logging.WARNING if future.error.category == "user" else logging.ERROR
        log.log(level, "%s failed", future.kind, extra={FIELD: fields})

    def _version(self, future: Future) -> int | None:
        sampled = self._sampled.pop(future.request_id, None)
        return self._version_of(future.model_id) if future.model_id else sampled
