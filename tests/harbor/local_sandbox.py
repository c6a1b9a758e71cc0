"""A sandbox that is a folder of this machine: the same commands, no container.

Owns nothing but the folder. It counts its commands, and loses some of their answers when a test says so.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from pathlib import Path

from harbor_env.errors import RockUnreachable
from harbor_env.sandbox import Outcome


class LocalSandbox:
    def __init__(self, folder: Path, programs: Path):
        self.folder, self.programs = folder, programs
        self.commands: list[list[str]] = []
        self.lose: list[int] = []
        self.closed = False

    @property
    def sandbox_id(self) -> str:
        return self.folder.name

    async def execute(self, command, timeout=60.0, cwd=None, env=None):
        number = len(self.commands)
        self.commands.append(list(command))
        variables = env or {**os.environ, "PATH": f"{self.programs}:{os.environ['PATH']}"}
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            cwd=cwd or self.folder, env=variables)
        try:
            out, err = await asyncio.wait_for(process.communicate(), timeout)
        except TimeoutError:
            process.kill()
            await process.wait()
            return Outcome("", "", -1)
        except asyncio.CancelledError:
            process.kill()
            raise
        if number in self.lose:
            raise RockUnreachable(f"the answer to command {number} was lost")
        return Outcome(out.decode(errors="backslashreplace"), err.decode(errors="backslashreplace"), process.returncode)

    async def write_text(self, path, text):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text)

    async def upload(self, local, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(local, path)

    async def close(self):
        self.closed = True
