"""An agent whose program lies in a folder that is mounted into the task's container, so that nothing is installed there.

Owns the run of such a program and the reading of its status. The task's own packages stay as they are.
"""

from __future__ import annotations

import shlex

from harbor.agents.base import BaseAgent
from limits import Limits


class NonZeroAgentExitCodeError(RuntimeError):
    """By this name Harbor knows that the agent failed."""


class BakedAgent(BaseAgent):
    """`program` is the file below the runtime's bin/ that must be there."""

    program = ""

    def __init__(self, logs_dir, model_name=None, **arguments):
        self.limits = Limits.taken_from(arguments)
        super().__init__(logs_dir, model_name, **arguments)

    def version(self) -> str:
        return "baked"

    @property
    def path(self) -> str:
        return f"{self.limits.runtime}/bin/{self.program}"

    async def setup(self, environment) -> None:
        result = await environment.exec(f"{shlex.quote(self.path)} --help > /dev/null")
        if result.return_code != 0:
            raise RuntimeError(f"{self.path} does not run in the task's container: {(result.stderr or '').strip()[-300:]}; "
                               "prepare-sandbox bakes it into the outer image")

    async def start(self, environment, command: list[str], env: dict[str, str]) -> None:
        """Run the agent in the task's working directory, its output in its log."""
        line = f"{shlex.join(command)} > /logs/agent/{self.name()}.log 2>&1 < /dev/null"
        result = await environment.exec(line, env={**env, "HOME": "/root"})
        if result.return_code != 0:
            tail = await environment.exec(f"tail -n 5 /logs/agent/{self.name()}.log")
            raise NonZeroAgentExitCodeError(
                f"{self.name()} ended with status {result.return_code}: {(tail.stdout or '').strip()[-500:]}")
