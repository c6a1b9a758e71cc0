"""Futures by request id: what every accepted operation ends in, a result or an error.

Owns how long results stay readable and where they lie. Does not run anything: queue and sampling settle the futures.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from verl_tinker.core.errors import NotFound, TinkerError
from verl_tinker.core.watch import Watchers

_IN_THREAD = 256 << 10
_ON_DISK = 1 << 20


@dataclass(frozen=True)
class Encoded:
    """A result as it goes over the wire. `form` is the codec's name of the encoding."""

    form: str
    data: bytes


class Codec(Protocol):
    """Turns results into bytes. `size` estimates their number, so that big ones are encoded off the event loop."""

    def size(self, result: Any) -> int: ...

    def encode(self, result: Any) -> Encoded: ...


class Future:
    """One accepted operation. Settled once; the first result or error stands. Readable any number of times.

    `sequences`: how many sampled sequences the result will hold; each has an id from the start. `state` tells in words
    what a pending one waits for. `accepted_at`, `began_at` and `settled_at` are of `time.monotonic`.
    """

    def __init__(
        self,
        request_id: str,
        kind: str,
        model_id: str | None = None,
        owner: str = "",
        sequences: int = 0,
        on_settled: Callable[[Future], None] = lambda future: None,
    ):
        self.request_id = request_id
        self.kind = kind
        self.model_id = model_id
        self.owner = owner
        self.sequence_ids = [f"{self.request_id}-{i}" for i in range(sequences)]
        self.error: TinkerError | None = None
        self.accepted_at = time.monotonic()
        self.began_at: float | None = None
        self.settled_at: float | None = None
        self.state: Callable[[], str] = lambda: ""
        self.size = 0
        self._kept: Any = None
        self.is_dropped = False
        self._on_settled = on_settled
        self._event = asyncio.Event()

    @property
    def done(self) -> bool:
        return self._event.is_set()

    @property
    def result(self) -> Any:
        """What the codec made of the result; read from disk when it lies there. FileNotFoundError once it was dropped."""
        if self.is_dropped:
            raise FileNotFoundError(f"the result of {self.request_id} was dropped")
        if isinstance(self._kept, _OnDisk):
            return self._kept.read()
        return self._kept

    @property
    def is_on_disk(self) -> bool:
        return isinstance(self._kept, _OnDisk)

    def succeed(self, kept: Any, size: int = 0) -> None:
        if not self.done:
            self._kept, self.size = kept, size
            self._settle()

    def fail(self, error: TinkerError) -> None:
        if not self.done:
            self.error = error
            self._settle()

    def _settle(self) -> None:
        self.settled_at = time.monotonic()
        self.state = lambda: ""
        self._event.set()
        self._on_settled(self)

    def forget(self) -> None:
        """Drop the result. Command logs and completion lists hold on to the future itself, which is small."""
        if isinstance(self._kept, _OnDisk):
            self._kept.file.unlink(missing_ok=True)
        self._kept, self.is_dropped = None, True

    async def wait(self, seconds: float) -> bool:
        """Wait until the future is settled, or for `seconds`; tells whether it is settled."""
        if self.done:
            return True
        try:
            await asyncio.wait_for(self._event.wait(), seconds)
        except TimeoutError:
            pass
        return self.done


@dataclass(frozen=True)
class _OnDisk:
    form: str
    file: Path

    def read(self) -> Encoded:
        return Encoded(self.form, self.file.read_bytes())


@dataclass(frozen=True)
class Limits:
    """Of settled futures: their number, the bytes of their results in memory and on disk, and their age in seconds."""

    count: int = 20_000
    memory_bytes: int = 512 << 20
    disk_bytes: int = 8 << 30
    age_s: float = 3600.0


