"""A sandbox as the rest of the package sees it: commands with their real exit codes, text files, and its end.

Owns the protocol. ROCK's implementation is `harbor_env.rock_sandbox`; the tests have one on their own machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from harbor_env.errors import EpisodeError, SandboxDied


@dataclass(frozen=True)
class Outcome:
    """What a command left. `exit_code` is its own; -1 where its time was over."""

    stdout: str
    stderr: str
    exit_code: int


class Sandbox(Protocol):
    @property
    def sandbox_id(self) -> str: ...

    async def execute(self, command: list[str], timeout: float = 60.0, cwd: str | None = None,
                      env: dict[str, str] | None = None) -> Outcome:
        """Run one program to its end, within `timeout` seconds (at most 80, which ROCK gives a request)."""

    async def write_text(self, path: str, text: str) -> None: ...

    async def upload(self, local: str, path: str) -> None:
        """A file of any size and content; folders above it are made."""

    async def close(self) -> None: ...


async def run(sandbox: Sandbox, command: list[str], error: type[EpisodeError] = SandboxDied, **options) -> str:
    """The output of a command that must succeed; otherwise `error` with its last words."""
    outcome = await sandbox.execute(command, **options)
    if outcome.exit_code != 0:
        words = (outcome.stderr.strip() or outcome.stdout.strip())[-500:]
        raise error(f"{' '.join(command)[:200]} ended with status {outcome.exit_code}: {words}")
    return outcome.stdout
