"""`serve worker` and `serve admin`: ROCK's own services on this machine, in the foreground, on loopback.

Owns the processes that it starts, Ray's among them, and ends those only. Does not touch services that others started.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harbor_env.backend import check_free
from harbor_env.errors import SettingError
from harbor_env.settings import RockServiceSettings, RuntimeSettings, TaskFolder, read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("service", choices=("worker", "admin"))
    parser.add_argument("--task-root", help="the $TASK folder; by default the variable TASK")


def main(options: argparse.Namespace) -> int:
    folder = TaskFolder.found(options.task_root)
    settings = read(folder.config("runtime"), RuntimeSettings).rock
    programs = Path(settings.venv) / "bin"
    if not (programs / "rocklet").is_file():
        raise SettingError(f"{programs} holds no rocklet; run `harbor_env/setup.sh control` with TASK={folder.root}")
    if not folder.config("admin").is_file():
        raise SettingError(f"{folder.config('admin')} is missing; run `python -m harbor_env configure` first")
    environment, log = rock_environment(folder, programs), folder.root / "logs" / f"rock-{options.service}.log"
    if options.service == "worker":
        check_free(settings.worker_port, "ROCK's worker", "rock.worker_port in config/runtime.yaml")
        return foreground([worker_command(programs, settings)], environment, log)
    check_free(settings.admin_port, "ROCK's admin", "rock.admin_port in config/runtime.yaml")
    check_free(settings.ray_port, "ROCK's Ray", "rock.ray_port in runtime.yaml and ray.address in admin.yaml")
    # Ray's sockets lie below its folder, and the path of a socket is limited to about a hundred letters.
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as place:
        return foreground([ray_command(programs, settings, place), admin_command(programs, settings)], environment, log)


def rock_environment(folder: TaskFolder, programs: Path) -> dict[str, str]:
    """Variables that worker, admin and Ray must agree on."""
    status = folder.root / "state" / "rock"
    status.mkdir(parents=True, exist_ok=True)
    own = {"ROCK_WORKER_ENV_TYPE": "docker", "ROCK_ADMIN_ENV": "local", "ROCK_ADMIN_ROLE": "admin",
           "ROCK_TIME_ZONE": "Etc/UTC", "ROCK_CONFIG": str(folder.config("admin")), "ROCK_SERVICE_STATUS_DIR": str(status),
           "RAY_USAGE_STATS_ENABLED": "0", "PATH": f"{programs}:{os.environ.get('PATH', '/usr/bin:/bin')}"}
    return {**{k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}, **own}


def worker_command(programs: Path, settings: RockServiceSettings) -> list[str]:
    return [str(programs / "rocklet"), "--host", "127.0.0.1", "--port", str(settings.worker_port)]


def ray_command(programs: Path, settings: RockServiceSettings, place: str) -> list[str]:
    """Logical resources well above the real ones: an actor whose start failed keeps its share."""
    port = settings.ray_port
    return [str(programs / "ray"), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}",
            f"--ray-client-server-port={port + 1}", "--min-worker-port=31000", "--max-worker-port=31200",
            "--include-dashboard=false", "--disable-usage-stats", "--num-cpus=64", "--memory=256000000000",
            "--object-store-memory=200000000", f"--temp-dir={place}"]


def admin_command(programs: Path, settings: RockServiceSettings) -> list[str]:
    return [str(programs / "uvicorn"), "rock.admin.main:create_app", "--factory",
            "--host", "127.0.0.1", "--port", str(settings.admin_port)]


def foreground(commands: list[list[str]], environment: dict[str, str], log: Path) -> int:
    """Run the commands, one after the other began, until the first ends or a signal comes; then end all, the last first."""
    log.parent.mkdir(parents=True, exist_ok=True)
    started: list[subprocess.Popen] = []
    stopping = False

    def stop(number, _):
        nonlocal stopping
        stopping = True

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    with open(log, "a") as output:
        try:
            for command in commands:
                started.append(subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT,
                                                start_new_session=True))
                print(f"{Path(command[0]).name} runs as process {started[-1].pid}; its log is {log}", flush=True)
                if command is not commands[-1]:
                    time.sleep(8)  # The admin gives up when Ray is not there yet.
            while not stopping and all(process.poll() is None for process in started):
                time.sleep(0.2)
        finally:
            ended = [process for process in started if process.poll() is not None]
            for process in reversed(started):
                end_group(process)
    if stopping:
        return 0
    print(f"{Path(ended[0].args[0]).name} ended with status {ended[0].returncode}; see {log}", file=sys.stderr)
    return 1


def end_group(process: subprocess.Popen) -> None:
    """The process and all that it started, and nothing else."""
    for number, seconds in ((signal.SIGTERM, 15), (signal.SIGKILL, 5)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        limit = time.monotonic() + seconds
        while time.monotonic() < limit and _group_lives(process):
            time.sleep(0.1)
    process.poll()


def _group_lives(process: subprocess.Popen) -> bool:
    process.poll()
    try:
        os.killpg(process.pid, 0)
        return True
    except ProcessLookupError:
        return False
