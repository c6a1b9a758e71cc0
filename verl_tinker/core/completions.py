"""Which samples of a client have ended, as a growing list that it follows with a cursor.

Owns the lists and the waiting for their growth. Does not hold results: futures do.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Set
from dataclasses import dataclass, field

from verl_tinker.core.futures import Future

# Clients of one sampler number their requests from ranges of this size.
CLIENT_RANGE = 1_000_000_000
_KEPT = 50_000
_LISTS = 10_000


@dataclass
class _List:
    """Futures in the order in which they ended; `first` is the number of those that were trimmed."""

    first: int = 0
    ended: deque[Future] = field(default_factory=deque)
    grown: asyncio.Event = field(default_factory=asyncio.Event)


class CompletionTable:
    """One list for each (sampler, client of it); the oldest lists and entries go first beyond the bounds."""

    def __init__(self):
        self._lists: OrderedDict[tuple[str, int], _List] = OrderedDict()

    def add(self, sampler_id: str, seq: int, future: Future) -> None:
        ended = self._list(sampler_id, seq // CLIENT_RANGE)
        ended.ended.append(future)
        # Of what was dropped from the store, no client can read the result any more.
        while ended.ended and (len(ended.ended) > _KEPT or ended.ended[0].is_dropped):
            ended.ended.popleft()
            ended.first += 1
        ended.grown.set()

    async def after(self, sampler_id: str, client: int, cursor: int, seconds: float) -> tuple[list[Future], int]:
        """What has ended since `cursor`, and the next cursor; waits up to `seconds` for the first.

        What lies at or before the cursor has been seen, so it is trimmed.
        """
        ended = self._list(sampler_id, client)
        end = ended.first + len(ended.ended)
        if cursor >= end and seconds > 0:
            ended.grown.clear()
            try:
                await asyncio.wait_for(ended.grown.wait(), seconds)
            except TimeoutError:
                pass
        while ended.ended and ended.first < cursor:
            ended.ended.popleft()
            ended.first += 1
        return list(ended.ended), max(cursor, ended.first + len(ended.ended))

    def forget(self, sessions: Set[str]) -> None:
        """Of samplers whose session is over nobody follows the list any more."""
        for key in [key for key in self._lists if key[0].partition(":")[0] in sessions]:
            del self._lists[key]

    def _list(self, sampler_id: str, client: int) -> _List:
        key = (sampler_id, client)
        if key not in self._lists:
            self._lists[key] = _List()
            if len(self._lists) > _LISTS:
                empty = next((known for known, ended in self._lists.items() if not ended.ended and known != key), None)
                self._lists.pop(empty or next(iter(self._lists)))
        self._lists.move_to_end(key)
        return self._lists[key]
