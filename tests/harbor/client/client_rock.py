"""The ROCK client against a real rocklet behind an admin that speaks ROCK's envelope: contract, faults, and clean ends."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support_rock import Admin

from harbor_env.detached import Detached
from harbor_env.errors import RockUnreachable, SandboxDied, SandboxNotStarted
from harbor_env.model_service import ModelService
from harbor_env.pull import Patience, PullRunner
from harbor_env.rock_sandbox import RockSandbox, RockSettings, close_left_over, rock_sandbox

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    server = Admin(tmp_path_factory.mktemp("admin")).start()
    yield server
    server.stop()


def settings(admin, image="task:1", **more):
    return RockSettings(base_url=admin.url + "/", image=image, startup_timeout=30, **more)


def test_a_command_gives_its_own_exit_code_and_both_outputs(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            assert sandbox.sandbox_id in admin.alive()
            outcome = await sandbox.execute(["bash", "-c", "echo out; echo err >&2; exit 7"])
            assert (outcome.stdout, outcome.stderr, outcome.exit_code) == ("out\n", "err\n", 7)
            quoted = await sandbox.execute(["printf", "%s", 'a "b" $c\nd'], cwd="/tmp", env={"PATH": "/usr/bin:/bin"})
            assert quoted.stdout == 'a "b" $c\nd'
            assert (await sandbox.execute(["sleep", "5"], timeout=0.3)).exit_code == -1
            assert (await sandbox.execute(["no-such-program"])).exit_code == -1

    asyncio.run(work())
    assert admin.alive() == []


def test_a_command_that_would_outlive_its_request_is_refused(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            with pytest.raises(ValueError, match="timeout is 100.*detached"):
                await sandbox.execute(["true"], timeout=100)

    asyncio.run(work())


def test_files_arrive_as_they_are(admin, tmp_path):
    (tmp_path / "blob").write_bytes(os.urandom(2_000_000))

    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            home = (await sandbox.execute(["pwd"])).stdout.strip()
            await sandbox.write_text(f"{home}/a/b.txt", "ünï\n'code'")
            await sandbox.upload(str(tmp_path / "blob"), f"{home}/c/blob")
            return home

    home = Path(asyncio.run(work()))
    assert (home / "a/b.txt").read_text() == "ünï\n'code'"
    assert (home / "c/blob").read_bytes() == (tmp_path / "blob").read_bytes()


def test_settings_reach_rock(admin):
    async def work():
        more = {"cluster": "my-cluster", "extra_headers": {"X-Key": "k1"}, "memory": "3g", "cpus": 1.5,
                "auto_clear_seconds": 90}
        async with rock_sandbox(settings(admin, **more)) as sandbox:
            await sandbox.execute(["true"])
            return sandbox.sandbox_id, admin.state()

    name, state = asyncio.run(work())
    assert state["headers"]["x-cluster"] == "my-cluster" and state["headers"]["x-key"] == "k1"
    asked = state["sandboxes"][name]["asked"]
    assert asked["memory"] == "3g" and asked["cpus"] == 1.5
    assert asked["auto_clear_time_minutes"] == 2 and asked["disk"] is None


@pytest.mark.parametrize(("image", "named"), [
    ("missing:1", "no such image missing:1"), ("engine-down:1", "Cannot connect to the Docker daemon"),
    ("refused:1", "memory exceeds max_allowed_spec")])
def test_a_sandbox_that_does_not_start_says_what_rock_said(admin, tmp_path, image, named):
    with pytest.raises(SandboxNotStarted, match=named):
        asyncio.run(RockSandbox.start(settings(admin, image), tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_rock_that_is_not_there_is_named():
    with pytest.raises(RockUnreachable, match="127.0.0.1:9: ConnectError"):
        asyncio.run(RockSandbox.start(RockSettings(base_url="http://127.0.0.1:9", image="task:1")))


def test_a_server_error_is_rock_being_away_and_the_next_call_works(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            admin.fail(http_503=1)
            with pytest.raises(RockUnreachable, match="HTTP status 503"):
                await sandbox.execute(["true"])
            return await sandbox.execute(["true"])

    assert asyncio.run(work()).exit_code == 0


def test_a_sandbox_that_died_is_told_from_a_rock_that_is_away(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            os.kill(admin.state()["sandboxes"][sandbox.sandbox_id]["pid"], signal.SIGKILL)
            with pytest.raises(SandboxDied, match="execute true.*nothing in it answers"):
                await sandbox.execute(["true"])

    asyncio.run(work())
    assert admin.alive() == []


def test_an_error_inside_leaves_no_sandbox(admin, tmp_path):
    async def work():
        async with rock_sandbox(settings(admin), tmp_path):
            assert len(list(tmp_path.iterdir())) == 1
            raise KeyError("anything")

    with pytest.raises(KeyError):
        asyncio.run(work())
    assert admin.alive() == [] and list(tmp_path.iterdir()) == []


def test_a_cancelled_start_leaves_no_sandbox(admin, tmp_path):
    async def work():
        starting = asyncio.create_task(RockSandbox.start(settings(admin), tmp_path))
        while not admin.alive():
            await asyncio.sleep(0.05)
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)

    asyncio.run(work())
    assert admin.alive() == [] and list(tmp_path.iterdir()) == []


HOLD = """
import asyncio, signal, sys
from pathlib import Path
from harbor_env.rock_sandbox import RockSettings, rock_sandbox

