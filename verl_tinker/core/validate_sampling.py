"""What a sampling request may contain: every check names the field and the remedy.

Owns the ranges of sampling parameters. Does not check training data: `verl_tinker.core.validate` does.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import NO_TARGET, BaseModelInfo, Matrix, SampleRequest, SamplingParams
from verl_tinker.core.validate import check_tokens

MAX_SAMPLES = 1024
# Flat long before, and float32 would overflow long after.
MAX_TEMPERATURE = 1e4


def check_sample(request: SampleRequest, model: BaseModelInfo) -> SampleRequest:
    """The request with `max_tokens` filled in: what the client asked for, else the rest of the context."""
    check_tokens(request.prompt, model, "prompt")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise UserError(f"num_samples is {request.num_samples}; give 1 to {MAX_SAMPLES}")
    _check_params(request.params, model)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= _most(model):
            raise UserError(f"{name} is {getattr(request, name)}; give 0 to {_most(model)}{_remedy(model)}")
    _check_last_n(request)
    _check_alternatives(request, model)
    if request.target_prompt is not None:
        _check_targets(request, request.target_prompt, model)
    return replace(request, params=replace(request.params, max_tokens=_room(request, model)))


def _most(model: BaseModelInfo) -> int:
    return min(model.max_topk, model.vocab_size)


def _remedy(model: BaseModelInfo) -> str:
    return f", or raise {model.max_topk_key} in the preset" if model.max_topk_key else ""


def _room(request: SampleRequest, model: BaseModelInfo) -> int:
    prompt, wanted = len(request.prompt), request.params.max_tokens
    rest = model.max_context - prompt
    if rest < 1 or (wanted is not None and wanted > rest):
        asked = "at least 1" if wanted is None else str(wanted)
        raise UserError(
            f"prompt ({prompt} tokens) plus sampling_params.max_tokens ({asked}) is more than the context of "
            f"{model.name}, {model.max_context} tokens on this server; shorten the prompt or lower max_tokens"
        )
    return rest if wanted is None else wanted


def _check_params(params: SamplingParams, model: BaseModelInfo) -> None:
    if params.max_tokens is not None and params.max_tokens < 1:
        raise UserError(f"sampling_params.max_tokens is {params.max_tokens}; give at least 1")
    if not 0 <= params.temperature <= MAX_TEMPERATURE:
        raise UserError(f"sampling_params.temperature is {params.temperature}; give 0 (greedy) to {MAX_TEMPERATURE:g}")
    if not 0 < params.top_p <= 1:
        raise UserError(f"sampling_params.top_p is {params.top_p}; give more than 0 and at most 1")
    if params.top_k != -1 and params.top_k < 1:
        raise UserError(f"sampling_params.top_k is {params.top_k}; give at least 1, or -1 for no limit")
    stop = params.stop or []
    if not all(isinstance(s, str) for s in stop) and not all(isinstance(s, int) for s in stop):
        raise UserError("sampling_params.stop mixes strings and token ids; give one kind")
    for entry in stop:
        if entry == "":
            raise UserError("sampling_params.stop holds an empty string, which would match at once")
        if isinstance(entry, int) and not 0 <= entry < model.vocab_size:
            raise UserError(f"sampling_params.stop holds token id {entry}; ids run from 0 to {model.vocab_size - 1}")


def _check_last_n(request: SampleRequest) -> None:
    last, prompt = request.prompt_logprobs_last_n, len(request.prompt)
    if last is None:
        return
    if not request.prompt_logprobs:
        raise UserError("prompt_logprobs_last_n limits prompt log-probabilities; set prompt_logprobs too")
    if not 1 <= last <= prompt - 1:
        raise UserError(
            f"prompt_logprobs_last_n is {last}; a prompt of {prompt} tokens has {prompt - 1} scored positions"
        )


def _check_alternatives(request: SampleRequest, model: BaseModelInfo) -> None:
    limit = _most(model) - request.topk_prompt_logprobs
    if not 0 <= request.prompt_alt_k <= limit:
        raise UserError(
            f"prompt_alt_tokens_k is {request.prompt_alt_k}; give 0 to {limit}, beside a topk_prompt_logprobs of "
            f"{request.topk_prompt_logprobs}{_remedy(model)}"
        )


def _check_targets(request: SampleRequest, targets: Matrix, model: BaseModelInfo) -> None:
    ids, rows = targets.values, len(request.prompt) - 1
    if not np.issubdtype(ids.dtype, np.integer):
        raise UserError(f"target_prompt_logprobs is {ids.dtype}; send token ids as int64")
    if len(targets.shape) != 2 or targets.shape[0] != rows:
        raise UserError(
            f"target_prompt_logprobs has shape {list(targets.shape)}; a prompt of {rows + 1} tokens needs [{rows}, K], "
            "row i for prompt position i + 1"
        )
    bad = (ids < NO_TARGET) | (ids >= model.vocab_size)
    if bad.any():
        at = int(np.argmax(bad))
        raise UserError(
            f"target_prompt_logprobs holds token id {int(ids[at])} in row {int(targets.rows()[at])}; ids of {model.name} "
            f"run from 0 to {model.vocab_size - 1}, and {NO_TARGET} asks for nothing"
        )
    asked = int((ids != NO_TARGET).sum())
    limit = (_most(model) - request.topk_prompt_logprobs - request.prompt_alt_k) * rows
    if not asked:
        raise UserError("target_prompt_logprobs asks for no id; name at least one, or leave it out")
    if asked > limit:
        raise UserError(
            f"target_prompt_logprobs asks for {asked} ids; at most {limit} go with a prompt of {rows + 1} tokens, a "
            f"topk_prompt_logprobs of {request.topk_prompt_logprobs} and a prompt_alt_tokens_k of {request.prompt_alt_k}{_remedy(model)}"
        )
