"""Whose turn it is: owners take turns, and within an owner its models or samplers.

Owns the order of waiting things. Does not know what they are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Generic, TypeVar

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """First in, first out for each (owner, line); lines of an owner take turns, and so do owners."""

    def __init__(self):
        self._owners: OrderedDict[str, OrderedDict[str, deque[Item]]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def push(self, owner: str, line: str, item: Item) -> None:
        self._owners.setdefault(owner, OrderedDict()).setdefault(line, deque()).append(item)
        self._size += 1

    def pop(self) -> Item:
        """The next item; IndexError when there is none."""
        if not self._size:
            raise IndexError("empty")
        owner, lines = self._owners.popitem(last=False)
        line, items = lines.popitem(last=False)
        item = items.popleft()
        self._size -= 1
        # Both go to the end of their lines, so that the others have their turn first.
        if items:
            lines[line] = items
        if lines:
            self._owners[owner] = lines
        return item


class FairSlots:
    """A semaphore of `limit` whose waiters are served fairly."""

    def __init__(self, limit: int):
        self._free = limit
        self._waiters: FairQueue[asyncio.Future] = FairQueue()

    @asynccontextmanager
    async def slot(self, owner: str, line: str) -> AsyncIterator[None]:
        await self._take(owner, line)
        try:
            yield
        finally:
            self._give()

    async def _take(self, owner: str, line: str) -> None:
        if self._free > 0:
            self._free -= 1
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.push(owner, line, waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if waiter.done() and not waiter.cancelled():
                self._give()
            raise

    def _give(self) -> None:
        while self._waiters:
            waiter = self._waiters.pop()
            if not waiter.done():
                waiter.set_result(None)
                return
        self._free += 1
