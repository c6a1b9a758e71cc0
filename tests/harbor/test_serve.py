"""`serve` runs ROCK's services in the foreground with the variables that they must share, and ends its own processes only.

The programs here stand in ROCK's place; the services themselves come with the containers.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from harbor_env.serve import admin_command, ray_command, rock_environment, worker_command
from harbor_env.settings import RockServiceSettings, TaskFolder

ROOT = Path(__file__).resolve().parents[2]
LISTENER = """#!{python}
import os, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"])
place = os.environ["ROCK_SERVICE_STATUS_DIR"] + "/" + os.path.basename(sys.argv[0])
open(place, "w").write(f"{{os.getpid()}} {{child.pid}} " + os.environ["ROCK_CONFIG"])
time.sleep(300)
"""


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def folder(tmp_path):
    programs = tmp_path / "rock-venv" / "bin"
    programs.mkdir(parents=True)
    for name in ("rocklet", "uvicorn", "ray"):
        (programs / name).write_text(LISTENER.format(python=sys.executable))
        (programs / name).chmod(0o755)
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "admin.yaml").write_text("ray: {}\n")
    runtime = {"backend": {"python": "python", "checkpoint_dir": str(tmp_path)},
               "client": {"model": "m", "tokenizer": "m", "renderer": "r"},
               "rock": {"admin_port": free_port(), "worker_port": free_port(), "ray_port": free_port(),
                        "venv": str(tmp_path / "rock-venv")}}
    (tmp_path / "config" / "runtime.yaml").write_text(yaml.safe_dump(runtime))
    return TaskFolder(tmp_path)


def serve(folder, service):
    command = [sys.executable, "-m", "harbor_env", "serve", service, "--task-root", str(folder.root)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            start_new_session=True)


def started(folder, name, seconds=60):
    """(pids, what ROCK_CONFIG named) once the program is up."""
    file = folder.root / "state" / "rock" / name
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if file.is_file() and (words := file.read_text().split(" ", 2))[2:]:
            return [int(words[0]), int(words[1])], words[2]
        time.sleep(0.1)
    raise AssertionError(f"{name} did not start")


def lives(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_worker_ends_with_its_terminal_and_all_it_started(folder, number):
    process = serve(folder, "worker")
    pids, config = started(folder, "rocklet")
    assert config == str(folder.config("admin"))
    process.send_signal(number)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "rocklet runs as process" in out and not any(map(lives, pids))


def test_the_admin_brings_its_ray_and_takes_it_along(folder):
    process = serve(folder, "admin")
    ray, admin = started(folder, "ray")[0], started(folder, "uvicorn")[0]
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 0 and not any(map(lives, ray + admin))


def test_a_service_that_ends_by_itself_is_told(folder):
    process = serve(folder, "worker")
    pids, _ = started(folder, "rocklet")
    os.kill(pids[0], signal.SIGKILL)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "rocklet ended with status -9; see" in err and not lives(pids[1])


def test_a_taken_port_is_refused_by_its_name(folder):
    port = yaml.safe_load(folder.config("runtime").read_text())["rock"]["worker_port"]
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        process = serve(folder, "worker")
        _, err = process.communicate(timeout=60)
    assert process.returncode == 2 and f"port {port} for ROCK's worker" in err


def test_what_the_services_must_agree_on(folder, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "elsewhere:1")
    programs = Path("/venv/bin")
    environment = rock_environment(folder, programs)
    assert environment["ROCK_WORKER_ENV_TYPE"] == "docker" and environment["ROCK_CONFIG"] == str(folder.config("admin"))
    assert "RAY_ADDRESS" not in environment and environment["PATH"].startswith("/venv/bin:")
    settings = RockServiceSettings()
    assert worker_command(programs, settings) == ["/venv/bin/rocklet", "--host", "127.0.0.1", "--port", "22555"]
    assert admin_command(programs, settings)[-4:] == ["--host", "127.0.0.1", "--port", "18080"]
    assert {"--port=6390", "--node-ip-address=127.0.0.1"} <= set(ray_command(programs, settings, "/tmp/r"))
