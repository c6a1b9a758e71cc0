"""The cookbook's sandbox interface on ROCK: what its tools rely on, against a real rocklet."""

import asyncio
import json
import os
import signal

import pytest
from support_rock import Admin
from tinker_cookbook.recipes.harbor_rl.harbor_tools import HarborBashTool
from tinker_cookbook.sandbox import SandboxInterface
from tinker_cookbook.sandbox.sandbox_interface import SandboxTerminatedError

from harbor_env.cookbook import RockCookbookSandbox, factory, main
from harbor_env.errors import SettingError
from harbor_env.rock_sandbox import RockSettings

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    server = Admin(tmp_path_factory.mktemp("admin")).start()
    yield server
    server.stop()


def with_sandbox(admin, tmp_path, work):
    """What `work` returns for a sandbox that the factory made; it is ended afterwards."""
    async def run():
        settings = RockSettings(base_url=admin.url, image="unused:1")
        make = factory(settings, lambda env_dir: f"{env_dir.parent.name}:1", tmp_path / "notes")
        sandbox = await make(tmp_path / "my-task" / "environment", 600)
        sandbox.work = str(tmp_path / "work")
        try:
            return await work(sandbox)
        finally:
            await sandbox.cleanup()

    result = asyncio.run(run())
    assert admin.alive() == []
    return result


def test_it_is_a_sandbox_in_the_cookbooks_sense(admin, tmp_path):
    async def work(sandbox):
        assert isinstance(sandbox, SandboxInterface) and isinstance(sandbox, RockCookbookSandbox)
        await sandbox.send_heartbeat()
        asked = admin.state()["sandboxes"][sandbox.sandbox_id]["asked"]
        assert asked["image"] == "my-task:1" and asked["auto_clear_time_minutes"] == 10

    with_sandbox(admin, tmp_path, work)


def test_commands_files_and_limits(admin, tmp_path):
    async def work(sandbox):
        result = await sandbox.run_command("echo out; echo err >&2; pwd; exit 3", workdir=str(tmp_path))
        assert (result.stdout, result.stderr, result.exit_code) == (f"out\n{tmp_path}\n", "err\n", 3)
        assert (await sandbox.run_command("sleep 5", timeout=1)).exit_code == -1
        assert len((await sandbox.run_command("head -c 5000 /dev/zero | tr '\\0' x", max_output_bytes=100)).stdout) == 100
        path = f"{tmp_path}/a b/it's.sh"
        assert (await sandbox.write_file(path, "#!/bin/sh\necho \"ünï $1\"\n", executable=True)).exit_code == 0
        assert (await sandbox.run_command(f'"{path}" x')).stdout == "ünï x\n"
        assert (await sandbox.read_file(path)).stdout == "#!/bin/sh\necho \"ünï $1\"\n"
        assert (await sandbox.read_file(path, max_bytes=9)).stdout == "#!/bin/sh"
        assert (await sandbox.write_file(f"{tmp_path}/blob", bytes(range(256)))).exit_code == 0
        assert (await sandbox.read_file(f"{tmp_path}/nowhere")).exit_code != 0

    with_sandbox(admin, tmp_path, work)
    assert (tmp_path / "blob").read_bytes() == bytes(range(256))


def test_a_command_longer_than_a_request_of_rock_keeps_its_status(admin, tmp_path):
    async def work(sandbox):
        return await sandbox.run_command("echo long; exit 5", workdir=str(tmp_path), timeout=120)

    result = with_sandbox(admin, tmp_path, work)
    assert (result.stdout, result.exit_code) == ("long\n", 5)


def test_the_recipes_own_tool_works_on_it(admin, tmp_path):
    async def work(sandbox):
        from tinker_cookbook.renderers import ToolCall
        from tinker_cookbook.tool_use.tools import handle_tool_call

        tool = HarborBashTool(sandbox, command_timeout=30).bash
        call = ToolCall(id="1", function=ToolCall.FunctionBody(name="bash", arguments='{"command": "echo hello; exit 4"}'))
        return (await handle_tool_call({tool.name: tool}, call)).messages[0]["content"]

    said = with_sandbox(admin, tmp_path, work)
    assert json.loads(said) == {"exit_code": 4, "stdout": "hello\n", "stderr": ""}


def test_a_dead_sandbox_raises_what_the_cookbook_expects(admin, tmp_path):
    async def work(sandbox):
        os.kill(admin.state()["sandboxes"][sandbox.sandbox_id]["pid"], signal.SIGKILL)
        with pytest.raises(SandboxTerminatedError):
            await sandbox.run_command("true")

    with_sandbox(admin, tmp_path, work)


def test_a_rock_that_is_away_is_a_failed_command(admin, tmp_path):
    async def work(sandbox):
        admin.fail(http_503=1)
        return await sandbox.run_command("true")

    result = with_sandbox(admin, tmp_path, work)
    assert result.exit_code == -1 and "503" in result.stderr


def test_the_launcher_says_what_it_wants():
    with pytest.raises(SettingError, match="say `train` or `eval`"):
        main(["fly"])
