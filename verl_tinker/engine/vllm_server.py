"""verl's own vLLM replica, with versions: AsyncLLM in a Ray actor, workers in processes of their own.

Owns the traffic with AsyncLLM. Does not decide what runs when (`admission` does), and starts nothing that verl does not.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import ray
from verl.workers.rollout.replica import RolloutMode
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer, vLLMReplica
from vllm.lora.request import LoRARequest
from vllm.v1.engine.exceptions import EngineDeadError

from verl_tinker.core.errors import EngineError, SyncError, TinkerError, UserError, WorkerDied
from verl_tinker.core.types import Drawn, SampleRequest, SampleResult
from verl_tinker.engine.admission import Admission, Item, Version, adapter_label
from verl_tinker.engine.fingerprints import Fingerprints, check_adapter, check_received
from verl_tinker.engine.sampling import REFUSALS, Drawing, vllm_params
from verl_tinker.engine.waiting import answer_of

_CACHE_RESET_SECONDS = 10.0
_SHUTDOWN_SECONDS = 20.0
_GPUS_FREE_SECONDS = 30.0


class VersionServer(vLLMHttpServer):
    """One replica's server. Every method may be called while others wait; all run on the actor's event loop."""

    def _post_init(self, cuda_visible_devices: str) -> None:
        super()._post_init(cuda_visible_devices)
        # Requests come through Ray. vLLM's own HTTP port asks for no key, so it stays on this machine.
        self._server_address = "127.0.0.1"
        self.admission = Admission(self.model_config.local_path)
        self._changing_base = False
        self._request_ids = itertools.count(1)
        self._tasks: set[asyncio.Task] = set()

    def _get_worker_extension_cls(self) -> str:
        return "verl_tinker.engine.vllm_worker.TinkerWorkerExtension"

    def _resolve_sleep_level(self) -> int:
        # Level 1 keeps the base weights in host memory; after level 2 a trainer would have to send them again.
        return 1

    async def ping(self) -> int:
        """The process id; raises when vLLM's own watch has seen one of its processes die."""
        try:
            await self.engine.check_health()
        except EngineDeadError as error:
            raise WorkerDied(f"vLLM's processes died: {error}") from error
        return os.getpid()

    async def sample(self, request: SampleRequest, version: int) -> SampleResult:
        """Drawn from exactly `version`."""
        return await self._submit(request, version)

    async def sample_seen(self, request: SampleRequest, version: int) -> AsyncIterator[Drawn | SampleResult]:
        """What is drawn, as it is drawn, and at last the whole result."""
        parts: asyncio.Queue = asyncio.Queue()
        result = self._submit(request, version, parts.put_nowait)
        result.add_done_callback(lambda _: parts.put_nowait(None))
        while (part := await parts.get()) is not None:
            yield part
        yield await result

    def _submit(self, request: SampleRequest, version: int, seen: Callable[[Drawn], None] | None = None) -> asyncio.Future:
        future = asyncio.get_running_loop().create_future()
        self.admission.enqueue(request, version, future, seen)
        self._admit()
        return future

    async def load_version(self, version: int, folder: str, rank: int) -> Fingerprints:
        """Make a folder sampleable; fingerprints of the adapter tensors now in the first worker, by name."""
        loaded: Fingerprints = {}
        if rank:
            answers = await self.engine.collective_rpc("load_version_adapter", args=(version, folder))
            try:
                for wanted, found in answers:
                    check_adapter(wanted, found, version)
            except SyncError:
                await self.engine.remove_lora(version)
                raise
            loaded = answers[0][1]
        self.admission.versions[version] = Version(folder, rank)
        return loaded

    async def unload_version(self, version: int) -> None:
        self.admission.unload(version)
        await self._remove_retired()

    async def shutdown(self) -> None:
        """End vLLM's processes, which a killed actor would leave behind with their shared memory."""
        await asyncio.to_thread(self.engine.shutdown, timeout=_SHUTDOWN_SECONDS / 2)
        # Python's tracker unlinks the memory of those that were killed, once it is told; Ray kills it with this process.
        await asyncio.to_thread(resource_tracker._resource_tracker._stop)

    def _spawn(self, work: Coroutine) -> None:
        task = asyncio.create_task(work)
        # The event loop itself holds tasks weakly.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _admit(self) -> None:
        if self._changing_base:
            return
        for item in self.admission.start():
            self._spawn(self._run(item))
        wanted = self.admission.base_to_load()
        if wanted is not None:
            self._changing_base = True
            self._spawn(self._change_base(*wanted))

    async def _change_base(self, base: int, folder: str) -> None:
        self.admission.base_is_changing()
        try:
            await self._load_base(base, folder)
        except Exception as error:
            for item in self.admission.base_failed(base):
                item.future.set_exception(error if isinstance(error, TinkerError) else EngineError(repr(error)))
        else:
            self.admission.base_loaded(base)
        self._changing_base = False
        self._admit()

    async def _load_base(self, base: int, folder: str) -> None:
        answers = await self.engine.collective_rpc("load_version_base", args=(folder,))
        await self._reset_prefix_cache()
        for received, stale in answers:
            check_received(Path(folder), received)
            if stale:
                raise SyncError(f"after loading version {base}, {stale[0]} still computes with old weights")

    async def _reset_prefix_cache(self) -> None:
        """vLLM refuses while a block is in use, and a request may end here a moment before it ends there."""
        deadline = asyncio.get_running_loop().time() + _CACHE_RESET_SECONDS
        while not await self.engine.reset_prefix_cache():
            if asyncio.get_running_loop().time() > deadline:
                raise EngineError("vLLM did not clear its prefix cache, which holds the old weights' work")
            await asyncio.sleep(0.05)

    async def _run(self, item: Item) -> None:
        try:
            item.future.set_result(await self._answer(item))
        except TinkerError as error:
            item.future.set_exception(error)
        except EngineDeadError as error:
            item.future.set_exception(WorkerDied(f"vLLM's processes died: {error}"))
        except BaseException as error:
            item.future.set_exception(EngineError(f"the sampler failed: {error!r}"))
        finally:
            self.admission.finish(item)
            self._admit()
        await self._remove_retired()

    async def _answer(self, item: Item) -> SampleResult:
        lora = LoRARequest(adapter_label(item.version), item.version, item.adapter) if item.adapter else None
        prompt = {"prompt_token_ids": [int(t) for t in item.request.prompt]}
        drawing = Drawing(item.request, item.seen)
        try:
            params = vllm_params(item.request, self.config.max_model_len, item.seen is not None)
            async for output in self.engine.generate(prompt, params, str(next(self._request_ids)), lora_request=lora):
                self.admission.check_drawn(item, output.lora_request.lora_name if output.lora_request else None)
                drawing.add(output)
        except Exception as error:
            # AsyncLLM wraps some of what it refuses.
            for refusal in (error, error.__cause__):
                if isinstance(refusal, REFUSALS):
                    raise UserError(f"sampling_params: {refusal}") from error
            raise
        return drawing.result(item.version)

    async def _remove_retired(self) -> None:
        for version in self.admission.removable():
            await self.engine.remove_lora(version)


