"""One vLLM engine in this process and the thread that steps it.

Owns the thread and the traffic with it. Does not know Ray or the trainer, and `admission` decides what runs when.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

from vllm import EngineArgs
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from verl_tinker.core.errors import EngineError, SyncError, TinkerError, UserError
from verl_tinker.core.types import Drawn, SampleRequest
from verl_tinker.engine import prompt_logprobs, vllm_weights
from verl_tinker.engine.admission import Admission, Item, Version, adapter_label
from verl_tinker.engine.fingerprints import Fingerprints, check_adapter, check_received
from verl_tinker.engine.sampling import REFUSALS, Drawing, NotNumbers, vllm_params


class SamplerLoop:
    """Every method may be called from any thread; only the loop's own thread touches the engine."""

    def __init__(self, engine_args: dict, base_folder: str):
        prompt_logprobs.install()
        self.engine = LLMEngine.from_engine_args(EngineArgs(**engine_args))
        self.max_context = self.engine.model_config.max_model_len
        self.admission = Admission(base_folder)
        self._inbox: queue.SimpleQueue = queue.SimpleQueue()
        self._running: dict[str, Item] = {}
        self._counter = 0
        # Numbers that are none lie in the key-value cache, where later requests would meet them.
        self._spoilt = False
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def submit(self, request: SampleRequest, version: int, seen: Callable[[Drawn], None] | None = None) -> Future:
        """A future SampleResult, drawn from exactly `version`; `seen` is told meanwhile, in the loop's thread."""
        future: Future = Future()
        self._inbox.put(lambda: self._enqueue(request, version, future, seen))
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
                self._drain(block=not self._running and not self.admission.waiting)
                self._admit()
                if self.engine.has_unfinished_requests():
                    for output in self.engine.step():
                        self._receive(output)
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

    def _enqueue(self, request: SampleRequest, version: int, future: Future, seen: Callable[[Drawn], None] | None) -> None:
        try:
            self.admission.enqueue(request, version, future, seen)
        except TinkerError as error:
            future.set_exception(error)

    def _admit(self) -> None:
        if self._spoilt:
            if self._running:
                return
            self.engine.collective_rpc(vllm_weights.clear_kv_cache)
            self.engine.reset_prefix_cache()
            self._spoilt = False
        wanted = self.admission.base_to_load()
        if wanted is not None:
            self._change_base(*wanted)
        for item in self.admission.start():
            self._start(item)

    def _change_base(self, base: int, folder: str) -> None:
        self.admission.base_is_changing()
        try:
            self._load_base(base, folder)
        except Exception as error:
            for item in self.admission.base_failed(base):
                item.future.set_exception(error if isinstance(error, TinkerError) else EngineError(repr(error)))
        else:
            self.admission.base_loaded(base)

    def _load_base(self, base: int, folder: str) -> None:
        received = self.engine.apply_model(lambda model: vllm_weights.load_base_weights(model, folder))[0]
        self.engine.reset_prefix_cache()
        check_received(Path(folder), received)
        stale = self.engine.apply_model(vllm_weights.stale_packed_layers)[0]
        if stale:
            raise SyncError(f"after loading version {base}, {stale[0]} still computes with old weights")

    def _start(self, item: Item) -> None:
        self._counter += 1
        request_id = f"{self._counter}"
        self._running[request_id] = item
        item.drawing = Drawing(item.request, item.seen)
        try:
            lora = LoRARequest(adapter_label(item.version), item.version, item.adapter) if item.adapter else None
            prompt = {"prompt_token_ids": [int(t) for t in item.request.prompt]}
            params = vllm_params(item.request, self.max_context, item.seen is not None)
            self.engine.add_request(request_id, prompt, params, lora_request=lora)
        except REFUSALS as error:
            self._end(request_id).future.set_exception(UserError(f"sampling_params: {error}"))
        except BaseException as error:
            self._end(request_id).future.set_exception(EngineError(f"vLLM refused the request: {error}"))

    def _receive(self, output) -> None:
        item = self._running.get(output.request_id)
        if item is None or (item.seen is None and not output.finished):
            return
        try:
            self.admission.check_drawn(item, output.lora_request.lora_name if output.lora_request else None)
            item.drawing.add(output)
            if not output.finished:
                return
            result = item.drawing.result(item.version)
        except BaseException as error:
            self._spoilt |= isinstance(error, NotNumbers)
            if not output.finished:
                self.engine.abort_request([output.request_id])
            self._end(output.request_id).future.set_exception(error)
        else:
            self._end(output.request_id).future.set_result(result)
        self._remove_retired()

    def _end(self, request_id: str) -> Item:
        item = self._running.pop(request_id)
        self.admission.finish(item)
        return item

    def _fail_all(self, error: BaseException) -> None:
        if self._running:
            self.engine.abort_request(list(self._running))
        for item in self.admission.clear():
            item.future.set_exception(EngineError(f"the sampler failed: {error!r}"))
        self._running.clear()

    def load(self, version: int, folder: str, rank: int) -> Fingerprints:
        """Make a folder sampleable; returns fingerprints of what is in the engine. Runs in the loop's thread."""
        loaded: Fingerprints = {}
        if rank:
            wanted, loaded = self.engine.collective_rpc(vllm_weights.load_adapter, args=(version, folder))[0]
            try:
                check_adapter(wanted, loaded, version)
            except SyncError:
                self.engine.remove_lora(version)
                raise
        self.admission.versions[version] = Version(folder, rank)
        return loaded

    def unload(self, version: int) -> None:
        self.admission.unload(version)
        self._remove_retired()

    def _remove_retired(self) -> None:
        for version in self.admission.removable():
            self.engine.remove_lora(version)
