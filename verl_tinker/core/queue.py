"""The command log: one FIFO per model, one consumer for all, one entry per (model, seq).

Owns the order and the identity of training commands. Does not know what a command does.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from verl_tinker.core.errors import EngineError, TinkerError, UserError
from verl_tinker.core.futures import Future, FutureStore

log = logging.getLogger(__name__)

Action = Callable[[], Awaitable[Any]]


@dataclass
class _Log:
    """One model's commands: those waiting, and the future of every seq ever accepted.

    `in_turn` while the model stands in the line of turns or has the turn, so that it stands there once.
    """

    waiting: deque[tuple[Future, Action]] = field(default_factory=deque)
    futures: dict[int, Future] = field(default_factory=dict)
    in_turn: bool = False


class CommandQueue:
    """Runs the commands of each model in arrival order, one command at a time over all models.

    Models take turns. Arrival order is the client's order except for the chunks of one forward_backward,
    whose gradients add up in any order. A command that fails ends its own future and nothing else.
    """

    def __init__(self, futures: FutureStore):
        self._futures = futures
        self._logs: dict[str, _Log] = {}
        self._turns: deque[str] = deque()
        self._arrived = asyncio.Event()
        self._consumer: asyncio.Task | None = None

    def submit(self, model_id: str, seq: int | None, kind: str, action: Action) -> Future:
        """Accept a command, or return the future of the one that already has this seq.

        A retry may carry another body for the same command, so bodies are not compared, but a command of another
        kind is no retry: its future fails. `seq` None is new each time.
        """
        entry = self._logs.setdefault(model_id, _Log())
        if seq is not None and seq in entry.futures:
            return self._known(entry.futures[seq], seq, kind)
        future = self._futures.create(kind, model_id)
        if seq is not None:
            entry.futures[seq] = future
        entry.waiting.append((future, action))
        if not entry.in_turn:
            entry.in_turn = True
            self._turns.append(model_id)
        self._arrived.set()
        if self._consumer is None:
            self._consumer = asyncio.get_running_loop().create_task(self._consume())
        return future

    def _known(self, earlier: Future, seq: int, kind: str) -> Future:
        if earlier.kind == kind:
            return earlier
        refused = self._futures.create(kind, earlier.model_id)
        refused.fail(UserError(f"seq_id {seq} was a {earlier.kind} already; send this {kind} with a seq_id of its own"))
        return refused

    def knows(self, model_id: str) -> bool:
        """Whether any command of this model was ever accepted."""
        return model_id in self._logs

    def find(self, model_id: str, seq: int) -> Future | None:
        entry = self._logs.get(model_id)
        return entry.futures.get(seq) if entry else None

    async def drain(self, model_id: str) -> None:
        """Run what waits for a model now; only from inside a command, which holds the consumer."""
        entry = self._logs.get(model_id)
        while entry and entry.waiting:
            await self._run(*entry.waiting.popleft())

    async def close(self) -> None:
        """Stop the consumer; the futures of waiting commands are the store's to fail."""
        if self._consumer is not None:
            self._consumer.cancel()
            await asyncio.gather(self._consumer, return_exceptions=True)

    async def _consume(self) -> None:
        while True:
            while not self._turns:
                self._arrived.clear()
                await self._arrived.wait()
            model_id = self._turns.popleft()
            entry = self._logs[model_id]
            if entry.waiting:
                await self._run(*entry.waiting.popleft())
            entry.in_turn = bool(entry.waiting)
            if entry.in_turn:
                self._turns.append(model_id)

    async def _run(self, future: Future, action: Action) -> None:
        # A future that has already ended was ended by a stop or a dead engine: its command must not act any more.
        if future.done:
            return
        try:
            future.succeed(await action())
        except TinkerError as error:
            future.fail(error)
        except asyncio.CancelledError:
            future.fail(EngineError("the server stopped while this command ran; whether it was applied is not known"))
            raise
        except Exception as error:
            log.exception("%s of %s failed", future.kind, future.model_id)
            future.fail(EngineError(f"{future.kind} failed inside the server: {type(error).__name__}: {error}"))
