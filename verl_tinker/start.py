"""Starts the server: preset, models, engine, HTTP, and the end of all of them.

Owns the process from the command line to the last clean-up. Does not handle any request.

    python -m verl_tinker.start --config configs/quick_start/cpu.yaml
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from verl_tinker import logs
from verl_tinker.checks import check_machine, unwritable
from verl_tinker.core.errors import TinkerError
from verl_tinker.config import Config, add_arguments, load_config, print_config
from verl_tinker.models import ModelError
from verl_tinker.schema import ConfigError

log = logging.getLogger("verl_tinker")

# How often the workers are asked whether they are alive. A dead one answers at once, a busy one later.
_WATCH_SECONDS = 5.0
_START_GRACE_SECONDS = 120.0
# An engine that dies more often than this is not started again: something is wrong with the machine or the preset.
_MOST_RESTARTS, _RESTART_WINDOW = 3, 1800.0
_SIGNAL_SECONDS = 0.2


def _snapshot_memory(config: Config) -> int:
    """Bytes. The replicas of other machines do not see this one's memory."""
    alone = config.trainer.nnodes == 1 and not config.server.ray_address
    return int(config.server.snapshot_memory_gb * 2**30) if alone else 0


class Server:
    """One server process: HTTP at once, the engine behind it as soon as it is up."""

    def __init__(self, config: Config, listener: socket.socket):
        self.config = config
        self.listener = listener
        self.address = f"http://{config.server.host}:{listener.getsockname()[1]}"
        self.stopping = asyncio.Event()
        self.settled = asyncio.Event()
        self.exit_code = 0

    async def run(self) -> int:
        import uvicorn

        from verl_tinker.api.app import create_app
        from verl_tinker.api.limits import BoundedProtocol
        from verl_tinker.chat import Tokenizers
        from verl_tinker.core.access import Keys
        from verl_tinker.core.service import Service
        from verl_tinker.engine.verl_engine import VerlEngine
        from verl_tinker.wiring import engine_settings

        config = self.config
        with tempfile.TemporaryDirectory(prefix="verl-tinker-") as work:
            settings = engine_settings(config, Path(work))
            self.engine = VerlEngine(settings)
            keys = Keys(config.api_keys_file) if config.api_keys_file else None
            self.service = Service(
                self.engine,
                config.checkpoint_dir,
                max_runs=config.server.max_training_runs,
                snapshot_memory_bytes=_snapshot_memory(config),
                park_after_s=config.server.park_after_s,
                session_timeout_s=config.server.session_timeout_s,
                max_loaded_versions=config.server.keep_versions,
                max_concurrent_samples=config.server.max_concurrent_samples,
                max_waiting_samples=config.server.max_waiting_samples,
                pack_tokens=config.server.pack_tokens,
                keep_last_checkpoints=config.server.keep_last_checkpoints,
            )
            folders = {info.name: part.model_folder for part in (settings, *settings.teachers) for info in part.models}
            app = create_app(
                self.service, allow_shutdown=config.allow_shutdown, on_shutdown=self.stopping.set, keys=keys,
                changed_flags=config.server.client_flags, tokenizers=Tokenizers(folders))
            http = uvicorn.Server(uvicorn.Config(
                app, http=BoundedProtocol, log_level="warning", timeout_keep_alive=120, timeout_graceful_shutdown=5, lifespan="on"))
            # uvicorn would take the signals for itself and end before the engine is closed.
            http.install_signal_handlers = lambda: None
            http.capture_signals = _no_signals
            return await self._serve(http)

    async def _serve(self, http) -> int:
        serving = asyncio.create_task(http.serve([self.listener]))
        starting = asyncio.create_task(self._start_engine())
        waits = [asyncio.create_task(self.stopping.wait()), serving]
        if self.config.server.server_max_runtime:
            waits.append(asyncio.create_task(asyncio.sleep(self.config.server.server_max_runtime)))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if serving.done():
                self.exit_code = 1
                log.error("%s could not be served", self.address)
        finally:
            log.info("stopping")
            # Ray aborts the process or never returns when it is shut down while it starts something.
            with suppress(TimeoutError):
                await asyncio.wait_for(self.settled.wait(), _START_GRACE_SECONDS)
            await self.service.close()
            http.should_exit = True
            starting.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await starting
            await self.engine.close()
            with suppress(Exception):
                await serving
        return self.exit_code

    @asynccontextmanager
    async def _engine_starts(self) -> AsyncIterator[None]:
        """While the engine starts, a stop waits for it, and signals stay ours: Ray installs handlers that abort."""
        self.settled.clear()
        holding = asyncio.create_task(self._hold_signals())
        try:
            yield
        finally:
            holding.cancel()
            self._take_signals()
            self.settled.set()

    async def _hold_signals(self) -> None:
        while not self.settled.is_set():
            self._take_signals()
            await asyncio.sleep(_SIGNAL_SECONDS)

    def _take_signals(self) -> None:
        for name in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(name, self.stopping.set)

    async def _start_engine(self) -> None:
        async with self._engine_starts():
            try:
                await self.service.start()
            except Exception as error:
                self._tell_failure(error)
                return
        if not self.stopping.is_set():
            key = "one of yours" if self.config.api_keys_file else "tml-local"
            print(f"Ready: TINKER_BASE_URL={self.address} TINKER_API_KEY={key}", flush=True)
        await asyncio.gather(self._watch(), self.service.keep_house())

    def _tell_failure(self, error: Exception) -> None:
        log.exception("the engine did not start")
        self.exit_code = 1
        print(f"The engine did not start: {error}\nGET {self.address}/api/v1/healthz tells the same. Ctrl-C ends the server.",
              file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        """Notice the death of a worker, so that nobody waits for an answer that cannot come, and start the engine again."""
        deaths: list[float] = []
        while True:
            await asyncio.sleep(_WATCH_SECONDS)
            try:
                await self.engine.check()
                continue
            except Exception as error:
                reason = str(error)
            deaths = [at for at in deaths if time.monotonic() - at < _RESTART_WINDOW] + [time.monotonic()]
            if len(deaths) > _MOST_RESTARTS:
                self.exit_code = 1
                self.service.failed(f"{reason}; it is the {len(deaths)}th time in {_RESTART_WINDOW / 60:.0f} minutes")
                return
            async with self._engine_starts():
                try:
                    await self.service.recover(reason)
                except Exception as error:
                    self._tell_failure(error)
                    return


def _no_signals():
    from contextlib import nullcontext

    return nullcontext()


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.start", description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--check", action="store_true", help="print the processed preset and start nothing")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        config = load_config(options.config, options.overrides)
        if options.check:
            print_config(config)
            return
        logs.set_up(config.server.log_format, config.server.log_level)
        check_machine(config)
        _check_writable(config.checkpoint_dir)
        listener = _listen(config.server.host, config.server.port)
        _prepare_environment(config)
        sys.exit(asyncio.run(_run(config, listener)))
    except (ConfigError, ModelError, TinkerError) as error:
        sys.exit(str(error))


