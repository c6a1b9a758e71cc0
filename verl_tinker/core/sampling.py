"""Sampling: many requests at once, each from the one version its sampler stands for.

Owns the bound on concurrent samples and their identities. Touches no training state and waits for no training step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from verl_tinker.core.access import Caller
from verl_tinker.core.checkpoints import parse_path
from verl_tinker.core.completions import CompletionTable
from verl_tinker.core.errors import EngineError, Overloaded, TinkerError, UserError, WrongWeights
from verl_tinker.core.fair import FairSlots
from verl_tinker.core.futures import Future, FutureStore
from verl_tinker.core.records import RecordRing
from verl_tinker.core.samplers import Sampler, SamplerTable
from verl_tinker.core.sessions import SessionTable
from verl_tinker.core.types import EMPTY_CELL, Drawn, SampleRequest, SampleResult, TopK
from verl_tinker.core.validate import find_model
from verl_tinker.core.validate_sampling import MAX_SAMPLES, check_sample
from verl_tinker.core.versions import VersionTable
from verl_tinker.engine.base import Engine

log = logging.getLogger(__name__)


class Sampling:
    """Answers each sample request at once with a future, and runs at most `max_concurrent` of them together.

    At most `max_waiting` are accepted and not yet ended; owners and samplers take turns.
    """

    def __init__(
        self,
        engine: Engine,
        futures: FutureStore,
        sessions: SessionTable,
        samplers: SamplerTable,
        versions: VersionTable,
        max_concurrent: int,
        max_waiting: int,
        records: RecordRing,
    ):
        self._engine = engine
        self._futures = futures
        self._sessions = sessions
        self._samplers = samplers
        self._versions = versions
        self._max_waiting = max_waiting
        self._records = records
        self._slots = FairSlots(max_concurrent)
        self._accepted: OrderedDict[tuple[str, int], Future] = OrderedDict()
        self._tasks: dict[str, asyncio.Task] = {}
        self.completions = CompletionTable()
        # How often other weights answered than were asked for, since the server started.
        self.mismatches = 0

    def create_session(
        self,
        caller: Caller,
        session_id: str,
        sampling_session_seq_id: int,
        base_model: str | None,
        model_path: str | None,
    ) -> Sampler:
        """A sampler for a saved path or a base model; the same one for the same number."""
        session = self._sessions.open(session_id, caller)
        sampler_id = f"{session_id}:sample:{sampling_session_seq_id}"
        known = self._samplers.find(sampler_id)
        if known:
            return _same(known, base_model, model_path)
        if not base_model and not model_path:
            raise UserError("base_model and model_path are both missing; give one of them")
        if model_path:
            sampler = self._samplers.of_path(sampler_id, session_id, parse_path(model_path), session.owner)
        else:
            sampler = Sampler(sampler_id, session_id, base_model, session.owner)
        self._check_sampleable(sampler)
        return self._samplers.add(sampler)

    def _check_sampleable(self, sampler: Sampler) -> None:
        model = find_model(self._engine.base_models(), sampler.base_model)
        if not model.sampleable:
            raise UserError(f"base_model {model.name!r} is served for training only, by this server's preset")

    def submit_by_name(
        self, caller: Caller, name: str, request: SampleRequest, seen: Callable[[Drawn], None] | None = None
    ) -> Future:
        """Accept a request to a base model, or to a path of saved sampler weights, that belongs to no session.

        `seen` is told of tokens as they are drawn.
        """
        if name.startswith("tinker://"):
            sampler = self._samplers.of_path(f"by name: {name}", "", parse_path(name), caller or "")
        else:
            sampler = Sampler(f"by name: {name}", "", name, caller or "")
        self._check_sampleable(sampler)
        return self._accept(sampler, None, request.num_samples, request, seen)

    def submit(
        self, caller: Caller, sampler_id: str, seq: int | None, sequences: int, request: SampleRequest | TinkerError
    ) -> Future:
        """Accept a request, or return the future of the one that already has this seq.

        A request that cannot be read comes as its error. NotFound when the sampler is unknown, Overloaded when too
        many wait; then nothing is registered.
        """
        sampler = self._samplers.get(sampler_id, caller)
        known = self._accepted.get((sampler_id, seq))
        if known and known.request_id in self._futures:
            return known
        return self._accept(sampler, seq, sequences, request)

    def _accept(
        self, sampler: Sampler, seq: int | None, sequences: int, request: SampleRequest | TinkerError,
        seen: Callable[[Drawn], None] | None = None,
    ) -> Future:
        sampler_id = sampler.sampler_id
        if len(self._tasks) >= self._max_waiting:
            raise Overloaded(f"{len(self._tasks)} samples wait already (server.max_waiting_samples); send this one again")
        future = self._futures.create("sample", None, sampler.owner, min(max(sequences, 0), MAX_SAMPLES))
        future.state = lambda: f"waits for one of the sampler's places; {len(self._tasks)} samples are accepted"
        if seq is not None:
            self._accepted[sampler_id, seq] = future
            self._forget_dropped()
        task = asyncio.get_running_loop().create_task(self._run(future, sampler, request, seen))
        self._tasks[future.request_id] = task
        task.add_done_callback(lambda _: self._ended(sampler, seq or 0, future))
        return future

    def cancel(self, future: Future) -> None:
        """End a sample that nobody waits for any more; one that has ended stays as it is."""
        task = self._tasks.get(future.request_id)
        if task:
            future.fail(UserError("this sample was cancelled by its client"))
            task.cancel()

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _ended(self, sampler: Sampler, seq: int, future: Future) -> None:
        self._tasks.pop(future.request_id, None)
        if sampler.session_id:
            self.completions.add(sampler.sampler_id, seq, future)

    def _forget_dropped(self) -> None:
        while self._accepted:
            key, first = next(iter(self._accepted.items()))
            if first.request_id in self._futures:
                return
            del self._accepted[key]

    async def _run(
        self, future: Future, sampler: Sampler, request: SampleRequest | TinkerError, seen: Callable[[Drawn], None] | None
    ) -> None:
        try:
            if sampler.session_id:
                # The session's own client went through the key check when it submitted.
                self._sessions.open(sampler.session_id, None)
            if isinstance(request, TinkerError):
                raise request
            request = check_sample(request, find_model(self._engine.base_models(), sampler.base_model))
            request = replace(request, affinity=sampler.sampler_id)
            async with self._slots.slot(sampler.owner, sampler.sampler_id):
                future.state = lambda: "sample is running"
                self._futures.begin([future])
                result = await self._sample(sampler, request, seen)
            if request.record:
                self._records.add(sampler.session_id, future.sequence_ids, result)
            await self._futures.succeed(future, result)
        except TinkerError as error:
            if isinstance(error, WrongWeights):
                self.mismatches += 1
                log.error("sample of %s: %s", sampler.sampler_id, error)
            future.fail(error)
        except asyncio.CancelledError:
            future.fail(EngineError("the server stopped while this sample ran"))
            raise
        except Exception as error:
            log.exception("sample of %s failed", sampler.sampler_id)
            future.fail(EngineError(f"sample failed inside the server: {type(error).__name__}: {error}"))

    async def _sample(
        self, sampler: Sampler, request: SampleRequest, seen: Callable[[Drawn], None] | None
    ) -> SampleResult:
        version = await self._samplers.version(sampler)
        if version is None:
            return self._checked(await self._engine.sample(sampler.base_model, 0, request, seen), 0, request)
        async with self._versions.using(version):
            result = await self._engine.sample(sampler.base_model, version.number, request, seen)
        return self._checked(result, version.number, request)

    def _checked(self, result: SampleResult, number: int, request: SampleRequest) -> SampleResult:
        if result.version != number:
            raise WrongWeights(
                f"weights version {number} was asked for and version {result.version} answered; not returned"
            )
        if len(result.sequences) != request.num_samples:
            raise EngineError(f"{request.num_samples} sequences were asked for and {len(result.sequences)} returned")
        if request.prompt_logprobs_last_n is None:
            return result
        return _only_last(result, len(request.prompt) - request.prompt_logprobs_last_n)


def _only_last(result: SampleResult, first: int) -> SampleResult:
    """Blank the prompt positions before `first`: the client refuses an answer that shows them."""
    logprobs, topk = result.prompt_logprobs, result.topk_prompt
    if logprobs is not None:
        logprobs = logprobs.astype(np.float32, copy=True)
        logprobs[:first] = np.nan
    if topk is not None:
        topk = TopK(topk.ids.copy(), topk.logprobs.copy())
        topk.ids[:first] = 0
        topk.logprobs[:first] = EMPTY_CELL
    return replace(result, prompt_logprobs=logprobs, topk_prompt=topk)


def _same(known: Sampler, base_model: str | None, model_path: str | None) -> Sampler:
    """The sampler that a repeated create finds; UserError when the repeat asks for other weights."""
    if (model_path and model_path != str(known.path)) or (base_model and not model_path and base_model != known.base_model):
        raise UserError(
            f"sampling_session_seq_id: {known.sampler_id} stands for {known.path or known.base_model} already; give "
            f"{model_path or base_model} a number of its own"
        )
    return known
