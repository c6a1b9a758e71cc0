"""OpenAI's routes: models, chat completions and completions, over the same sampling as the Tinker API.

Owns the way of a request from text to tokens and back. Holds no state: tokenizers lie in `app.state.tokenizers`.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from starlette.responses import Response

from verl_tinker.api import openai_answer, openai_text
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.openai_answer import Answer, ChatForm, Choice, CompletionForm
from verl_tinker.api.openai_errors import SHAPE, OpenAiRoute
from verl_tinker.api.openai_stream import Delivery, Live
from verl_tinker.api.openai_wire import ChatCompletion, Completing, Completion, Refused
from verl_tinker.api.wire_catalog import LOCAL
from verl_tinker.core.access import Caller
from verl_tinker.core.errors import NotFound
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service
from verl_tinker.core.types import BaseModelInfo, SampleRequest, SampleResult

PREFIXES = ("/v1", "/oai/api/v1")

router = APIRouter(dependencies=[Depends(require_ready)], route_class=OpenAiRoute, responses=SHAPE)


@router.get("/models")
async def list_models(service: ServiceDep, caller: CallerDep) -> dict:
    """The base models, and the caller's checkpoints that can be sampled, newest first."""
    bases = {model.name: model for model in service.base_models() if model.sampleable}
    found = [c for c in await service.catalog.checkpoints(caller) if c.path.kind == "sampler_weights"]
    own = [_model(str(c.path), bases[c.spec.base_model], c.created, c.owner) for c in found if c.spec.base_model in bases]
    return {"object": "list", "data": [_model(name, model) for name, model in bases.items()] + own}


@router.get("/models/{model:path}")
async def get_model(model: str, service: ServiceDep, caller: CallerDep) -> dict:
    return _model(model, await _base_of(service, caller, model))


@router.post("/chat/completions")
async def chat_completions(
    request: Request, service: ServiceDep, caller: CallerDep, body: ChatCompletion = json_body(ChatCompletion)
) -> Response:
    body.check()
    base = await _base_of(service, caller, body.model)
    chat = await _chat(request, base)
    form = await asyncio.to_thread(chat.tool_format, body.offered) if body.offered else None
    prompt = await asyncio.to_thread(chat.render, body.chat(), body.offered or None, body.template_options())
    choice = partial(Choice, prompt_tokens=prompt, wants_logprobs=body.logprobs, wants_ids=body.return_token_ids)
    # What calls tools is known at the end only.
    live = Live(chat, body.stops, body.n, partial(choice, finish_reason="")) if body.stream and form is None else None
    futures = _submit(service, caller, body, base, [prompt], live)

    def finish(answer: Answer, results: list[SampleResult]) -> Answer:
        choices = []
        for i, sequence in enumerate(results[0].sequences):
            scored = openai_text.sampled(chat, sequence, body.stops)
            said, calls = scored.text, []
            if form is not None:
                rest, calls = chat.tool_calls(openai_text.marked(chat, sequence, body.stops), body.offered, form)
                said = rest if calls else said
            calls = calls if body.parallel_tool_calls else calls[:1]
            choices.append(choice(
                i, scored, finish_reason="tool_calls" if calls else sequence.stop_reason, content=said,
                tool_calls=[{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}}
                            for c in calls]))
        return replace(answer, choices=choices, usage=_usage([prompt], results))

    return await _deliver(body, Delivery(request, service, futures, ChatForm(chat), _answer(body), finish, live))


