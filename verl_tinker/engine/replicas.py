"""The servers that hold the same weights: one is chosen for each request, and one that dies is replaced.

Owns which of them live and how many requests each has. Does not know models or versions: `sampler` and `teachers` do.
"""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from verl_tinker.core.errors import EngineError, TinkerError, Unresponsive, WorkerDied
from verl_tinker.core.types import Drawn, SampleRequest, SampleResult
from verl_tinker.engine.waiting import answer_of

if TYPE_CHECKING:
    import ray
    from verl.workers.rollout.replica import RolloutReplica

log = logging.getLogger(__name__)

# Told of tokens as they are drawn.
Seen = Callable[[Drawn], None] | None

# A request that ends a replica is tried on one more, not on all of them.
_ATTEMPTS = 2
# A replica that dies more often than this is not started again: something is wrong with the machine or the preset.
_MOST_DEATHS, _DEATHS_WINDOW_S = 3, 1800.0
# A request leaves the replica of its session, which has its prefix, once that has so many more to do than another.
_SLACK = 8
_PING_S = 60.0
_SETTLE_S = 1.0


@dataclass(frozen=True)
class Launch:
    """How a replica comes up. `restore` brings a new one to what the others hold; it may ask that replica alone."""

    build: Callable[[int], RolloutReplica]
    start: Callable[[RolloutReplica], Awaitable[None]]
    restore: Callable[[Replicas, int], Awaitable[None]]


@dataclass(eq=False)
class _Place:
    rank: int
    replica: RolloutReplica | None = None
    in_flight: int = 0
    deaths: list[float] = field(default_factory=list)
    replacement: asyncio.Task | None = None


class Told:
    """Passes on what is drawn, each token once, whatever the number of attempts."""

    def __init__(self, seen: Callable[[Drawn], None]):
        self._seen = seen
        self._told: Counter[int] = Counter()
        self._drawn: Counter[int] = Counter()

    async def all_of(self, parts: ray.ObjectRefGenerator) -> SampleResult:
        """What the last of the parts is; the others are what was drawn before."""
        self._drawn.clear()
        async for reference in parts:
            part = await reference
            if isinstance(part, SampleResult):
                return part
            old = max(0, self._told[part.index] - self._drawn[part.index])
            self._drawn[part.index] += len(part.tokens)
            if old < len(part.tokens):
                self._told[part.index] = self._drawn[part.index]
                self._seen(part if not old else part.after(old))
        raise EngineError("the sampler ended without a result")

    def again(self, request: SampleRequest) -> bool:
        """May another attempt go on where this one ended?"""
        return not self._told or request.params.seed is not None or request.params.temperature == 0