class _WithEnvironment:
    """An actor class whose actors get further environment variables beside those that verl gives them."""

    def __init__(self, actor_class: Any, environment: dict[str, str]):
        self.actor_class = actor_class
        self.environment = environment

    def options(self, *, runtime_env: dict[str, Any], **options):
        variables = {**runtime_env["env_vars"], **self.environment}
        return self.actor_class.options(runtime_env={"env_vars": variables}, **options)


class VersionReplica(vLLMReplica):
    """verl's vLLM replica over VersionServer."""

    def __init__(self, *args, environment: dict[str, str], **kwargs):
        super().__init__(*args, **kwargs)
        self.server_class = _WithEnvironment(ray.remote(VersionServer), environment)

    async def init_standalone(self) -> None:
        # Ray counts a dead replica's GPUs as free a moment after it gave them back, and verl counts but once.
        needed = self.nnodes * self.gpus_per_replica_node
        deadline = time.monotonic() + _GPUS_FREE_SECONDS
        while (await asyncio.to_thread(ray.available_resources)).get("GPU", 0) < needed and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        await super().init_standalone()

    async def close(self) -> None:
        for server in self.servers:
            # Dead already, or too busy to hear: killing it ends it either way.
            with suppress(TinkerError, ray.exceptions.RayError):
                await answer_of("the sampler", "shutdown", server.shutdown.remote(), _SHUTDOWN_SECONDS)
            ray.kill(server)
        self.servers = []
        if self.rollout_mode != RolloutMode.HYBRID:
            for worker in self.workers:
                ray.kill(worker)
        if self.rollout_mode == RolloutMode.STANDALONE:
            for group in self.resource_pool.pgs or [] if self.resource_pool else []:
                ray.util.remove_placement_group(group)
