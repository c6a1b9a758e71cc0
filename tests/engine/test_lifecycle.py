"""What is left when a server ends: nothing, however it ends."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
from lifecycle import TINY, assert_nothing_left, family, folders, shared_memory
from live_engine import Live
from real_server import ROOT, free_port, start_server

from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("way", ["SIGINT", pytest.param("shutdown", marks=pytest.mark.full)])
def test_a_stopped_server_leaves_nothing(tmp_path, way):
    memory, before = shared_memory(), folders()
    process, url = start_server(tmp_path, TINY)
    members = family(process.pid)
    assert len(members) > 4
    if way == "SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        assert httpx.post(f"{url}/api/v1/shutdown").status_code == 200
    assert process.wait(timeout=60) == 0, (tmp_path / "server.log").read_text()[-2000:]
    assert_nothing_left(members, url, memory, before)


@pytest.mark.full
def test_a_killed_server_takes_its_processes_along(tmp_path):
    process, url = start_server(tmp_path, TINY)
    members = family(process.pid)
    process.kill()
    process.wait()
    # Ray's agents look for their parent from time to time only.
    _, alive = psutil.wait_procs(members, timeout=180)
    assert not alive, [p.cmdline()[:3] for p in alive]


@pytest.mark.full
@pytest.mark.parametrize("phase", ["starting Ray", "starting the trainer and the sampler"])
def test_a_server_that_is_stopped_while_it_starts_leaves_nothing(tmp_path, phase):
    memory, before = shared_memory(), folders()
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "verl_tinker.start", "--config", "configs/quick_start/cpu.yaml", f"--set={TINY}",
         f"--set=server.port={port}", f"--set=server.checkpoint_dir={tmp_path}"], cwd=ROOT)
    url = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        try:
            if httpx.get(f"{url}/api/v1/healthz", timeout=20).json()["phase"] == phase:
                break
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    time.sleep(4)
    members = family(process.pid)
    process.terminate()
    assert process.wait(timeout=200) == 0
    assert_nothing_left(members, url, memory, before)


def test_a_dead_sampler_is_noticed_while_the_trainer_works(tmp_path):
    live = Live([], tmp_path)

    async def never(*args):
        await asyncio.Event().wait()

    async def dead():
        raise EngineError("the sampler's process died")

    async def check():
        live.engine.trainer, live.engine.sampler = SimpleNamespace(call=never, stuck=None), SimpleNamespace(check=dead)
        with pytest.raises(EngineError, match="sampler's process died"):
            await asyncio.wait_for(live.engine.check(), 5)
        live.engine._trainer_ping.cancel()

    live.do(check())
    live.runner.close()


def test_the_next_server_removes_what_a_killed_one_left():
    from verl_tinker.engine import cluster

    left, held = (Path(tempfile.mkdtemp(prefix="vt-", dir="/tmp")) for _ in range(2))
    (left / "lock").touch()
    with cluster._locked(held):
        cluster._remove_folders_of_dead_servers()
        assert not left.exists() and held.exists()
    shutil.rmtree(held)
