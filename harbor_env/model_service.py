"""ROCK's model service inside a sandbox: started, asked for its health, and spoken with through commands.

Owns where its files lie and how requests and answers pass. Does not answer anything: `harbor_env.pull` does.
"""

from __future__ import annotations

import asyncio
import json
import shlex
from dataclasses import dataclass
from pathlib import Path

from harbor_env import exchange
from harbor_env.errors import ModelServiceFailed
from harbor_env.sandbox import Sandbox, run

ARGUMENT_LIMIT = 96_000  # Linux takes 128 KiB for one argument.


@dataclass(frozen=True)
class Fetched:
    """`requests` by index in the order they came; `answered` are indices; `offset` is where the next look begins."""

    requests: dict[int, dict]
    answered: set[int]
    ended: bool
    offset: int


class ModelService:
    """One model service of type `local`, on `port` of the sandbox, with its files below `folder` there.

    `command` is the `rock` program and `python` any Python of the sandbox.
    """

    def __init__(self, sandbox: Sandbox, *, port: int = 28080, host: str = "0.0.0.0",
                 folder: str = "/data/logs/model-service", command: str = "rock", python: str = "python3"):
        self.sandbox, self.port = sandbox, port
        self._host, self._folder, self._command, self._python = host, folder, command, python
        self._script, self._log = f"{folder}/exchange.py", f"{folder}/LLMService.log"
        self._born: int | None = None

    async def start(self) -> None:
        """Bring it up and put the script beside its log; ModelServiceFailed with its last words when it does not come up."""
        await self.sandbox.write_text(self._script, Path(exchange.__file__).read_text())
        # `rock` takes another program's answer on the port for its own service's.
        if taken := await self._exchange("free", str(self.port), timeout=20):
            raise ModelServiceFailed(f"port {self.port} of the sandbox cannot be had: {taken}")
        start = f"{shlex.quote(self._command)} model-service start --type local --host {self._host} --port {self.port}"
        # The service keeps its output open; a command that waits for the end of it would never return.
        shell = (f"cd {shlex.quote(self._folder)} && export ROCK_MODEL_SERVICE_DATA_DIR={shlex.quote(self._folder)} && "
                 f"{{ {start} > start.log 2>&1 < /dev/null || {{ tail -n 3 start.log >&2; exit 1; }}; }}")
        await run(self.sandbox, ["bash", "-c", shell], ModelServiceFailed, timeout=60)

    async def stop(self) -> None:
        stop = f"{shlex.quote(self._command)} model-service stop"
        shell = f"cd {shlex.quote(self._folder)} && {stop} > stop.log 2>&1 < /dev/null"
        await self.sandbox.execute(["bash", "-c", shell], timeout=60)

    async def check(self) -> None:
        """ModelServiceFailed when it does not answer."""
        ask = ("import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open"
               f"('http://127.0.0.1:{self.port}/health', timeout=5).read()")
        outcome = await self.sandbox.execute([self._python, "-c", ask], timeout=20)
        if outcome.exit_code != 0:
            words = outcome.stderr.strip().splitlines()
            raise ModelServiceFailed(
                f"the model service on port {self.port} does not answer: {words[-1] if words else 'no reason'}")

    async def fetch(self, offset: int, seconds: float) -> Fetched:
        """What came after `offset`, waiting up to `seconds` for a request or the end. Asked again, it says the same."""
        seen = await self._exchange("fetch", self._log, str(offset), str(seconds), timeout=seconds + 30)
        if seen["shrunk"] or (self._born is not None and seen["born"] != self._born):
            raise ModelServiceFailed("the model service was started anew in mid-episode; its requests count from 1 again")
        self._born = seen["born"]
        for request in seen["requests"]:
            if request["poisoned"]:
                raise ModelServiceFailed(f"request {request['index']} has the word {exchange.END} in its text, which ends "
                                         "it in ROCK's model service")
        return Fetched({r["index"]: r["body"] for r in seen["requests"]},
                       set(seen["answered"]), seen["ended"], seen["offset"])

    async def deliver(self, index: int, body: dict, again: bool = False) -> str:
        """Give the answer to request `index`; a second time changes nothing, unless it is to be sent `again`."""
        packed = exchange.pack(body)
        if len(packed) > ARGUMENT_LIMIT:
            file = f"{self._folder}/answer-{index}"
            await self.sandbox.write_text(file, packed)
            packed = f"@{file}"
        return await self._exchange("answer", self._log, str(index), "again" if again else "once", packed, timeout=60)

    async def _exchange(self, *arguments: str, timeout: float):
        out = await run(self.sandbox, [self._python, self._script, *arguments], ModelServiceFailed, timeout=timeout)
        try:
            return await asyncio.to_thread(exchange.unpack, out.strip())
        except (ValueError, exchange.zlib.error, json.JSONDecodeError) as error:
            raise ModelServiceFailed(f"the exchange gave what is no answer of its own: {out[:200]!r}") from error
