"""What is left when a server ends: nothing, however it ends; and what clients learn when a worker dies."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import tinker
from live_engine import Live
from real_server import ROOT, free_port, start_server, stop_server
from tinker import types

from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(400)
TINY = "server.model_path=bundled:tiny"


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def assert_nothing_left(processes: list[psutil.Process], url: str, memory: set[str], folders: set[Path]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=30)
    assert not alive, [p.cmdline()[:3] for p in alive]
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", int(url.rpartition(":")[2]))) != 0, "the port still answers"
    assert shared_memory() <= memory
    assert set(Path("/tmp").glob("vt-*")) <= folders


@pytest.mark.parametrize("way", ["SIGINT", pytest.param("shutdown", marks=pytest.mark.full)])
def test_a_stopped_server_leaves_nothing(tmp_path, way):
    memory, folders = shared_memory(), set(Path("/tmp").glob("vt-*"))
    process, url = start_server(tmp_path, TINY)
    members = family(process.pid)
    assert len(members) > 4
    if way == "SIGINT":
        process.send_signal(signal.SIGINT)
    else:
        assert httpx.post(f"{url}/api/v1/shutdown").status_code == 200
    assert process.wait(timeout=60) == 0, (tmp_path / "server.log").read_text()[-2000:]
    assert_nothing_left(members, url, memory, folders)


@pytest.mark.parametrize("victim", [pytest.param("TinkerWorker", marks=pytest.mark.full), "SamplerServer"])
def test_a_dead_worker_ends_pending_work_with_its_reason_and_leaves_nothing(tmp_path, victim):
    memory, folders = shared_memory(), set(Path("/tmp").glob("vt-*"))
    process, url = start_server(tmp_path, TINY)
    members = family(process.pid)
    service = tinker.ServiceClient(base_url=url)
    name = service.get_server_capabilities().supported_models[0].model_name
    training = service.create_lora_training_client(base_model=name, rank=8).result()
    sampling = service.create_sampling_client(base_model=name).result()
    worker = next(p for p in members if p.name().startswith("ray::") and victim in " ".join(p.cmdline()))
    long = [sampling.sample(types.ModelInput.from_ints([5, 6, 7]), 1, types.SamplingParams(max_tokens=1500, stop=[]))
            for _ in range(16)]
    datum = types.Datum(model_input=types.ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]})
    worker.kill()
    waiting = long if victim == "SamplerServer" else [training.forward_backward([datum] * 4, "cross_entropy")]
    for future in waiting:
        with pytest.raises(tinker.RequestFailedError) as caught:
            future.result(timeout=120)
        assert "died" in str(caught.value) or "stopping" in str(caught.value), str(caught.value)
    deadline = time.monotonic() + 60
    while (answer := httpx.get(f"{url}/api/v1/healthz")).json()["status"] == "ok" and time.monotonic() < deadline:
        time.sleep(0.5)
    assert answer.status_code == 503 and "died" in answer.json()["reason"], answer.text
    assert stop_server(process) == 1
    assert_nothing_left(members, url, memory, folders)


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
    memory, folders = shared_memory(), set(Path("/tmp").glob("vt-*"))
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
    assert_nothing_left(members, url, memory, folders)


def test_a_dead_sampler_is_noticed_while_the_trainer_works(tmp_path):
    live = Live([], tmp_path)

    async def never(*args):
        await asyncio.Event().wait()

    async def dead():
        raise EngineError("the sampler's process died")

    async def check():
        live.engine.trainer, live.engine.sampler = SimpleNamespace(call=never), SimpleNamespace(ping=dead)
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