async def work():
    async with rock_sandbox(RockSettings(base_url=sys.argv[1], image="task:1"), Path(sys.argv[2])):
        print("holding", flush=True)
        await asyncio.sleep(60)

# Whoever starts the tests in the background has it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
asyncio.run(work())
"""


def holder(admin, notes):
    process = subprocess.Popen([sys.executable, "-c", HOLD, admin.url, str(notes)], stdout=subprocess.PIPE,
                               stderr=subprocess.DEVNULL, text=True)
    assert process.stdout.readline() == "holding\n"
    return process


def test_ctrl_c_leaves_no_sandbox(admin, tmp_path):
    process = holder(admin, tmp_path)
    process.send_signal(signal.SIGINT)
    process.wait(30)
    assert admin.alive() == [] and list(tmp_path.iterdir()) == []


def test_what_a_killed_run_left_is_closed_by_the_next_and_only_that(admin, tmp_path):
    living, killed = holder(admin, tmp_path), holder(admin, tmp_path)
    try:
        by_pid = {json.loads(f.read_text())["pid"]: f.stem for f in tmp_path.iterdir()}
        killed.kill()
        killed.wait(10)
        assert set(admin.alive()) == set(by_pid.values())
        assert asyncio.run(close_left_over(settings(admin), tmp_path)) == [by_pid[killed.pid]]
        assert admin.alive() == [by_pid[living.pid]] and [f.stem for f in tmp_path.iterdir()] == [by_pid[living.pid]]
    finally:
        living.send_signal(signal.SIGINT)
        living.wait(30)


def test_a_long_command_keeps_its_exit_code(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            home = (await sandbox.execute(["pwd"])).stdout.strip()
            command = Detached(sandbox, f"{home}/job")
            await command.start("echo started; echo $COLOUR >&2; sleep 1; exit 7", cwd=home, env={"COLOUR": "dark blue"})
            return await command.wait(30)

    outcome = asyncio.run(work())
    assert (outcome.stdout, outcome.stderr, outcome.exit_code) == ("started\n", "dark blue\n", 7)


def test_a_long_command_that_takes_too_long_is_ended_with_all_it_started(admin):
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            home = (await sandbox.execute(["pwd"])).stdout.strip()
            command = Detached(sandbox, f"{home}/job")
            await command.start("sleep 300 & echo $! > child; wait", cwd=home)
            outcome = await command.wait(1.0)
            child = (await sandbox.execute(["cat", "child"])).stdout.strip()
            return outcome, Path(f"/proc/{child}").exists()

    outcome, left = asyncio.run(work())
    assert outcome.exit_code == -1 and not left


def test_turns_pass_through_rock_to_the_real_model_service(admin):
    """The whole command channel: SDK, admin, rocklet, exchange, model service. A command is lost on the way."""
    async def work():
        async with rock_sandbox(settings(admin)) as sandbox:
            from support_rock import free_port

            home = (await sandbox.execute(["pwd"])).stdout.strip()
            service = ModelService(sandbox, port=free_port(), host="127.0.0.1", folder=f"{home}/ms", python=sys.executable)
            await service.start()
            ended = asyncio.Event()

            async def agent():
                import httpx

                async with httpx.AsyncClient(timeout=60, trust_env=False) as http:
                    answers = []
                    for i in range(4):
                        if i == 2:
                            admin.fail(http_503=2)
                        body = {"messages": [{"role": "user", "content": f"turn {i}"}]}
                        url = f"http://127.0.0.1:{service.port}/v1/chat/completions"
                        answers.append((await http.post(url, json=body)).json())
                ended.set()
                return answers

            async def answer(index, body):
                return {"index": index, "said": body["messages"][0]["content"]}

            asking = asyncio.create_task(agent())
            try:
                await PullRunner(service, answer, Patience(look=5.0)).run(ended)
                return await asking
            finally:
                await service.stop()

    assert asyncio.run(work()) == [{"index": i + 1, "said": f"turn {i}"} for i in range(4)]
