"""What the core tells those who watch it: metrics, traces, and the history that a dashboard shows.

Owns the moments that can be watched, and the engine's calls as such. Keeps nothing: watchers do.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from verl_tinker.engine.base import Engine

if TYPE_CHECKING:
    from verl_tinker.core.futures import Future

log = logging.getLogger(__name__)


class Watcher:
    """Does nothing; a watcher overrides what it wants to know. It is called on the event loop and must be quick."""

    def accepted(self, future: Future) -> None:
        """An operation waits from now on. Its request's context variables are those of this call."""

    def began(self, future: Future) -> None:
        """It runs from now on, in the task that calls this."""

    def settled(self, future: Future) -> None:
        """It has its result or its error; it may never have begun."""

    @contextmanager
    def engine_call(self, name: str) -> Iterator[None]:
        """Around a call of the engine; an error of it goes through."""
        yield

    def engine_returned(self, name: str, arguments: tuple, result: Any) -> None:
        """What a successful call of the engine was given and gave."""

    @contextmanager
    def http_request(self, scope: dict) -> Iterator[None]:
        """Around an HTTP request; `scope` is ASGI's, with the status of the answer in `scope["answered"]` at the end."""
        yield


class Watchers(Watcher):
    """All watchers of a server; one that fails is logged and harms nobody."""

    def __init__(self):
        self._all: list[Watcher] = []
        # Only those that want to be around it: each costs time, on every request.
        self._around: dict[str, list[Watcher]] = {"engine_call": [], "http_request": []}

    def add(self, watcher: Watcher) -> None:
        self._all.append(watcher)
        for name, watching in self._around.items():
            if getattr(type(watcher), name) is not getattr(Watcher, name):
                watching.append(watcher)

    def accepted(self, future: Future) -> None:
        self._tell(lambda watcher: watcher.accepted(future))

    def began(self, future: Future) -> None:
        self._tell(lambda watcher: watcher.began(future))

    def settled(self, future: Future) -> None:
        self._tell(lambda watcher: watcher.settled(future))

    def engine_returned(self, name: str, arguments: tuple, result: Any) -> None:
        self._tell(lambda watcher: watcher.engine_returned(name, arguments, result))

    def engine_call(self, name: str) -> AbstractContextManager[None]:
        return _Around([partial(watcher.engine_call, name) for watcher in self._around["engine_call"]])

    def http_request(self, scope: dict) -> AbstractContextManager[None]:
        return _Around([partial(watcher.http_request, scope) for watcher in self._around["http_request"]])

    def _tell(self, what: Callable[[Watcher], None]) -> None:
        for watcher in self._all:
            try:
                what(watcher)
            except Exception:
                log.exception("%s failed", type(watcher).__name__)


class _Around:
    """Watchers' context managers around a piece of work; their own errors are logged and never those of the work."""

    def __init__(self, makes: list[Callable[[], AbstractContextManager]]):
        self._makes = makes
        self._entered: list[AbstractContextManager] = []

    def __enter__(self) -> None:
        for make in self._makes:
            try:
                manager = make()
                manager.__enter__()
                self._entered.append(manager)
            except Exception:
                log.exception("a watcher failed")

    def __exit__(self, *error: Any) -> bool:
        for manager in reversed(self._entered):
            try:
                manager.__exit__(*error)
            except Exception:
                log.exception("a watcher failed")
        return False


def _watched(name: str) -> Callable[..., Awaitable[Any]]:
    async def call(self: WatchedEngine, *arguments: Any) -> Any:
        with self._watchers.engine_call(name):
            result = await getattr(self._engine, name)(*arguments)
        self._watchers.engine_returned(name, arguments, result)
        return result

    call.__name__ = name
    return call


class WatchedEngine:
    """An engine whose working calls are watched; all else goes to the engine as it is."""

    def __init__(self, engine: Engine, watchers: Watchers):
        self._engine, self._watchers = engine, watchers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


CALLS = ("create_model", "drop_model", "forward_backward", "optim_step", "save_state", "load_state", "park", "unpark",
         "export_weights", "export_sampler", "load_version", "retire_version", "sample")
for _name in CALLS:
    setattr(WatchedEngine, _name, _watched(_name))
