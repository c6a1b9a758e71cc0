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

from verl_tinker.checks import check_machine, unwritable
from verl_tinker.core.errors import TinkerError
from verl_tinker.config import ENGINES, Config, add_arguments, load_config, print_config
from verl_tinker.models import ModelError, resolve_model
from verl_tinker.schema import ConfigError

log = logging.getLogger("verl_tinker")

# How often the workers are asked whether they are alive. A dead one answers at once, a busy one later.
_WATCH_SECONDS = 5.0
_START_GRACE_SECONDS = 120.0
# An engine that dies more often than this is not started again: something is wrong with the machine or the preset.
_MOST_RESTARTS, _RESTART_WINDOW = 3, 1800.0
_SIGNAL_SECONDS = 0.2


def engine_settings(config: Config, work_folder: Path):
    """What the engine needs of a preset. Downloads or converts the model when it is not there yet."""
    from omegaconf import OmegaConf

    from verl_tinker.core.types import BaseModelInfo
    from verl_tinker.engine.settings import EngineSettings

    folder = resolve_model(config.models[config.server.model_name], config.cache_dir)
    for name, place in config.server.model_aliases.items():
        if resolve_model(place, config.cache_dir) != folder:
            raise ConfigError(f"server.model_aliases.{name}: {place} is another model than server.model_path; "
                              "one server trains one base model")
    limit, vocabulary, is_tied = _description(folder)
    context = min(config.context_length, limit)
    verl = OmegaConf.merge(config.actor_rollout_ref, {"model": {"path": str(folder)}})
    infos = [
        BaseModelInfo(name, context, vocabulary, is_tied, True, config.has_rollout)
        for name in config.models
    ]
    return EngineSettings(
        device=config.device,
        verl_config=verl,
        models=infos,
        model_folder=folder,
        work_folder=work_folder,
        n_workers_per_node=config.trainer.n_gpus_per_node,
        nnodes=config.trainer.nnodes,
        mode=config.actor.mode,
        lora_alpha=config.actor.lora_alpha,
        max_lora_rank=config.actor.max_lora_rank,
        keep_versions=config.server.keep_versions,
        has_rollout=config.has_rollout,
        rollout_args=_rollout_args(verl.rollout) if config.has_rollout else {},
        replica="in_process" if config.device == "cpu" else "stock",
        takes_turns=config.device == "cuda" and config.has_rollout and _is_offloaded(verl.actor),
        threads=config.cpu.threads,
        kv_cache_gb=config.cpu.kv_cache_gb,
        ray_address=config.server.ray_address,
    )


def _description(folder: Path) -> tuple[int, int, bool]:
    """A model's longest sequence in tokens, its vocabulary, and whether input and output share an embedding."""
    from transformers import AutoConfig

    try:
        model = AutoConfig.from_pretrained(folder)
        return model.max_position_embeddings, model.vocab_size, bool(model.tie_word_embeddings)
    except Exception as error:  # Each architecture checks its own description, with errors of any type.
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelError(f"server.model_path: transformers cannot read {folder / 'config.json'} ({reason}); give the folder "
                         "of a causal language model that this version of transformers knows") from error


def _rollout_args(rollout) -> dict:
    """verl's rollout section in vLLM's words, for vLLM in one process; verl's own replica translates it itself."""
    if rollout.data_parallel_size != 1:
        raise ConfigError(f"actor_rollout_ref.rollout.data_parallel_size is {rollout.data_parallel_size}; it must be 1: "
                          "every tensor_model_parallel_size GPUs are a replica of their own")
    return {
        "dtype": rollout.dtype,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": rollout.max_num_batched_tokens,
        "enforce_eager": rollout.enforce_eager,
        "enable_prefix_caching": rollout.enable_prefix_caching,
        "enable_chunked_prefill": rollout.enable_chunked_prefill,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "seed": rollout.get("seed", 0) or 0,
    }


def _snapshot_memory(config: Config) -> int:
    """Bytes. The replicas of other machines do not see this one's memory."""
    alone = config.trainer.nnodes == 1 and not config.server.ray_address
    return int(config.server.snapshot_memory_gb * 2**30) if alone else 0


def _is_offloaded(actor) -> bool:
    """Does the trainer leave the GPUs' memory between commands?"""
    return bool(actor[ENGINES[actor.strategy][1]].get("param_offload"))


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
        from verl_tinker.core.access import Keys
        from verl_tinker.core.service import Service
        from verl_tinker.engine.verl_engine import VerlEngine

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
                keep_last_checkpoints=config.server.keep_last_checkpoints,
            )
            app = create_app(
                self.service, allow_shutdown=config.allow_shutdown, on_shutdown=self.stopping.set, keys=keys,
                changed_flags=config.server.client_flags)
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
    root = str(Path(__file__).resolve().parent.parent)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))


if __name__ == "__main__":
    main()
