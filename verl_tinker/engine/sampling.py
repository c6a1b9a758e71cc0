"""Translates between our sampling types and vLLM's, inside the process that holds the engine.

Owns the mapping of every sampling parameter and of log-probabilities. Does not run the engine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import vllm.exceptions
from vllm import SamplingParams as VllmParams
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import EMPTY_CELL, NO_TARGET, Drawn, SampledSequence, SampleRequest, SampleResult, TopK
from verl_tinker.engine.prompt_extras import EXTRA_ARG, Extras

# What vLLM raises for a request that it refuses: a ValueError in older versions, a type of its own in newer ones.
REFUSALS = (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))
# vLLM reads a seed as a signed 64-bit number.
_SEED_RANGE = 2**63 - 1


class NotNumbers(EngineError):
    """The model's answer holds NaN."""


def vllm_params(request: SampleRequest, max_context: int, in_parts: bool = False) -> VllmParams:
    """vLLM's parameters; EOS ends a sample unless the client sent an empty stop list."""
    p = request.params
    stop = p.stop or []
    strings = [s for s in stop if isinstance(s, str)]
    ids = [int(s) for s in stop if not isinstance(s, str)]
    extras = Extras.of(request)
    wants_prompt = request.prompt_logprobs or request.topk_prompt_logprobs > 0 or extras is not None
    columns = 0 if extras is None else extras.columns(len(request.prompt) - 1)
    return VllmParams(
        # vLLM refuses several greedy samples; they are all the same one.
        n=1 if p.temperature == 0 else request.num_samples,
        max_tokens=p.max_tokens if p.max_tokens is not None else max_context - len(request.prompt),
        seed=None if p.seed is None else p.seed % _SEED_RANGE,
        temperature=p.temperature,
        top_k=p.top_k if p.top_k > 0 else 0,
        top_p=p.top_p,
        stop=strings or None,
        stop_token_ids=ids or None,
        ignore_eos=p.stop is not None and not stop,
        include_stop_str_in_output=True,
        detokenize=bool(strings),
        skip_special_tokens=False,
        logprobs=request.topk_sample_logprobs,
        prompt_logprobs=request.topk_prompt_logprobs + columns if wants_prompt else None,
        extra_args=None if extras is None else {EXTRA_ARG: extras.argument()},
        flat_logprobs=True,
        output_kind=RequestOutputKind.CUMULATIVE if in_parts else RequestOutputKind.FINAL_ONLY,
    )


class Drawing:
    """What vLLM has said of one request so far: all at the end, or for `seen` each sequence by itself as it grows."""

    def __init__(self, request: SampleRequest, seen: Callable[[Drawn], None] | None = None):
        self._request, self._seen = request, seen
        self._outputs: dict[int, CompletionOutput] = {}
        self._shown: Counter[int] = Counter()
        self._last: RequestOutput | None = None

    def add(self, output: RequestOutput) -> None:
        self._last = output
        for one in output.outputs:
            self._outputs[one.index] = one
            if self._seen is not None and not output.finished:
                self._show(one)

    def _show(self, one: CompletionOutput) -> None:
        first, count, k = self._shown[one.index], len(one.token_ids), self._request.topk_sample_logprobs
        if first == count:
            return
        ids, logprobs = _table(one.logprobs, count, 1 + k)
        _check_numbers(logprobs)
        self._shown[one.index] = count
        topk = TopK(ids[first:, 1:], logprobs[first:, 1:]) if k else None
        self._seen(Drawn(one.index, np.asarray(one.token_ids[first:], np.int32), logprobs[first:, 0], topk))

    def result(self, version: int) -> SampleResult:
        """Our result, once vLLM has finished."""
        request, last = self._request, self._last
        sequences = [_sequence(self._outputs[i], request.topk_sample_logprobs) for i in sorted(self._outputs)]
        result = SampleResult(
            sequences=sequences * (request.num_samples // len(sequences)),
            version=version,
            cache_hit_tokens=last.num_cached_tokens or 0,
        )
        return result if last.prompt_logprobs is None else replace(result, **_of_prompt(request, last.prompt_logprobs))


def _of_prompt(request: SampleRequest, flat: FlatLogprobs) -> dict:
    """The fields of a SampleResult that were asked for. Columns: the prompt's own token, the top k, targets and draws."""
    extras, k, rows = Extras.of(request), request.topk_prompt_logprobs, len(request.prompt) - 1
    ids, logprobs = _table(flat, rows, 1 + k + (0 if extras is None else extras.columns(rows)))
    found = {}
    if request.prompt_logprobs:
        found["prompt_logprobs"] = np.concatenate([np.float32([np.nan]), logprobs[:, 0]])
    if k:
        empty = np.zeros((1, k), np.int32), np.full((1, k), EMPTY_CELL, np.float32)
        found["topk_prompt"] = TopK(*(np.concatenate([e, t[:, 1 : k + 1]]) for e, t in zip(empty, (ids, logprobs))))
    if extras is not None:
        targets, draws = extras.unpack(ids[:, k + 1 :], logprobs[:, k + 1 :])
        if request.target_prompt is not None:
            values = np.zeros(len(request.target_prompt.values), np.float32)
            values[request.target_prompt.values != NO_TARGET] = targets
            found["target_prompt"] = replace(request.target_prompt, values=values)
        if request.prompt_alt_k:
            found["prompt_alt"] = draws
    return found


def _sequence(output: CompletionOutput, k: int) -> SampledSequence:
    if output.finish_reason == "abort":
        raise EngineError("vLLM broke the request off")
    tokens = np.asarray(output.token_ids, np.int32)
    ids, logprobs = _table(output.logprobs, len(tokens), 1 + k)
    _check_numbers(logprobs)
    reason = "length" if output.finish_reason == "length" else "stop"
    return SampledSequence(tokens, logprobs[:, 0], reason, TopK(ids[:, 1:], logprobs[:, 1:]) if k else None)


def _check_numbers(logprobs: np.ndarray) -> None:
    if np.isnan(logprobs[:, 0]).any():
        raise NotNumbers("the model gave log-probabilities that are not numbers; its weights are no use for this prompt")


def _table(flat: FlatLogprobs, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
    """ids int32[rows, columns] and logprobs float32[rows, columns]: a position's own token first, then the likeliest."""
    shape = (rows, columns)
    return np.asarray(flat.token_ids, np.int32).reshape(shape), np.asarray(flat.logprobs, np.float32).reshape(shape)
