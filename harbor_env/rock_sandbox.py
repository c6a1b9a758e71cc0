"""A ROCK sandbox over ROCK's own SDK: started, used by `execute`, and always closed.

Owns the sandboxes it started, and a note of each on disk, by which the next run closes what a killed one left. Does not know
what runs inside.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from harbor_env.errors import EpisodeError, RockUnreachable, SandboxDied, SandboxNotStarted, SettingError
from harbor_env.sandbox import Outcome

log = logging.getLogger(__name__)
REQUEST_SECONDS = 80.0  # A rocklet ends every request after 85.
GRACE_SECONDS = 30.0
# ROCK's words for a sandbox that it cannot reach, and how often it is asked again after them.
_UPSTREAM, _PAUSES = "Upstream server is not reachable", (0.5, 1.0, 2.0, 3.0, 4.0)


@dataclass(frozen=True)
class RockSettings:
    """Where ROCK is and what a sandbox gets. `auto_clear_seconds`: ROCK ends a sandbox that nobody used for so long."""

    base_url: str
    image: str
    cluster: str = "local"
    extra_headers: dict[str, str] = field(default_factory=dict)
    memory: str = "8g"
    cpus: float = 2
    startup_timeout: float = 600
    auto_clear_seconds: int = 1800


def _sdk():
    try:
        from rock.sdk.sandbox.client import Sandbox
        from rock.sdk.sandbox.config import SandboxConfig
    except ImportError as error:
        raise SettingError(f"ROCK's SDK cannot be imported ({error}); run `harbor_env/setup.sh control`") from error
    return Sandbox, SandboxConfig


class RockSandbox:
    """One sandbox. Errors are RockUnreachable where a repetition may help, SandboxDied where it cannot."""

    def __init__(self, sdk, notes: Path | None = None):
        self._sdk, self._notes = sdk, notes

    @classmethod
    async def start(cls, settings: RockSettings, notes: Path | None = None) -> RockSandbox:
        """A running sandbox; SandboxNotStarted says what ROCK said. `notes`: the folder of the notes on disk."""
        sandbox_type, config_type = _sdk()
        self = cls(sandbox_type(config_type(
            base_url=settings.base_url.rstrip("/"), image=settings.image, cluster=settings.cluster, memory=settings.memory,
            extra_headers=dict(settings.extra_headers), cpus=settings.cpus, startup_timeout=settings.startup_timeout,
            auto_clear_seconds=settings.auto_clear_seconds, disk=None)), notes)
        starting = asyncio.create_task(self._sdk.start())
        try:
            await self._started(starting)
        except BaseException:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await asyncio.shield(self.close())
            raise
        return self

    async def _started(self, starting: asyncio.Task) -> None:
        while not starting.done():
            await asyncio.wait({starting}, timeout=0.5)
            self._note()
        self._note()
        try:
            starting.result()
        except Exception as error:  # The SDK raises plain Exceptions.
            reason = _away(error)
            if reason:
                raise RockUnreachable(f"{self._sdk.config.base_url}: {reason}") from error
            raise SandboxNotStarted(f"image {self._sdk.config.image}: {_short(error)}") from error

    @property
    def sandbox_id(self) -> str:
        return self._sdk.sandbox_id

    async def execute(self, command, timeout=60.0, cwd=None, env=None) -> Outcome:
        if timeout > REQUEST_SECONDS:
            raise ValueError(f"timeout is {timeout}; ROCK ends a request after {REQUEST_SECONDS:.0f} s, so start longer "
                             "ones detached")
        from rock.actions import Command

        request = Command(command=list(command), timeout=timeout, cwd=cwd, env=env)
        result = await self._ask(self._sdk.execute(request), f"execute {' '.join(command)[:100]}", timeout)
        return Outcome(result.stdout or "", result.stderr or "", result.exit_code)

    async def write_text(self, path, text):
        result = await self._ask(self._sdk.write_file_by_path(text, path), f"write {path}")
        if not result.success:
            raise await self._lost(f"write {path}: {result.message}")

    async def upload(self, local, path):
        from rock.actions import UploadMode

        result = await self._ask(self._sdk.upload_by_path(local, path, UploadMode.DIRECT), f"upload {path}", 300.0)
        if not result.success:
            raise await self._lost(f"upload {path}: {result.message}")

    async def close(self) -> None:
        """End it; asked again until ROCK says that it is gone. The note stays where that fails, for the next run."""
        if not self._sdk.sandbox_id:
            return
        for pause in (0.5, 2.0, 5.0):
            await self._sdk.close()
            try:
                if not (await self._sdk.get_status(include_all_states=True)).is_alive:
                    break
            except Exception as error:
                if _away(error) is None:
                    break  # ROCK answers, and knows no such sandbox.
            await asyncio.sleep(pause)
        else:
            log.warning("sandbox %s could not be ended; ROCK does so when nobody has used it for a while", self.sandbox_id)
            return
        if self._notes:
            (self._notes / f"{self.sandbox_id}.json").unlink(missing_ok=True)

    def _note(self) -> None:
        if self._notes and self._sdk.sandbox_id:
            file = self._notes / f"{self._sdk.sandbox_id}.json"
            if not file.exists():
                self._notes.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps({"pid": os.getpid(), "started": _process_start(os.getpid()),
                                            "base_url": self._sdk.config.base_url, "cluster": self._sdk.config.cluster}))

    async def _ask(self, call, what: str, timeout: float = 60.0):
        try:
            return await asyncio.wait_for(call, timeout + GRACE_SECONDS)
        except TimeoutError:
            raise RockUnreachable(f"{what}: no answer within {timeout + GRACE_SECONDS:.0f} s") from None
        except Exception as error:
            raise await self._lost(f"{what}: {_away(error) or _short(error)}", _UPSTREAM in str(error)) from error

    async def _lost(self, what: str, is_unreachable: bool = False) -> EpisodeError:
        """A call failed: is it ROCK that is away, or the sandbox that is gone? `is_unreachable`: ROCK could not reach it."""
        try:
            alive = (await asyncio.wait_for(self._sdk.get_status(), GRACE_SECONDS)).is_alive
        except Exception as error:
            return RockUnreachable(what) if _away(error) or isinstance(error, TimeoutError) else SandboxDied(what)
        if alive and (not is_unreachable or await self._answers_again()):
            return RockUnreachable(what)
        return SandboxDied(f"{what}; ROCK says that it runs, and nothing in it answers" if alive else what)

    async def _answers_again(self) -> bool:
        """ROCK does not notice a container that died, and says of it what it says of one that is slow once."""
        from rock.actions import Command

        for pause in _PAUSES:
            await asyncio.sleep(pause)
            with suppress(Exception):
                await asyncio.wait_for(self._sdk.execute(Command(command=["true"], timeout=5)), GRACE_SECONDS)
                return True
        return False


@asynccontextmanager
async def rock_sandbox(settings: RockSettings, notes: Path | None = None) -> AsyncIterator[RockSandbox]:
    """A sandbox that has ended when the block is left, whatever the way."""
    sandbox = await RockSandbox.start(settings, notes)
    try:
        yield sandbox
    finally:
        await asyncio.shield(asyncio.create_task(sandbox.close()))


async def close_left_over(settings: RockSettings, notes: Path) -> list[str]:
    """End the sandboxes of runs that were killed; their ids. Those of runs that live are left alone."""
    sandbox_type, config_type = _sdk()
    closed = []
    for file in sorted(notes.glob("*.json")) if notes.is_dir() else []:
        with suppress(OSError, ValueError, KeyError):
            note = json.loads(file.read_text())
            if _process_start(note["pid"]) == note["started"]:
                continue
            sdk = sandbox_type(config_type(base_url=note["base_url"], cluster=note["cluster"],
                                           extra_headers=dict(settings.extra_headers)))
            sdk._sandbox_id = file.stem  # `attach` refuses one that is gone already.
            await RockSandbox(sdk, notes).close()
            if not file.exists():
                closed.append(file.stem)
    return closed


def _process_start(pid: int) -> str | None:
    """What tells this process from a later one with the same number."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return None


def _away(error: BaseException) -> str | None:
    """Why ROCK itself cannot be reached, if that is what the error comes from."""
    import httpx

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, httpx.HTTPStatusError):
            return f"HTTP status {seen.response.status_code}" if seen.response.status_code >= 500 else None
        if isinstance(seen, (httpx.TransportError, httpx.InvalidURL, json.JSONDecodeError)):
            return f"{type(seen).__name__} {seen}".strip()
        seen = seen.__cause__ or seen.__context__
    return None


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__
