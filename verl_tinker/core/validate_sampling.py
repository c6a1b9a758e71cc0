"""What a sampling request may contain: every check names the field and the remedy.

Owns the ranges of sampling parameters. Does not check training data: `verl_tinker.core.validate` does.
"""

from __future__ import annotations

from dataclasses import replace

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import BaseModelInfo, SampleRequest, SamplingParams
from verl_tinker.core.validate import check_tokens

MAX_SAMPLES = 1024
# vLLM wants the largest k when it starts, and keeps that many candidates for every scored position.
MAX_TOPK = 128
# Flat long before, and float32 would overflow long after.
MAX_TEMPERATURE = 1e4


def check_sample(request: SampleRequest, model: BaseModelInfo) -> SampleRequest:
    """The request with `max_tokens` filled in: what the client asked for, else the rest of the context."""
    check_tokens(request.prompt, model, "prompt")
    if not 1 <= request.num_samples <= MAX_SAMPLES:
        raise UserError(f"num_samples is {request.num_samples}; give 1 to {MAX_SAMPLES}")
    _check_params(request.params, model)
    for name in ("topk_prompt_logprobs", "topk_sample_logprobs"):
        if not 0 <= getattr(request, name) <= min(MAX_TOPK, model.vocab_size):
            raise UserError(f"{name} is {getattr(request, name)}; give 0 to {min(MAX_TOPK, model.vocab_size)}")
    _check_last_n(request)
    return replace(request, params=replace(request.params, max_tokens=_room(request, model)))


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
