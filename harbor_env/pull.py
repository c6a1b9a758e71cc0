"""The pull runner: takes an agent's requests out of a sandbox, has them answered, and brings the answers back.

Owns which requests are answered, and when an answer is sent again. Does not know what an answer is made of.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from harbor_env.errors import AgentSilent, RockUnreachable
from harbor_env.model_service import Fetched

log = logging.getLogger(__name__)
Answerer = Callable[[int, dict], Awaitable[dict]]


class Channel(Protocol):
    async def fetch(self, offset: int, seconds: float) -> Fetched: ...

    async def deliver(self, index: int, body: dict, again: bool = False) -> str: ...

    async def check(self) -> None: ...


@dataclass(frozen=True)
class Patience:
    """Seconds: how long one look waits, an agent may be silent, ROCK may be away, and until an answer is sent again."""

    look: float = 20.0
    silence: float = 1800.0
    outage: float = 60.0
    resend: float = 15.0
    resends: int = 5


@dataclass
class PullRunner:
    """Answers the requests of one sandbox until the agent has ended.

    Requests are known by their index, so a new runner goes on where another stopped: what was answered stays so.
    """

    channel: Channel
    answer: Answerer
    patience: Patience = field(default_factory=Patience)
    answered: int = 0

    async def run(self, ended: asyncio.Event) -> int:
        """Until `ended`, or the service says so; the number of answers given. Raises the first EpisodeError of any part."""
        self._working: dict[int, asyncio.Task] = {}
        self._bodies: dict[str, asyncio.Task] = {}
        self._last: tuple[int, dict] | None = None
        self._since = time.monotonic()
        stop = asyncio.create_task(ended.wait())
        look = asyncio.create_task(self._look(0))
        try:
            while True:
                await asyncio.wait({stop, look, *self._working.values()}, return_when=asyncio.FIRST_COMPLETED,
                                   timeout=self._until_resend())
                self._collect()
                if look.done():
                    seen = look.result()
                    self._begin(seen)
                    look = asyncio.create_task(self._look(seen.offset))
                    if seen.ended:
                        return self.answered
                if stop.done():
                    return self.answered
                await self._remind()
        finally:
            tasks = [stop, look, *self._working.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _look(self, offset: int) -> Fetched:
        seen = await self._through(lambda: self.channel.fetch(offset, self.patience.look))
        if not seen.requests and not seen.ended:
            await self._through(self.channel.check)
        return seen

    async def _through(self, call):
        """A call that may be repeated, over a ROCK that is away for a while."""
        began, pause = time.monotonic(), 0.5
        while True:
            try:
                return await call()
            except RockUnreachable as error:
                if time.monotonic() - began > self.patience.outage:
                    raise
                log.warning("ROCK is away: %s", error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)

    def _begin(self, seen: Fetched) -> None:
        if seen.requests:
            self._last, self._since = None, time.monotonic()
        for index, body in seen.requests.items():
            if index not in seen.answered and index not in self._working:
                self._working[index] = asyncio.create_task(self._serve(index, body))

    async def _serve(self, index: int, body: dict) -> None:
        """An agent that gave up waiting asks the same again; while the first is being answered, both get its answer."""
        key = json.dumps(body, sort_keys=True)
        task = self._bodies.get(key)
        if task is None:
            task = self._bodies[key] = asyncio.create_task(self.answer(index, body))
            task.add_done_callback(lambda _: self._bodies.pop(key, None))
        try:
            response = await asyncio.shield(task)
        except asyncio.CancelledError:
            task.cancel()
            raise
        self.answered += 1
        await self._through(lambda: self.channel.deliver(index, response))
        self._last, self._since, self._sent = (index, response), time.monotonic(), 1

    def _collect(self) -> None:
        for index in [index for index, task in self._working.items() if task.done()]:
            self._working.pop(index).result()

    def _until_resend(self) -> float | None:
        if self._working:
            return None
        limit = self._since + (self._wait() if self._last else self.patience.silence)
        return max(0.0, min(limit, self._since + self.patience.silence) - time.monotonic())

    def _wait(self) -> float:
        return self.patience.resend * (2 ** (self._sent - 1) if self._sent <= self.patience.resends else 1e9)

    async def _remind(self) -> None:
        """Nothing new since the last answer: it may be lost, for the service can read over a line that is half written."""
        if self._working:
            return
        silent = time.monotonic() - self._since
        if silent >= self.patience.silence:
            raise AgentSilent(f"the agent neither asked nor ended for {silent:.0f} s after {self.answered} answers")
        if self._last and silent >= self._wait():
            index, response = self._last
            self._sent += 1
            await self._through(lambda: self.channel.deliver(index, response, again=True))