@router.post("/completions")
async def completions(
    request: Request, service: ServiceDep, caller: CallerDep, body: Completion = json_body(Completion)
) -> Response:
    body.check()
    base = await _base_of(service, caller, body.model)
    chat = await _chat(request, base)
    prompts = [await asyncio.to_thread(chat.encode, p) if isinstance(p, str) else p for p in body.prompts]
    live = None
    if body.stream and not body.echo and body.max_tokens != 0:
        live = Live(chat, body.stops, body.n, lambda index, scored: Choice(
            index, scored, "", prompts[index // body.n], wants_logprobs=body.logprobs is not None,
            wants_ids=body.return_token_ids))
    futures = _submit(service, caller, body, base, prompts, live)

    def finish(answer: Answer, results: list[SampleResult]) -> Answer:
        choices = []
        for prompt, result in zip(prompts, results, strict=True):
            before = openai_text.of_prompt(chat, prompt, result) if body.echo else None
            for sequence in result.sequences:
                scored = openai_text.sampled(chat, sequence, body.stops)
                if body.max_tokens == 0:
                    scored = scored.none()
                choices.append(Choice(
                    len(choices), scored, sequence.stop_reason if body.max_tokens else "length", prompt, before=before,
                    wants_logprobs=body.logprobs is not None, wants_ids=body.return_token_ids))
        return replace(answer, choices=choices, usage=_usage(prompts, results, body.max_tokens > 0))

    return await _deliver(body, Delivery(request, service, futures, CompletionForm(chat), _answer(body), finish, live))


def _answer(body: Completing) -> Answer:
    return Answer(body.model, wants_usage=body.wants_usage)


async def _deliver(body: Completing, delivery: Delivery) -> Response:
    return await (delivery.stream() if body.stream else delivery.whole())


# Names


async def _base_of(service: Service, caller: Caller, name: str) -> BaseModelInfo:
    """The base model of a name that a client gives; Refused with 404 for one that the caller cannot sample."""
    base_name = name
    if name.startswith("tinker://"):
        try:
            base_name = (await service.catalog.checkpoint(caller, name)).spec.base_model
        except NotFound as error:
            raise _unknown(str(error)) from None
    base = next((model for model in service.base_models() if model.name == base_name), None)
    if base is None or not base.sampleable:
        served = ", ".join(model.name for model in service.base_models() if model.sampleable)
        raise _unknown(f"the model {name!r} cannot be sampled here; there are {served or 'none'}, and the paths that "
                       "save_weights_for_sampler returned")
    return base


def _unknown(message: str) -> Refused:
    return Refused(404, message, "model", "model_not_found")


async def _chat(request: Request, base: BaseModelInfo) -> Any:
    tokenizers = request.app.state.tokenizers
    if tokenizers is None:
        raise Refused(400, "model: this server has no tokenizers; use the Tinker API, which takes token ids", "model")
    return await tokenizers.of(base.name)


def _model(name: str, base: BaseModelInfo, created: float = 0, owner: str = "") -> dict:
    return {"id": name, "object": "model", "created": int(created), "owned_by": owner or LOCAL, "root": base.name,
            "max_model_len": base.max_context}


# Sampling


def _submit(
    service: Service, caller: Caller, body: Any, base: BaseModelInfo, prompts: list[list[int]], live: Live | None
) -> list[Future]:
    top, wanted = body.wanted_top, body.wanted_tokens
    echoes = getattr(body, "echo", False) and top is not None
    futures = []
    for i, prompt in enumerate(prompts):
        _check_room(prompt, wanted, base)
        asked = SampleRequest(
            prompt=_tokens(prompt), num_samples=body.n, params=body.params(wanted), prompt_logprobs=echoes,
            topk_prompt_logprobs=top if echoes else 0, topk_sample_logprobs=top or 0)
        futures.append(service.sampling.submit_by_name(caller, body.model, asked, live and live.seen(i)))
    return futures


def _tokens(prompt: list[int]) -> np.ndarray:
    try:
        return np.asarray(prompt, np.int32)
    except OverflowError:
        raise Refused(400, "prompt holds a number that is no token id", "prompt") from None


def _check_room(prompt: list[int], wanted: int | None, base: BaseModelInfo) -> None:
    """In the words by which agents know that they must shorten the conversation."""
    if not prompt:
        raise Refused(400, "the prompt has no tokens; give at least one", "prompt")
    if len(prompt) + max(1, wanted or 1) > base.max_context:
        asked = f"{len(prompt)} tokens in the prompt" + (f", {wanted} for the completion" if wanted else "")
        raise Refused(400, f"This model's maximum context length is {base.max_context} tokens. However, you requested "
                      f"{asked}. Shorten the prompt or lower max_tokens.", "messages", "context_length_exceeded")


def _usage(prompts: list[list[int]], results: list[SampleResult], counts: bool = True) -> dict:
    drawn = sum(len(s.tokens) for result in results for s in result.sequences) if counts else 0
    return openai_answer.usage(sum(map(len, prompts)), drawn, sum(result.cache_hit_tokens for result in results))
