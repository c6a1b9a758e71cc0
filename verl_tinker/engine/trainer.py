"""The actor worker group seen from the server: start it, send it one command at a time, end it.

Owns the Ray handles of the trainer and the time limit of every wait for it. Does not know runs' order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import ray
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.config import omega_conf_to_dataclass

from verl_tinker.core.errors import EngineError, Unresponsive, WorkerDied
from verl_tinker.core.types import Datum, ForwardBackwardResult
from verl_tinker.engine import preset_loss
from verl_tinker.engine.batches import make_batch, read_losses, read_logprobs
from verl_tinker.engine.settings import EngineSettings
from verl_tinker.engine.threads import Threads
from verl_tinker.engine.waiting import answer_of
from verl_tinker.engine.worker import TinkerWorker

# How long the other ranks may take to fail too, or to end what they do.
_REGROUP_SECONDS = 60.0


class Trainer:
    """Blocking calls of verl's worker group, run in threads and bounded in time."""

    def __init__(self, settings: EngineSettings, threads: Threads, environment: dict[str, str]):
        self.settings = settings
        self.threads = threads
        self.environment = environment
        self.actor = omega_conf_to_dataclass(settings.verl_config.actor)
        self.group: RayWorkerGroup | None = None
        self.pool: RayResourcePool | None = None
        self.stuck: Unresponsive | None = None
        self.requests = 0

    async def start(self) -> None:
        await self._bounded(self._start, limit=self.settings.start_timeout_s)

    def _start(self) -> None:
        s = self.settings
        # verl's replica asks Ray for the devices of the workers that it joins, on CPU too: logical ones.
        self.pool = RayResourcePool(
            [s.n_workers_per_node] * s.nnodes, use_gpu=s.device == "cuda" or s.replica == "stock", max_colocate_count=1)
        init = RayClassWithInitArgs(ray.remote(TinkerWorker), config=s.verl_config, role="actor")
        self.group = RayWorkerGroup(
            resource_pool=self.pool, ray_cls_with_init=init, device_name=s.device, worker_env=self.environment)
        self.group.init_model()

    @property
    def dp_size(self) -> int:
        return self.group.world_size // self.settings.sequence_parallel

    async def call(self, method: str, *args) -> Any:
        """A command to every rank; rank 0's answer."""
        return (await self._bounded(getattr(self.group, method), *args))[0]

    async def forward_backward(
        self, run_id: str | None, data: list[Datum], loss_fn: str, config: dict[str, float], backward: bool
    ) -> ForwardBackwardResult:
        """One batch through the selected run; `run_id` None is the base model, forward only."""
        if loss_fn == preset_loss.NAME:
            preset_loss.check_actor(self.actor)
        batch = await asyncio.to_thread(make_batch, run_id, data, loss_fn, config, self.dp_size)
        await self.call("select_run", run_id)
        try:
            return await self._bounded(self._run_batch, batch, data, loss_fn, config, backward)
        except EngineError as error:
            # The others' account of it, a lost connection, says less than the death itself.
            if death := await self._look_at_all_ranks():
                raise death from error
            raise

    async def _look_at_all_ranks(self) -> WorkerDied | None:
        """After a failure: a rank that failed alone leaves the others in a collective that never ends."""
        if self.group.world_size > 1 and self.stuck is None:
            try:
                await self._bounded(self.group.ping, limit=_REGROUP_SECONDS)
            except WorkerDied as death:
                return death
            except EngineError:
                pass
        return None

    def _run_batch(self, batch, data: list[Datum], loss_fn: str, config: dict[str, float], backward: bool) -> ForwardBackwardResult:
        with self._profiled() if backward else nullcontext():
            output = self.group.forward_backward(batch) if backward else self.group.compute_log_prob(batch)
            output = output.get() if hasattr(output, "get") and not hasattr(output, "batch_size") else output
        logprobs = read_logprobs(output, data)
        losses = read_losses(logprobs, data, loss_fn, config, self.actor)
        return ForwardBackwardResult(logprobs, losses, {"loss:sum": float(losses.sum(dtype=np.float64))})

    @contextmanager
    def _profiled(self) -> Iterator[None]:
        """One more training request, traced by verl's profiler where the preset names its number; the first is 1."""
        self.requests += 1
        steps = self.settings.profiled_requests
        if self.requests not in steps:
            yield
            return
        self.group.start_profile(role="train", profile_step=str(self.requests))
        try:
            yield
        finally:
            self.group.stop_profile(run_command=self.requests == max(steps))

    async def logprobs(self, run_id: str | None, tokens: np.ndarray) -> np.ndarray:
        """float32[len - 1]: log-probabilities of tokens[1:] under the run, or under the base."""
        datum = Datum(tokens[:-1], {"target_tokens": tokens[1:].astype(np.int64),
                                    "weights": np.zeros(len(tokens) - 1, np.float32)})
        return (await self.forward_backward(run_id, [datum], "cross_entropy", {}, False)).logprobs[0]

    async def _bounded(self, function, *args, limit: float | None = None) -> Any:
        limit = limit or self.settings.timeout_s
        # verl names the class of a bound method after it.
        name = getattr(function, "__name__", type(function).__name__)
        try:
            return await answer_of("the trainer", name, self.threads.run(function, *args), limit)
        except Unresponsive as error:
            # Its workers wait for each other for ever when one of them failed alone.
            self.stuck = error
            raise

    def close(self) -> None:
        if self.group is not None:
            for worker in self.group.workers:
                ray.kill(worker)
            self.group = None
        if self.pool is not None:
            for group in self.pool.pgs or []:
                ray.util.remove_placement_group(group)
            self.pool = None
