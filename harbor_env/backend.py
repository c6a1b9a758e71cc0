"""Our server, started by its command line for one run, and ended with it.

Owns the process and its log. Imports nothing of the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from harbor_env.errors import SettingError
from harbor_env.settings import BackendSettings, TaskFolder

log = logging.getLogger(__name__)
ROOT = Path(__file__).resolve().parents[1]
STOP_SECONDS = 150


def check_free(port: int, what: str, where: str, host: str = "127.0.0.1") -> None:
    """SettingError when somebody listens on the port already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise SettingError(f"port {port} for {what} cannot be had ({error.strerror}); end what uses it, or change "
                               f"{where}") from error


@dataclass(frozen=True)
class Backend:
    """A ready server. `died` is done, with the reason, once it has ended by itself; of one elsewhere it never is."""

    url: str
    died: asyncio.Future[str]


def running_elsewhere(url: str) -> Backend:
    return Backend(url, asyncio.get_running_loop().create_future())


@asynccontextmanager
async def backend(folder: TaskFolder, settings: BackendSettings, job: str) -> AsyncIterator[Backend]:
    """A server while it is ready; it has ended when the block is left."""
    check_free(settings.port, "the server", "backend.port in config/runtime.yaml", settings.host)
    logs = folder.root / "jobs" / job
    logs.mkdir(parents=True)
    log.info("TINKER_SERVER_JOB %s", json.dumps({"job": job, "log_dir": str(logs)}))
    command = [settings.python, "-m", "verl_tinker.start", "--config", str(folder.config("engine")),
               "--set", f"server.host={settings.host}", "--set", f"server.port={settings.port}",
               "--set", f"server.checkpoint_dir={settings.checkpoint_dir}", *_downloaded(folder, settings)]
    with open(logs / "server.log", "w") as output:
        # A session of its own: Ctrl-C reaches the run alone, which then ends the server in good order.
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=output, stderr=asyncio.subprocess.STDOUT,
                                                       start_new_session=True)
    ready = running_elsewhere(f"http://{settings.host}:{settings.port}")
    try:
        await _wait_until_ready(process, ready.url, settings.start_seconds, logs / "server.log")
        watching = asyncio.create_task(_watch(process, ready.died, logs / "server.log"))
        try:
            yield ready
        finally:
            watching.cancel()
    finally:
        await asyncio.shield(asyncio.create_task(_stop(process)))


def _downloaded(folder: TaskFolder, settings: BackendSettings) -> list[str]:
    """Weights from ModelScope are fetched here, because the server knows the Hugging Face hub only."""
    if settings.download_type != "MODELSCOPE":
        return []
    import yaml

    name = yaml.safe_load(folder.config("engine").read_text())["server"]["model_name"]
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise SettingError("--model-download-type MODELSCOPE needs the package modelscope in the control environment; "
                           "install it there with `uv pip install modelscope`") from error
    return ["--set", f"server.model_path={snapshot_download(name)}"]


async def _wait_until_ready(process, url: str, seconds: float, output: Path) -> None:
    limit, phase = time.monotonic() + seconds, ""
    async with httpx.AsyncClient(timeout=5, trust_env=False) as http:
        while time.monotonic() < limit:
            if process.returncode is not None:
                raise SettingError(f"the server ended with status {process.returncode}: {last_line(output)} (all of it is "
                                   f"in {output})")
            try:
                answer = await http.get(f"{url}/api/v1/healthz")
                said = answer.json()
                if answer.status_code == 200:
                    log.info("the server is ready at %s", url)
                    return
                if said.get("status") == "failed":
                    raise SettingError(f"the server could not start: {said.get('reason')} (all of it is in {output})")
                if said.get("phase") != phase:
                    phase = said.get("phase")
                    log.info("starting the server: %s", phase)
            except (httpx.TransportError, ValueError) as error:
                if isinstance(error, SettingError):
                    raise
            await asyncio.sleep(0.5)
    raise SettingError(f"the server was not ready after {seconds:.0f} s, still {phase!r}; see {output}")


async def _watch(process, died: asyncio.Future, output: Path) -> None:
    status = await process.wait()
    died.set_result(f"the server ended with status {status}: {last_line(output)} (all of it is in {output})")


async def _stop(process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        await asyncio.wait_for(process.wait(), STOP_SECONDS)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def last_line(file: Path) -> str:
    lines = file.read_text(errors="replace").strip().splitlines() if file.is_file() else []
    return lines[-1] if lines else "it said nothing"
