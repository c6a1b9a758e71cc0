"""What goes wrong in an episode has a name in its result file, counts as no reward, and leaves no container."""

import os
import shutil
import signal
import time

import pytest
from chain import HARBOR, containers, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]
SOLVED = ("--scripted", str(HARBOR / "examples" / "scripts" / "median_solved.json"))


def wait_for(condition, process, seconds: float = 240):
    """What `condition` finds while the run goes on; a run that ends before, or takes too long, shows what it said."""
    limit = time.monotonic() + seconds
    while not (found := condition()):
        if time.monotonic() > limit or process.poll() is not None:
            process.send_signal(signal.SIGTERM)
            raise AssertionError(f"it did not come to that:\n{process.communicate(timeout=60)[0][-4000:]}")
        time.sleep(0.2)
    return found


def playing(before: list[str]) -> list[str]:
    """The sandbox's container, once Harbor's job runs in it."""
    # One that is only being made has no processes yet.
    return [name for name in containers() if name not in before and "harbor jobs start" in docker("top", name, check=False)]


def check_named(run, cause: str) -> None:
    summary = run.read("summary.json")
    assert run.code == run.exit_status["exit_code"] == 1
    assert summary["cause"] == cause and summary["reward"] is None and summary["episode_done"] is False, summary


def test_a_sandbox_that_dies_in_mid_episode(chain, server):
    before = containers()
    process = chain.start("rollout", "--base-url", server, *SOLVED)
    (sandbox,) = wait_for(lambda: playing(before), process)
    docker("kill", sandbox)
    check_named(chain.ended(process), "sandbox_died")


def test_ctrl_c_in_mid_episode(chain, server):
    before = containers()
    process = chain.start("rollout", "--base-url", server, *SOLVED)
    wait_for(lambda: playing(before), process)
    process.send_signal(signal.SIGINT)
    assert chain.ended(process).code == 130 and containers() == before


def test_what_a_killed_run_left_is_closed_by_the_next(chain, server):
    before = containers()
    process = chain.start("rollout", "--base-url", server, *SOLVED)
    (sandbox,) = wait_for(lambda: playing(before), process)
    client = wait_for(lambda: [line.split()[0] for line in os.popen(f"pgrep -f -- '-m harbor_env.client .*{chain.root}'")],
                      process)
    for pid in client:
        os.kill(int(pid), signal.SIGKILL)
    chain.ended(process)
    assert sandbox in containers()
    run = chain.run("rollout", "--base-url", server, *SOLVED)
    assert run.code == 0 and f"closed sandbox {sandbox}" in run.log and sandbox not in containers()


def test_a_verifier_without_a_reward(chain, server, tmp_path):
    task = tmp_path / "silent"
    shutil.copytree(chain.root / "assets" / "harbor-tasks" / "median", task)
    (task / "tests" / "test.sh").write_text("#!/bin/bash\necho nothing to say\n")
    before = chain.change(task={"path": str(task)})
    try:
        check_named(chain.run("rollout", "--base-url", server, *SOLVED), "no_reward")
    finally:
        chain.change(**before)


def test_an_image_that_is_not_there(chain, server):
    before = chain.change(environment={"image": "tinker-harbor:missing", "startup_timeout": 60})
    try:
        check_named(chain.run("rollout", "--base-url", server, *SOLVED), "sandbox_not_started")
    finally:
        chain.change(**before)
