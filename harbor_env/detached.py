"""Commands that outlive a request: started apart, waited for in short looks, with the exit code that they really had.

Owns the files in which such a command leaves its output and status. ROCK's own way for them reports 0 for every end.
"""

from __future__ import annotations

import asyncio
import base64
import shlex
import time

from harbor_env.errors import RockUnreachable
from harbor_env.sandbox import Outcome, Sandbox, run

LOOK_SECONDS = 20


class Detached:
    """One command in a group of processes of its own, with its output below `folder` of the sandbox."""

    def __init__(self, sandbox: Sandbox, folder: str, *, outage: float = 60.0):
        self._sandbox, self._folder, self._outage = sandbox, folder, outage

    async def start(self, command: str, cwd: str = "/", env: dict[str, str] | None = None) -> None:
        """`command` is for bash. `env` is laid over the sandbox's own variables."""
        variables = " ".join(f"{name}={shlex.quote(value)}" for name, value in (env or {}).items())
        await self._sandbox.write_text(f"{self._folder}/command.sh", command + "\n")
        here = self._folder
        inner = (f"cd {shlex.quote(cwd)} && env {variables} bash {here}/command.sh > {here}/stdout 2> {here}/stderr; "
                 f"echo $? > {here}/status.part; mv {here}/status.part {here}/status")
        shell = (f"rm -f {self._folder}/status; setsid bash -c {shlex.quote(inner)} < /dev/null > /dev/null 2>&1 & "
                 f"echo $! > {self._folder}/pid")
        await run(self._sandbox, ["bash", "-c", shell])

    async def wait(self, timeout: float, output_bytes: int = 1 << 17) -> Outcome:
        """Its outcome with the ends of its output; exit code -1 and its end by force when `timeout` seconds are over."""
        limit = time.monotonic() + timeout
        while (left := limit - time.monotonic()) > 0:
            if await self._look(min(LOOK_SECONDS, left)):
                return await self.outcome(output_bytes)
        await self.kill()
        done = await self.outcome(output_bytes)
        return Outcome(done.stdout, done.stderr, -1)

    async def _look(self, seconds: float) -> bool:
        shell = (f"for i in $(seq {max(1, round(seconds * 5))}); do "
                 f"[ -f {self._folder}/status ] && echo done && exit; sleep 0.2; done")
        began = time.monotonic()
        while True:
            try:
                return "done" in await run(self._sandbox, ["bash", "-c", shell], timeout=seconds + 15)
            except RockUnreachable:
                if time.monotonic() - began > self._outage:
                    raise
                await asyncio.sleep(1.0)

    async def outcome(self, output_bytes: int = 1 << 17) -> Outcome:
        shells = [f"tail -c {output_bytes} {self._folder}/{name} | base64" for name in ("stdout", "stderr")]
        parts = [base64.b64decode(await run(self._sandbox, ["bash", "-c", shell])) for shell in shells]
        status = await self._sandbox.execute(["cat", f"{self._folder}/status"])
        code = int(status.stdout) if status.exit_code == 0 and status.stdout.strip() else -1
        return Outcome(parts[0].decode(errors="replace"), parts[1].decode(errors="replace"), code)

    async def kill(self) -> None:
        """End all of its group."""
        shell = f"kill -TERM -- -$(cat {self._folder}/pid); sleep 2; kill -KILL -- -$(cat {self._folder}/pid)"
        await self._sandbox.execute(["bash", "-c", shell], timeout=20)
