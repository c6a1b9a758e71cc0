"""Which weights a sampler has and which waiting requests may run on them now.

Owns versions, the order of requests and the choice of base weights. Does not touch vLLM: the two servers that do,
`sampler_loop` and `vllm_server`, act on its decisions.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from verl_tinker.core.errors import Evicted, WrongWeights
from verl_tinker.core.types import Drawn, SampleRequest

BASE = 0


@dataclass(frozen=True)
class Version:
    """Weights that can be sampled. `rank` 0 is full weights; the folder is immutable while the version lives."""

    folder: str
    rank: int

    @property
    def is_adapter(self) -> bool:
        return self.rank > 0


@dataclass(eq=False)
class Item:
    """One request. `loaded` None is the base model; `base` is the version whose full weights the request needs."""

    request: SampleRequest
    version: int
    loaded: Version | None
    base: int
    future: Any
    # Told of tokens as they are drawn, or None; `drawing` is for the server that runs the request.
    seen: Callable[[Drawn], None] | None = None
    drawing: Any = None

    @property
    def adapter(self) -> str | None:
        """The folder of the adapter to run with."""
        return self.loaded.folder if self.loaded is not None and self.loaded.is_adapter else None


class Admission:
    """Requests in order of arrival, grouped by the base weights they need.

    Adapters answer side by side. Full-weight versions take turns: once a request for other weights waits,
    later requests queue behind it, so none starves.
    """

    def __init__(self, base_folder: str):
        self.base_folder = base_folder
        self.loaded_base: int | None = BASE
        self.versions: dict[int, Version] = {}
        self.waiting: deque[Item] = deque()
        self.running: set[Item] = set()
        self._retired: set[int] = set()

    def enqueue(self, request: SampleRequest, version: int, future: Any, seen: Callable[[Drawn], None] | None = None) -> None:
        if version != BASE and version not in self.versions:
            raise Evicted(f"version {version} is not loaded in the sampler any more")
        loaded = self.versions.get(version)
        base = version if loaded is not None and not loaded.is_adapter else BASE
        self.waiting.append(Item(request, version, loaded, base, future, seen))

    def start(self) -> list[Item]:
        """The requests that may run now, first come first; they count as running until `finish`."""
        started = []
        while self.waiting and self.waiting[0].base == self.loaded_base:
            started.append(self.waiting.popleft())
        self.running.update(started)
        return started

    def base_to_load(self) -> tuple[int, str] | None:
        """Version and folder of the base weights to load next; None while requests still run on the present ones."""
        if self.running or not self.waiting or self.waiting[0].base == self.loaded_base:
            return None
        first = self.waiting[0]
        return first.base, self.base_folder if first.base == BASE else first.loaded.folder

    def base_is_changing(self) -> None:
        """From here until `base_loaded` nobody knows what is in the engine."""
        self.loaded_base = None

    def base_loaded(self, base: int) -> None:
        """All that need these weights go first, for they would wait for another load otherwise."""
        self.loaded_base = base
        self.waiting = deque(sorted(self.waiting, key=lambda item: item.base != base))

    def base_failed(self, base: int) -> list[Item]:
        """The requests that cannot be answered; they are out of the queue."""
        failed = [item for item in self.waiting if item.base == base]
        self.waiting = deque(item for item in self.waiting if item.base != base)
        return failed

    def finish(self, item: Item) -> None:
        self.running.discard(item)

    def check_drawn(self, item: Item, adapter_name: str | None) -> None:
        """Raise unless vLLM answered from the weights that were asked for."""
        wanted = adapter_label(item.version) if item.adapter else None
        if adapter_name != wanted or item.base != self.loaded_base:
            raise WrongWeights(f"asked version {item.version}, but vLLM answered from {adapter_name} on {self.loaded_base}")

    def unload(self, version: int) -> None:
        """Refuse the version from now on; requests that were accepted still end on it."""
        loaded = self.versions.pop(version, None)
        if loaded is not None and loaded.is_adapter:
            self._retired.add(version)

    def removable(self) -> list[int]:
        """Unloaded adapters that no request needs any more; each is named once."""
        if not self._retired:
            return []
        used = {item.version for item in (*self.running, *self.waiting)}
        free = self._retired - used
        self._retired &= used
        return sorted(free)

    def clear(self) -> list[Item]:
        """Forget every request, running or waiting, and return them."""
        items = [*self.running, *self.waiting]
        self.running.clear()
        self.waiting.clear()
        return items


def adapter_label(version: int) -> str:
    """The adapter's name in vLLM, which keys its prefix cache by it: unique for ever, as versions are."""
    return f"v{version}"
