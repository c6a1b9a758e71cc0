"""The cookbook's sandbox interface on ROCK, and its harbor_rl recipe started with it.

Owns the translation of the interface. The task's image must hold ROCK's rocklet. Does not change the recipe, whose reward
differs from Harbor's: it reads reward.txt first, and a grading that failed counts as 0 there.

    python -m harbor_env.cookbook eval model_name=ORG/NAME renderer_name=NAME base_url=http://127.0.0.1:8000
"""

from __future__ import annotations

import asyncio
import base64
import logging
import os
import shlex
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tinker_cookbook.sandbox import SandboxInterface, SandboxResult
from tinker_cookbook.sandbox.sandbox_interface import SandboxTerminatedError

from harbor_env.detached import Detached
from harbor_env.errors import EpisodeError, SandboxDied, SettingError
from harbor_env.rock_sandbox import REQUEST_SECONDS, RockSandbox, RockSettings
from harbor_env.sandbox import Outcome
from harbor_env.settings import HarborSettings, TaskFolder, read

log = logging.getLogger(__name__)
OUTPUT_BYTES = 128 * 1024


@dataclass
class RockCookbookSandbox:
    """A running sandbox as the cookbook's tools see it. A dead one raises; others are exit code -1, as with Modal."""

    inner: RockSandbox
    work: str = "/tmp/harbor-env"
    _commands: int = 0

    @property
    def sandbox_id(self) -> str:
        return self.inner.sandbox_id

    async def send_heartbeat(self, timeout: int = 30) -> None:
        """Every command postpones ROCK's auto-clear."""
        await self._tried(self.inner.execute(["true"], timeout=timeout))

    async def run_command(self, command: str, workdir: str | None = None, timeout: int = 60,
                          max_output_bytes: int | None = None) -> SandboxResult:
        limit = max_output_bytes or OUTPUT_BYTES
        place = f"cd {shlex.quote(workdir)} && " if workdir else ""
        if timeout <= REQUEST_SECONDS:
            outcome = await self._tried(self.inner.execute(["bash", "-lc", f"{place}{command}"], timeout=timeout))
        else:
            self._commands += 1
            longer = Detached(self.inner, f"{self.work}/{self._commands}")
            outcome = await self._tried(self._long(longer, command, workdir or "/", timeout, limit))
        return SandboxResult(stdout=_cut(outcome.stdout, limit), stderr=_cut(
            outcome.stderr, limit), exit_code=outcome.exit_code)

    async def _long(self, command: Detached, text: str, workdir: str, timeout: int, limit: int) -> Outcome:
        await command.start(text, cwd=workdir)
        return await command.wait(timeout, limit)

    async def read_file(self, path: str, max_bytes: int | None = None, timeout: int = 60) -> SandboxResult:
        head = f"head -c {max_bytes} -- " if max_bytes else "cat -- "
        return await self.run_command(head + shlex.quote(path), timeout=timeout, max_output_bytes=max_bytes)

    async def write_file(self, path: str, content: str | bytes, executable: bool = False,
                         timeout: int = 60) -> SandboxResult:
        data = content.encode() if isinstance(content, str) else content
        packed, target = f"{path}.part", shlex.quote(path)
        shell = (f"mkdir -p $(dirname {target}) && base64 -d {shlex.quote(packed)} > {target} && rm {shlex.quote(packed)}"
                 + (f" && chmod +x {target}" if executable else ""))
        await self._tried(self.inner.write_text(packed, base64.b64encode(data).decode()))
        return await self.run_command(shell, timeout=timeout)

    async def cleanup(self) -> None:
        await self.inner.close()

    async def _tried(self, call: Awaitable):
        try:
            return await call
        except SandboxDied as error:
            raise SandboxTerminatedError(str(error)) from error
        except EpisodeError as error:
            return Outcome("", str(error), -1)


def factory(settings: RockSettings, image_of: Callable[[Path], str], notes: Path | None = None):
    """A SandboxFactory for the recipe. `image_of` names the image of a task's environment folder."""

    async def make(env_dir: Path, timeout: int) -> SandboxInterface:
        started = replace(settings, image=image_of(env_dir), auto_clear_seconds=max(timeout, 60))
        return RockCookbookSandbox(await RockSandbox.start(started, notes))

    return make


def main(arguments: list[str]) -> int:
    """`train` and `eval` of the recipe, on the configured task, with its own flags."""
    if arguments[:1] not in (["train"], ["eval"]):
        raise SettingError("say `train` or `eval`, and then the recipe's own flags")
    import chz
    from tinker_cookbook.recipes.harbor_rl import eval as evaluation
    from tinker_cookbook.recipes.harbor_rl import train
    from tinker_cookbook.recipes.harbor_rl.harbor_env import HarborTask

    folder = TaskFolder.found(None)
    settings = read(folder.config("harbor"), HarborSettings)
    place = Path(settings.task.path)
    task = HarborTask(settings.task.id, (place / "instruction.md").read_text(), place)
    image = os.environ.get("HARBOR_TASK_IMAGE", settings.environment.image)
    sandboxes = factory(settings.environment, lambda _: image, folder.notes)
    kind = evaluation.EvalConfig if arguments[0] == "eval" else train.CLIConfig
    config = chz.Blueprint(kind).make_from_argv(arguments[1:])
    run = evaluation.run_eval if arguments[0] == "eval" else train.cli_main
    asyncio.run(run(config, [task], sandbox_factory=sandboxes))
    return 0


def _cut(text: str, limit: int) -> str:
    return text.encode()[:limit].decode(errors="ignore")


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SettingError as error:
        sys.exit(f"error: {error}")
