"""The command log: one line per model, one consumer for all, one entry per (model, seq).

Owns the order and the identity of training commands. Does not know what a command does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass, field
from typing import Any

from verl_tinker.core.errors import EngineError, StorageError, TinkerError, UserError
from verl_tinker.core.fair import FairQueue
from verl_tinker.core.futures import Future, FutureStore
from verl_tinker.core.journal import CommandRecord, Journal, Outcome
from verl_tinker.core.planner import Entry, Planner

log = logging.getLogger(__name__)

# How long a chunk waits for another of its call that does not come. A client sends all of them within a moment.
GAP_SECONDS = 2.0
_LONGEST_GAP = 5
# Clients repeat a call for some minutes; older numbers are looked up in the journal.
_REMEMBERED = 4096

Action = Callable[[], Awaitable[Any]]


@dataclass(frozen=True)
class Chunk:
    """A part of one forward_backward. Chunks with the same `key` run as one: `run` gives, for each content, a result or
    the error that it deserves. `tokens` tells how much work it is."""

    key: Hashable
    content: Any
    run: Callable[[list[Any]], Awaitable[list[Any]]]
    tokens: int = 0


@dataclass(frozen=True)
class _Command:
    future: Future
    work: Action | Chunk


@dataclass
class _Log:
    """One model's commands: the planner's, the units that may run, and the futures of the newest seqs."""

    model_id: str
    owner: str
    planner: Planner[_Command] = field(default_factory=Planner)
    ready: deque[list[_Command]] = field(default_factory=deque)
    futures: dict[int, Future] = field(default_factory=dict)
    has_forgotten: bool = False
    running: str = ""
    in_turn: bool = False
    gap: asyncio.TimerHandle | None = None
    gap_since: float | None = None


class CommandQueue:
    """Runs the commands of each model in order, one unit at a time over all models; owners and models take turns.

    Arrival order is the client's order except for the chunks of one forward_backward, which the planner puts together.
    A command that fails ends its own future and nothing else. Whole calls that wait behind each other run as one too, up
    to `pack_tokens` together; with 0 none do.
    """

    def __init__(self, futures: FutureStore, journal: Journal, gap_seconds: float = GAP_SECONDS, pack_tokens: int = 0):
        self._futures = futures
        self._journal = journal
        self._gap_seconds = gap_seconds
        self._pack_tokens = pack_tokens
        self._logs: dict[str, _Log] = {}
        self._turns: FairQueue[_Log] = FairQueue()
        self._arrived = asyncio.Event()
        self._consumer: asyncio.Task | None = None

    def submit(self, model_id: str, seq: int | None, kind: str, work: Action | Chunk, owner: str = "") -> Future:
        """Accept a command, or return the future of the one that already has this seq.

        A retry may carry another body for the same command, so bodies are not compared, but a command of another
        kind is no retry: its future fails. `seq` None is new each time.
        """
        line = self._logs.setdefault(model_id, _Log(model_id, owner))
        known = self.find(model_id, seq)
        if known:
            return self._known(known, seq, kind)
        future = self._futures.create(kind, model_id, owner)
        try:
            self._journal.accept(future.request_id, model_id, seq, kind, owner)
        except StorageError as error:
            future.fail(error)
            return future
        self._remember(line, seq, future)
        future.state = lambda: self._state(line, future)
        join = work.key if isinstance(work, Chunk) else None
        self._enqueue(line, line.planner.arrive(Entry(_Command(future, work), seq, join)))
        self._watch_gap(line)
        return future

    def recall(self, record: CommandRecord, lost: TinkerError) -> Future:
        """The future of a command of an earlier server; it fails with `lost` when its result is not in the journal."""
        future = self._futures.find(record.request_id)
        if future:
            return future
        future = self._futures.restore(record.request_id, record.kind, record.run_id, record.owner)
        outcome = record.outcome
        if outcome is None or (outcome.result is None and outcome.error is None):
            future.fail(lost)
        elif outcome.error is not None:
            future.fail((UserError if outcome.category == "user" else EngineError)(outcome.error))
        else:
            self._futures.succeed_now(future, outcome.result)
        return future

    def _known(self, earlier: Future, seq: int, kind: str) -> Future:
        if earlier.kind == kind:
            return earlier
        refused = self._futures.create(kind, earlier.model_id, earlier.owner)
        refused.fail(UserError(f"seq_id {seq} was a {earlier.kind} already; send this {kind} with a seq_id of its own"))
        return refused

    def knows(self, model_id: str) -> bool:
        """Whether any command of this model was ever accepted by this process."""
        return model_id in self._logs

    def find(self, model_id: str, seq: int | None) -> Future | None:
        """The future of a seq that this process accepted."""
        line = self._logs.get(model_id)
        if line is None or seq is None:
            return None
        if seq in line.futures or not line.has_forgotten:
            return line.futures.get(seq)
        record = self._journal.command(model_id, seq)
        return self.recall(record, EngineError(f"{record.kind} was carried out, and its result was dropped since")) if record else None

    def _remember(self, line: _Log, seq: int | None, future: Future) -> None:
        if seq is None:
            return
        line.futures[seq] = future
        oldest = next(iter(line.futures))
        if len(line.futures) > _REMEMBERED and line.futures[oldest].done:
            del line.futures[oldest]
            line.has_forgotten = True

    async def drain(self, model_id: str) -> None:
        """Run what waits for a model now; only from inside a command, which holds the consumer."""
        line = self._logs.get(model_id)
        if line is None:
            return
        line.ready.extend(line.planner.expire())
        while line.ready:
            await self._run(line, line.ready.popleft())

    async def close(self) -> None:
        """Stop the consumer and drop what waits, whose futures are the store's to fail. A later submit starts it anew."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.cancel()
            await asyncio.gather(consumer, return_exceptions=True)
        for line in self._logs.values():
            if line.gap:
                line.gap.cancel()
            line.planner.expire()
            line.ready.clear()
            line.in_turn = False
        self._turns = FairQueue()

    def _enqueue(self, line: _Log, units: list[list[_Command]]) -> None:
        line.ready.extend(units)
        if line.ready and not line.in_turn:
            line.in_turn = True
            self._turns.push(line.owner, line.model_id, line)
        self._arrived.set()
        if self._consumer is None:
            self._consumer = asyncio.get_running_loop().create_task(self._consume())

    def _watch_gap(self, line: _Log) -> None:
        """Wait a while for missing chunks, and a while longer with each that comes, but not for ever."""
        loop = asyncio.get_running_loop()
        if line.gap:
            line.gap.cancel()
            line.gap = None
        if not line.planner.waiting:
            line.gap_since = None
            return
        line.gap_since = line.gap_since or loop.time()
        latest = line.gap_since + _LONGEST_GAP * self._gap_seconds
        line.gap = loop.call_at(min(loop.time() + self._gap_seconds, latest), self._expire_gap, line)

    def _expire_gap(self, line: _Log) -> None:
        line.gap_since = None
        self._enqueue(line, line.planner.expire())

    async def _consume(self) -> None:
        while True:
            while not len(self._turns):
                self._arrived.clear()
                await self._arrived.wait()
            line = self._turns.pop()
            if line.ready:
                await self._run(line, self._next_unit(line))
            line.in_turn = bool(line.ready)
            if line.in_turn:
                self._turns.push(line.owner, line.model_id, line)

    def _next_unit(self, line: _Log) -> list[_Command]:
        unit = line.ready.popleft()
        while self._pack_tokens and line.ready and _key(unit) is not None and _key(unit) == _key(line.ready[0]):
            if _tokens(unit) + _tokens(line.ready[0]) > self._pack_tokens:
                break
            unit = [*unit, *line.ready.popleft()]
        return unit

    async def _run(self, line: _Log, unit: list[_Command]) -> None:
        # A future that has already ended was ended by a stop or a dead engine: its command must not act any more.
        unit = [command for command in unit if not command.future.done]
        if not unit:
            return
        line.running = unit[0].future.kind
        self._futures.begin([command.future for command in unit])
        try:
            outcomes = await self._outcomes(unit)
        except asyncio.CancelledError:
            stopped = EngineError("the server stopped while this command ran; whether it was applied is not known")
            await self._settle(unit, [stopped] * len(unit))
            raise
        finally:
            line.running = ""
        await self._settle(unit, outcomes)

    async def _outcomes(self, unit: list[_Command]) -> list[Any]:
        first = unit[0]
        try:
            if isinstance(first.work, Chunk):
                return await first.work.run([command.work.content for command in unit])
            return [await first.work()]
        except TinkerError as error:
            if error.category == "server":
                # Clients get it without the paths that it may name.
                log.error("%s of %s failed: %s", first.future.kind, first.future.model_id, error)
            return [error] * len(unit)
        except Exception as error:
            log.exception("%s of %s failed", first.future.kind, first.future.model_id)
            failure = EngineError(f"{first.future.kind} failed inside the server: {type(error).__name__}: {error}")
            return [failure] * len(unit)

    async def _settle(self, unit: list[_Command], outcomes: list[Any]) -> None:
        for command, outcome in zip(unit, outcomes, strict=True):
            future = command.future
            if isinstance(outcome, TinkerError):
                self._journal.settle(future.request_id, Outcome(error=str(outcome), category=outcome.category))
                future.fail(outcome)
            else:
                kept = outcome if isinstance(outcome, dict) else None
                self._journal.settle(future.request_id, Outcome(result=kept))
                await self._futures.succeed(future, outcome)

    def _state(self, line: _Log, future: Future) -> str:
        if future in (command.future for command in line.planner.waiting):
            return f"waits for chunk {line.planner.missing} of its call"
        for position, unit in enumerate(line.ready):
            if future in (command.future for command in unit):
                running = f"{line.running} of this run is running" if line.running else "other runs have their turn"
                return f"{position} commands of this run are before it; {running}"
        return f"{future.kind} is running"


def _key(unit: list[_Command]) -> Hashable | None:
    return unit[0].work.key if isinstance(unit[0].work, Chunk) else None


def _tokens(unit: list[_Command]) -> int:
    return sum(command.work.tokens for command in unit)
