"""Translates between our sampling types and vLLM's, inside the process that holds the engine.

Owns the mapping of every sampling parameter and of log-probabilities. Does not run the engine.
"""

from __future__ import annotations

import numpy as np
import vllm.exceptions
from vllm import SamplingParams as VllmParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import SampledSequence, SampleRequest, SampleResult, TopK

# What vLLM raises for a request that it refuses: a ValueError in older versions, a type of its own in newer ones.
REFUSALS = (ValueError, getattr(vllm.exceptions, "VLLMClientError", ValueError))
_EMPTY_LOGPROB = -99999.0
# vLLM reads a seed as a signed 64-bit number.
_SEED_RANGE = 2**63 - 1


class NotNumbers(EngineError):
    """The model's answer holds NaN."""


def vllm_params(request: SampleRequest, max_context: int) -> VllmParams:
    """vLLM's parameters; EOS ends a sample unless the client sent an empty stop list."""
    p = request.params
    stop = p.stop or []
    strings = [s for s in stop if isinstance(s, str)]
    ids = [int(s) for s in stop if not isinstance(s, str)]
    wants_prompt = request.prompt_logprobs or request.topk_prompt_logprobs > 0
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
        prompt_logprobs=request.topk_prompt_logprobs if wants_prompt else None,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def sample_result(request: SampleRequest, output: RequestOutput, version: int) -> SampleResult:
    """Our result of a finished vLLM request."""
    prompt_logprobs = topk_prompt = None
    if output.prompt_logprobs is not None:
        prompt_logprobs = np.full(len(request.prompt), np.nan, np.float32)
        for i, entry in enumerate(output.prompt_logprobs):
            if entry:
                prompt_logprobs[i] = entry[int(request.prompt[i])].logprob
        if request.topk_prompt_logprobs:
            topk_prompt = _topk(output.prompt_logprobs, request.topk_prompt_logprobs)
    sequences = [_sequence(o, request.topk_sample_logprobs) for o in sorted(output.outputs, key=lambda o: o.index)]
    return SampleResult(
        sequences=sequences * (request.num_samples // len(sequences)),
        version=version,
        prompt_logprobs=prompt_logprobs if request.prompt_logprobs else None,
        topk_prompt=topk_prompt,
        cache_hit_tokens=output.num_cached_tokens or 0,
    )


def _sequence(output: CompletionOutput, k: int) -> SampledSequence:
    if output.finish_reason == "abort":
        raise EngineError("vLLM broke the request off")
    tokens = np.asarray(output.token_ids, np.int32)
    logprobs = np.asarray([entry[t].logprob for t, entry in zip(output.token_ids, output.logprobs)], np.float32)
    if np.isnan(logprobs).any():
        raise NotNumbers("the model gave log-probabilities that are not numbers; its weights are no use for this prompt")
    reason = "length" if output.finish_reason == "length" else "stop"
    return SampledSequence(tokens, logprobs, reason, _topk(output.logprobs, k) if k else None)


def _topk(positions, k: int) -> TopK:
    ids = np.zeros((len(positions), k), np.int32)
    logprobs = np.full((len(positions), k), _EMPTY_LOGPROB, np.float32)
    for i, entry in enumerate(positions):
        ranked = sorted((item for item in (entry or {}).items() if item[1].rank <= k), key=lambda item: item[1].rank)
        for j, (token, logprob) in enumerate(ranked[:k]):
            ids[i, j], logprobs[i, j] = token, logprob.logprob
    return TopK(ids, logprobs)
