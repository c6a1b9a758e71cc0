"""Whose turn it is where trainer and sampler share the memory of the same GPUs.

Owns the order of turns. Does not know what a switch does: that is a coroutine which it is given.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Literal

Side = Literal["training", "sampling"]


class SideBySide:
    """No turns: each side has memory of its own."""

    @asynccontextmanager
    async def turn(self, side: Side) -> AsyncIterator[None]:
        yield


class Turns:
    """One side at a time. What was admitted finishes; a side keeps its turn until it pauses or its time is up.

    `switch(side)` makes room for a side. While nobody waits for the other side, no limit applies. Once somebody does,
    the present side is admitted for `patience_s` seconds more and keeps its turn over pauses shorter than `linger_s`,
    because a training step is several commands, each sent when the one before it has answered.
    """

    def __init__(self, switch: Callable[[Side], Awaitable[None]], side: Side,
                 patience_s: float = 10.0, linger_s: float = 0.1):
        self._switch = switch
        self.side: Side | None = side
        self.patience_s = patience_s
        self.linger_s = linger_s
        self._active = 0
        self._waiting: dict[Side, deque[asyncio.Future]] = {"training": deque(), "sampling": deque()}
        self._admissions = 0
        self._yield_at: float | None = None
        self._idle = asyncio.Event()
        self._idle.set()
        self._mediator: asyncio.Task | None = None

    @asynccontextmanager
    async def turn(self, side: Side) -> AsyncIterator[None]:
        """Holds off the other side; raises what `switch` raised if there was no way to make room."""
        if side == self.side and not self._time_is_up():
            self._admit()
        else:
            await self._wait(side)
        try:
            yield
        finally:
            self._release()

    def _time_is_up(self) -> bool:
        return self._yield_at is not None and asyncio.get_running_loop().time() >= self._yield_at

    def _admit(self) -> None:
        self._active += 1
        self._admissions += 1
        self._idle.clear()

    def _release(self) -> None:
        self._active -= 1
        if not self._active:
            self._idle.set()

    async def _wait(self, side: Side) -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._waiting[side].append(future)
        if side != self.side and self._yield_at is None:
            self._yield_at = loop.time() + self.patience_s
        if self._mediator is None or self._mediator.done():
            self._mediator = asyncio.create_task(self._mediate())
        try:
            await future
        except asyncio.CancelledError:
            if future in self._waiting[side]:
                self._waiting[side].remove(future)
            elif not future.cancelled() and future.exception() is None:
                self._release()
            raise

    async def _mediate(self) -> None:
        while (side := self._next_side()) is not None:
            if side != self.side:
                await self._until_present_side_is_done()
                self.side = None
                try:
                    await self._switch(side)
                except Exception as error:
                    self._fail(side, error)
                    continue
                self.side = side
            self._begin_turn(side)

    def _next_side(self) -> Side | None:
        """The other side before the present one, so that neither starves."""
        order: list[Side] = ["sampling", "training"] if self.side == "training" else ["training", "sampling"]
        return next((side for side in order if self._waiting[side]), None)

    async def _until_present_side_is_done(self) -> None:
        while True:
            await self._idle.wait()
            if self._time_is_up():
                return
            before = self._admissions
            await asyncio.sleep(self.linger_s)
            if self._admissions == before:
                return

    def _begin_turn(self, side: Side) -> None:
        for future in self._take(side):
            self._admit()
            future.set_result(None)
        other: Side = "sampling" if side == "training" else "training"
        waits = bool(self._waiting[other])
        self._yield_at = asyncio.get_running_loop().time() + self.patience_s if waits else None

    def _fail(self, side: Side, error: Exception) -> None:
        for future in self._take(side):
            future.set_exception(error)

    def _take(self, side: Side) -> list[asyncio.Future]:
        taken = [future for future in self._waiting[side] if not future.done()]
        self._waiting[side].clear()
        return taken