class FutureStore:
    """Every readable future. Settled ones go by age, or beyond a limit: those read already first, then the oldest.

    Pending ones are never dropped, so an accepted operation always has an answer. Without a codec results are kept as
    they are, and count as no bytes.
    """

    def __init__(self, limits: Limits = Limits(), folder: Path | None = None):
        self._limits = limits
        self.codec: Codec | None = None
        self.watchers = Watchers()
        self._folder = folder
        self._pending: dict[str, Future] = {}
        self._unread: OrderedDict[str, Future] = OrderedDict()
        self._read: OrderedDict[str, Future] = OrderedDict()
        self._memory = self._disk = 0

    def create(self, kind: str, model_id: str | None = None, owner: str = "", sequences: int = 0) -> Future:
        self.prune()
        future = Future(f"{kind}-{secrets.token_hex(12)}", kind, model_id, owner, sequences, self._move)
        self._pending[future.request_id] = future
        self.watchers.accepted(future)
        return future

    def begin(self, futures: list[Future]) -> None:
        """What waited runs from now on, in the task that calls this."""
        for future in futures:
            future.began_at = time.monotonic()
            self.watchers.began(future)

    def restore(self, request_id: str, kind: str, model_id: str, owner: str) -> Future:
        """A pending future under the id that an earlier server gave it; whoever restores it settles it."""
        future = Future(request_id, kind, model_id, owner, on_settled=self._move)
        self._pending[request_id] = future
        return future

    def succeed_now(self, future: Future, result: Any) -> None:
        """Settle a future with a small result."""
        if self.codec is None:
            future.succeed(result)
        else:
            encoded = self.codec.encode(result)
            future.succeed(encoded, len(encoded.data))

    async def succeed(self, future: Future, result: Any) -> None:
        """Settle a future with its encoded result; a large one is encoded in a thread and kept on disk."""
        if self.codec is None or self.codec.size(result) < _IN_THREAD:
            self.succeed_now(future, result)
        else:
            future.succeed(*await asyncio.to_thread(self._keep, result))

    def _keep(self, result: Any) -> tuple[Any, int]:
        encoded = self.codec.encode(result)
        if self._folder is None or len(encoded.data) < _ON_DISK:
            return encoded, len(encoded.data)
        try:
            with tempfile.NamedTemporaryFile(dir=self._folder, prefix="result-", delete=False) as file:
                file.write(encoded.data)
        except OSError:
            # A full disk is no reason to lose a result that memory can hold.
            return encoded, len(encoded.data)
        return _OnDisk(encoded.form, Path(file.name)), len(encoded.data)

    def get(self, request_id: str) -> Future:
        future = self.find(request_id)
        if future is None:
            raise NotFound(
                f"request_id {request_id!r} is not known here: the server has restarted since, or its result was kept "
                f"for {self._limits.age_s:.0f} s and dropped; submit the operation again"
            )
        return future

    def find(self, request_id: str) -> Future | None:
        return self._pending.get(request_id) or self._unread.get(request_id) or self._read.get(request_id)

    def was_read(self, future: Future) -> None:
        """The result went out; it may be asked for again, but goes before those that nobody has seen."""
        if self._unread.pop(future.request_id, None):
            self._read[future.request_id] = future

    def drop(self, request_id: str) -> None:
        """Forget a settled future that its client has acknowledged."""
        for settled in (self._unread, self._read):
            if request_id in settled:
                self._remove(settled, settled[request_id])

    def fail_pending(self, error: TinkerError) -> None:
        for future in list(self._pending.values()):
            future.fail(error)

    def __len__(self) -> int:
        return len(self._pending) + len(self._unread) + len(self._read)

    def __contains__(self, request_id: str) -> bool:
        return self.find(request_id) is not None

    @property
    def pending(self) -> int:
        return len(self._pending)

    def all_pending(self) -> list[Future]:
        """The oldest first."""
        return list(self._pending.values())

    def counts(self) -> dict[str, int]:
        """How many there are in each state."""
        return {"pending": len(self._pending), "unread": len(self._unread), "read": len(self._read)}

    def bytes_kept(self) -> dict[str, int]:
        """The size of the results in each place."""
        return {"memory": self._memory, "disk": self._disk}

    def _move(self, future: Future) -> None:
        self._unread[future.request_id] = self._pending.pop(future.request_id)
        if future.is_on_disk:
            self._disk += future.size
        else:
            self._memory += future.size
        self.watchers.settled(future)
        self.prune()

    def prune(self) -> None:
        horizon = time.monotonic() - self._limits.age_s
        for settled in (self._read, self._unread):
            while settled:
                first = next(iter(settled.values()))
                if first.settled_at > horizon and not self._is_over():
                    break
                self._remove(settled, first)

    def _is_over(self) -> bool:
        limits = self._limits
        count = len(self._unread) + len(self._read)
        return count > limits.count or self._memory > limits.memory_bytes or self._disk > limits.disk_bytes

    def _remove(self, settled: OrderedDict[str, Future], future: Future) -> None:
        del settled[future.request_id]
        if future.is_on_disk:
            self._disk -= future.size
        else:
            self._memory -= future.size
        future.forget()
