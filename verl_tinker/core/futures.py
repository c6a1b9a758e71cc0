"""Futures by request id: what every accepted operation ends in, a result or an error.

Owns how long results stay readable. Does not run anything: queue and sampling settle the futures.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from verl_tinker.core.errors import NotFound, TinkerError


class Future:
    """One accepted operation. Settled once; the first result or error stands. Readable any number of times.

    `sequences`: how many sampled sequences the result will hold; each has an id from the start.
    """

    def __init__(
        self,
        kind: str,
        model_id: str | None = None,
        sequences: int = 0,
        on_settled: Callable[[Future], None] = lambda future: None,
    ):
        self.request_id = f"{kind}-{secrets.token_hex(12)}"
        self.kind = kind
        self.model_id = model_id
        self.sequence_ids = [f"{self.request_id}-{i}" for i in range(sequences)]
        self.result: Any = None
        self.error: TinkerError | None = None
        self.settled_at: float | None = None
        self._on_settled = on_settled
        self._event = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    def succeed(self, result: Any) -> None:
        if not self.done:
            self.result = result
            self._settle()

    def fail(self, error: TinkerError) -> None:
        if not self.done:
            self.error = error
            self._settle()

    def _settle(self) -> None:
        self.settled_at = time.monotonic()
        self._event.set()
        self._on_settled(self)

    async def wait(self, seconds: float) -> bool:
        """Wait until the future is settled, or for `seconds`; tells whether it is settled."""
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            pass
        return self.done


class FutureStore:
    """Every readable future. Settled ones go after `max_age_s`, or the first settled first beyond `max_count`.

    Pending ones are never dropped, so an accepted operation always has an answer.
    """

    def __init__(self, max_count: int = 20_000, max_age_s: float = 3600.0):
        self._max_count = max_count
        self._max_age_s = max_age_s
        self._pending: dict[str, Future] = {}
        self._settled: OrderedDict[str, Future] = OrderedDict()

    def create(self, kind: str, model_id: str | None = None, sequences: int = 0) -> Future:
        self._prune()
        future = Future(kind, model_id, sequences, self._move)
        self._pending[future.request_id] = future
        return future

    def get(self, request_id: str) -> Future:
        future = self._pending.get(request_id) or self._settled.get(request_id)
        if future is None:
            raise NotFound(
                f"request_id {request_id!r} is not known here: the server has restarted since, or its result was kept "
                f"for {self._max_age_s:.0f} s and dropped; submit the operation again"
            )
        return future

    def fail_pending(self, error: TinkerError) -> None:
        for future in list(self._pending.values()):
            future.fail(error)

    def __len__(self) -> int:
        return len(self._pending) + len(self._settled)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._pending or request_id in self._settled

    def _move(self, future: Future) -> None:
        self._settled[future.request_id] = self._pending.pop(future.request_id)

    def _prune(self) -> None:
        horizon = time.monotonic() - self._max_age_s
        while self._settled:
            first = next(iter(self._settled.values()))
            if first.settled_at > horizon and len(self._settled) < self._max_count:
                return
            del self._settled[first.request_id]