class Replicas:
    """`who` names them in errors. With `replaces` False the first death is left to `check`, which raises it."""

    def __init__(self, who: str, count: int, launch: Launch, timeout_s: float, start_timeout_s: float, replaces: bool = True):
        self.who = who
        self.launch = launch
        self.timeout_s = timeout_s
        self.start_timeout_s = start_timeout_s
        self.replaces = replaces
        self.places = [_Place(rank) for rank in range(count)]
        self.failure: TinkerError | None = None
        # Held while what all replicas hold changes, so that a new one misses nothing.
        self.changing = asyncio.Lock()

    async def start(self) -> None:
        await asyncio.gather(*(self._start(place) for place in self.places))

    async def _start(self, place: _Place) -> None:
        replica = self.launch.build(place.rank)
        try:
            await answer_of(self._name(place), "start", self.launch.start(replica), self.start_timeout_s)
        except BaseException:
            with suppress(Exception):
                await replica.close()
            raise
        place.replica = replica

    @property
    def ranks(self) -> list[int]:
        """Those that live."""
        return [place.rank for place in self.places if place.replica is not None]

    async def generate(self, request: SampleRequest, version: int, seen: Seen = None) -> SampleResult:
        """From the replica of the request's session or one with less to do; from another when that one dies.

        Not where `seen` was told of tokens that a second attempt would not draw again.
        """
        error: TinkerError | None = None
        told = None if seen is None else Told(seen)
        for _ in range(_ATTEMPTS):
            place = await self._chosen(request.affinity)
            place.in_flight += 1
            try:
                return await self._ask(place, "sample", request, version, told=told)
            except WorkerDied as death:
                error = death
                if told is not None and not told.again(request):
                    break
                # What killed this one may have killed others, which takes a moment to show, and those are no attempts.
                await asyncio.sleep(_SETTLE_S)
                with suppress(TinkerError):
                    await self.check()
            finally:
                place.in_flight -= 1
        raise error

    async def _chosen(self, affinity: str) -> _Place:
        while not self.ranks:
            starting = [place.replacement for place in self.places if place.replacement is not None]
            if self.failure is not None or not starting:
                raise self.failure or EngineError(f"{self.who} is not running")
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)
        live = [place for place in self.places if place.replica is not None]
        least = min(live, key=lambda place: place.in_flight)
        mine = self.places[zlib.crc32(affinity.encode()) % len(self.places)] if affinity else least
        return mine if mine in live and mine.in_flight < least.in_flight + _SLACK else least

    async def ask(self, rank: int, method: str, *args) -> Any:
        return await self._ask(self.places[rank], method, *args)

    async def ask_all(self, method: str, *args) -> list[Any]:
        """Every living replica's answer. One that dies meanwhile is left out; the first error of another kind is raised
        when all have answered."""
        live = [place for place in self.places if place.replica is not None]
        answers = await asyncio.gather(*(self._ask(place, method, *args) for place in live), return_exceptions=True)
        errors = [a for a in answers if isinstance(a, BaseException) and not (self.replaces and isinstance(a, WorkerDied))]
        if errors:
            raise errors[0]
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    async def each(self, method: str) -> None:
        """A method of verl's replicas themselves, on all."""
        await asyncio.gather(*(answer_of(self._name(place), method, getattr(place.replica, method)(), self.timeout_s)
                               for place in self.places if place.replica is not None))

    async def check(self) -> None:
        """Raise what no replacement can mend."""
        live = [place for place in self.places if place.replica is not None]
        answers = await asyncio.gather(*(self._ask(place, "ping", limit=_PING_S) for place in live), return_exceptions=True)
        if self.failure is not None:
            raise self.failure
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, WorkerDied | Unresponsive):
                raise answer

    async def _ask(self, place: _Place, method: str, *args, limit: float | None = None, told: Told | None = None) -> Any:
        replica = place.replica
        if replica is None:
            raise WorkerDied(f"{self._name(place)} is being started again")
        try:
            answer = (getattr(replica.server_handle, method).remote(*args) if told is None
                      else told.all_of(replica.server_handle.sample_seen.options(num_returns="streaming").remote(*args)))
            return await answer_of(self._name(place), method, answer, limit or self.timeout_s)
        except WorkerDied as error:
            self._lost(place, replica, error)
            raise
        except Unresponsive as error:
            if method == "ping":
                self._lost(place, replica, error)
            raise

    def _name(self, place: _Place) -> str:
        return self.who if len(self.places) == 1 else f"{self.who}, replica {place.rank}"

    def _lost(self, place: _Place, replica: RolloutReplica, error: TinkerError) -> None:
        if place.replica is not replica:
            return
        place.replica = None
        now = time.monotonic()
        place.deaths = [at for at in place.deaths if now - at < _DEATHS_WINDOW_S] + [now]
        if not self.replaces or len(place.deaths) > _MOST_DEATHS:
            self.failure = error
            return
        log.error("%s; it is started again", error)
        place.replacement = asyncio.create_task(self._replace(place, replica))

    async def _replace(self, place: _Place, dead: RolloutReplica) -> None:
        try:
            with suppress(Exception):
                await dead.close()
            await self._start_restored(place)
            log.info("%s answers again", self._name(place))
        except Exception as error:
            place.replica = None
            self.failure = error if isinstance(error, TinkerError) else EngineError(f"{self.who}: {error!r}")
            log.error("%s could not be started again: %s", self._name(place), error)

    async def _start_restored(self, place: _Place) -> None:
        fresh = _Place(place.rank)
        await self._start(fresh)
        async with self.changing:
            place.replica = fresh.replica
            # Nobody else may choose it before it holds what the others hold.
            place.in_flight += 1 << 30
            try:
                await self.launch.restore(self, place.rank)
            except BaseException:
                with suppress(Exception):
                    await fresh.replica.close()
                raise
            finally:
                place.in_flight -= 1 << 30

    async def close(self) -> None:
        replacements = [place.replacement for place in self.places if place.replacement is not None]
        for replacement in replacements:
            replacement.cancel()
        await asyncio.gather(*replacements, return_exceptions=True)
        live = [place.replica for place in self.places if place.replica is not None]
        await asyncio.gather(*(replica.close() for replica in live), return_exceptions=True)
        for place in self.places:
            place.replica = None