async def _run(config: Config, listener: socket.socket) -> int:
    return await Server(config, listener).run()


def _listen(host: str, port: int) -> socket.socket:
    """The server's port, taken before anything slow begins; ConfigError when it is not to be had."""
    # The protocol must be named: asyncio turns Nagle's algorithm off only for a socket that says TCP.
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(4096)
    except OSError as error:
        listener.close()
        raise ConfigError(f"server.host and server.port: cannot listen on {host} port {port} ({error.strerror}); choose "
                          "another, as in --set server.port=8001") from None
    return listener


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise unwritable(folder, error.strerror) from None


def _prepare_environment(config: Config) -> None:
    """Set what must be set before ray and verl are imported; workers find this package by PYTHONPATH."""
    if config.device == "cpu":
        from verl_tinker.engine.cpu.environment import driver_environment

        os.environ.update(driver_environment())
    if config.server.ray_address and "RAY_AUTH_MODE" not in os.environ and _has_ray_token():
        # `ray start` asks for the token wherever there is one, and ray.init does not show it unless told to.
        os.environ["RAY_AUTH_MODE"] = "token"
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


def _has_ray_token() -> bool:
    named = os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH")
    return bool(named) or (Path.home() / ".ray" / "auth_token").is_file()


if __name__ == "__main__":
    main()
