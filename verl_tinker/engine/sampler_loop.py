"""One vLLM engine and the thread that steps it: admission, versions, results.

Owns which weights are in the engine and which requests run on them. Does not know Ray or the trainer.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from vllm import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from verl_tinker.core.errors import EngineError, Evicted, SyncError, TinkerError, UserError
from verl_tinker.core.types import SampleRequest, SampleResult
from verl_tinker.engine import vllm_weights
from verl_tinker.engine.sampling import sample_result, vllm_params

BASE = 0


@dataclass(frozen=True)
class Version:
    """Weights that can be sampled. `rank` 0 is full weights; the folder is immutable while the version lives."""

    folder: str
    rank: int

    @property
    def is_adapter(self) -> bool:
        return self.rank > 0


@dataclass
class _Waiting:
    """`loaded` None is the base model; `base` is the version whose full weights the request needs."""

    request: SampleRequest
    version: int
    loaded: Version | None
    base: int
    future: Future


class SamplerLoop:
    """Runs requests in order of arrival, grouped by the base weights they need.

    Adapters answer side by side. Full-weight versions take turns: once a request for other weights waits,
    later requests queue behind it, so none starves.
    """

    def __init__(self, engine_args: dict, base_folder: str):
        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        self.max_context = self.engine.model_config.max_model_len
        self.base_folder = base_folder
        self.loaded_base = BASE
        self.versions: dict[int, Version] = {}
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._waiting: deque[_Waiting] = deque()
        self._running: dict[str, _Waiting] = {}
        self._retired: set[int] = set()
        self._counter = 0
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: SampleRequest, version: int) -> Future:
        """A future SampleResult, drawn from exactly `version`."""
        future: Future = Future()
        self._inbox.put(lambda: self._enqueue(request, version, future))
        return future

    def call(self, function: Callable, *args) -> Future:
        """Run a function between two steps of the engine."""
        future: Future = Future()

        def run():
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._inbox.put(run)
        return future

    def close(self) -> None:
        self._closing = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout=30)

    def _run(self) -> None:
        while not self._closing:
            try:
                self._drain(block=not self._running and not self._waiting)
                self._admit()
                if self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        self._finish(output)
            except BaseException as error:
                self._fail_all(error)
        self._fail_all(EngineError("the sampler was closed"))

    def _drain(self, block: bool) -> None:
        if block:
            self._inbox.get()()
        while True:
            try:
                self._inbox.get_nowait()()
            except queue.Empty:
                return

    def _enqueue(self, request: SampleRequest, version: int, future: Future) -> None:
        if version != BASE and version not in self.versions:
            future.set_exception(Evicted(f"version {version} is not loaded in the sampler any more"))
            return
        loaded = self.versions.get(version)
        base = version if loaded is not None and not loaded.is_adapter else BASE
        self._waiting.append(_Waiting(request, version, loaded, base, future))

    def _admit(self) -> None:
        if self._waiting and self._waiting[0].base != self.loaded_base and not self._running:
            self._change_base(self._waiting[0])
        while self._waiting and self._waiting[0].base == self.loaded_base:
            self._start(self._waiting.popleft())

    def _change_base(self, first: _Waiting) -> None:
        """Load the weights of the request that has waited longest, and let all others that need them go first."""
        same = [w for w in self._waiting if w.base == first.base]
        others = [w for w in self._waiting if w.base != first.base]
        try:
            self._load_base(self.base_folder if first.base == BASE else first.loaded.folder, first.base)
        except Exception as error:
            self._waiting = deque(others)
            for item in same:
                item.future.set_exception(error if isinstance(error, TinkerError) else EngineError(repr(error)))
            return
        self._waiting = deque(same + others)

    def _start(self, item: _Waiting) -> None:
        self._counter += 1
        request_id = f"{self._counter}"
        try:
            lora = self._lora_request(item.version, item.loaded) if item.loaded and item.loaded.is_adapter else None
            prompt = {"prompt_token_ids": [int(t) for t in item.request.prompt]}
            self.engine.add_request(request_id, prompt, vllm_params(item.request, self.max_context), lora_request=lora)
        except ValueError as error:
            item.future.set_exception(UserError(f"sampling_params: {error}"))
            return
        except BaseException as error:
            item.future.set_exception(EngineError(f"vLLM refused the request: {error}"))
            return
        self._running[request_id] = item

    def _finish(self, output) -> None:
        item = self._running.get(output.request_id)
        if item is None or not output.finished:
            return
        del self._running[output.request_id]
        try:
            wanted = f"v{item.version}" if item.loaded and item.loaded.is_adapter else None
            drawn = output.lora_request.lora_name if output.lora_request else None
            if drawn != wanted or item.base != self.loaded_base:
                raise EngineError(f"asked version {item.version}, but vLLM answered from {drawn} on {self.loaded_base}")
            item.future.set_result(sample_result(item.request, output, item.version))
        except BaseException as error:
            item.future.set_exception(error)
        self._remove_retired()

    def _fail_all(self, error: BaseException) -> None:
        if self._running:
            self.engine.abort_request(list(self._running))
        for item in [*self._running.values(), *self._waiting]:
            item.future.set_exception(EngineError(f"the sampler failed: {error!r}"))
        self._running.clear()
        self._waiting.clear()

    @staticmethod
    def _lora_request(version: int, loaded: Version) -> LoRARequest:
        # vLLM keys its prefix cache by this name, so it must be unique for ever.
        return LoRARequest(f"v{version}", version, loaded.folder)

    def load(self, version: int, folder: str, rank: int) -> dict[str, str]:
        """Make a folder sampleable; returns fingerprints of what is in the engine. Runs in the loop's thread."""
        loaded = Version(folder, rank)
        if loaded.is_adapter:
            self.engine.add_lora(self._lora_request(version, loaded))
            sent = vllm_weights.adapter_tensors(Path(folder), self.engine.model_config.dtype)
            shapes = {name: tuple(tensor.shape) for name, tensor in sent.items()}
            prints = self.engine.collective_rpc(vllm_weights.loaded_adapter_fingerprints, args=(version, shapes))[0]
            try:
                vllm_weights.check_adapter({n: vllm_weights.fingerprint(t) for n, t in sent.items()}, prints, version)
            except SyncError:
                self.engine.remove_lora(version)
                raise
            self.versions[version] = loaded
            return prints
        self.versions[version] = loaded
        return {}

    def unload(self, version: int) -> None:
        """Refuse the version from now on; requests that were accepted still end on it."""
        loaded = self.versions.pop(version, None)
        if loaded is not None and loaded.is_adapter:
            self._retired.add(version)
            self._remove_retired()

    def _remove_retired(self) -> None:
        if self._retired:
            used = {item.version for item in (*self._running.values(), *self._waiting)}
            for version in self._retired - used:
                self.engine.remove_lora(version)
            self._retired &= used

    def _load_base(self, folder: str, version: int) -> None:
        self.loaded_base = -1
        received = self.engine.apply_model(lambda model: vllm_weights.load_base_weights(model, folder))[0]
        self.engine.reset_prefix_cache()
        vllm_weights.check_received(Path(folder), received)
        stale = self.engine.apply_model(vllm_weights.stale_packed_layers)[0]
        if stale:
            raise SyncError(f"after loading version {version}, {stale[0]} still computes with old weights")
        self.loaded_base = version
