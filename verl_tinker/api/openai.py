"""OpenAI's routes: models, chat completions and completions, over the same sampling as the Tinker API.

Owns the way of a request from text to tokens and back. Holds no state: tokenizers lie in `app.state.tokenizers`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from verl_tinker.api import openai_answer, openai_text, proto
from verl_tinker.api.auth import CallerDep
from verl_tinker.api.body import json_body
from verl_tinker.api.context import ServiceDep, require_ready
from verl_tinker.api.openai_answer import Answer, Choice
from verl_tinker.api.openai_errors import SHAPE, OpenAiRoute, as_refused, body_of
from verl_tinker.api.openai_wire import ChatCompletion, Completing, Completion, Refused
from verl_tinker.api.wire_catalog import LOCAL
from verl_tinker.core.access import Caller
from verl_tinker.core.errors import NotFound
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service
from verl_tinker.core.types import BaseModelInfo, SampleRequest, SampleResult

PREFIXES = ("/v1", "/oai/api/v1")
# A stream that is silent for longer may be cut by a proxy; a refusal that comes sooner has its own status.
QUIET_SECONDS = 10.0
# How often it is looked whether the client of an unfinished request is still there.
_LOOK_SECONDS = 1.0

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
    futures = _submit(service, caller, body, base, [prompt])

    def finish(results: list[SampleResult]) -> Answer:
        choices = []
        for i, sequence in enumerate(results[0].sequences):
            scored = openai_text.sampled(chat, sequence, body.stops)
            said, calls = scored.text, []
            if form is not None:
                rest, calls = chat.tool_calls(openai_text.marked(chat, sequence, body.stops), body.offered, form)
                said = rest if calls else said
            calls = calls if body.parallel_tool_calls else calls[:1]
            choices.append(Choice(
                i, scored, "tool_calls" if calls else sequence.stop_reason, prompt, said,
                [{"id": c.id, "type": "function", "function": {"name": c.name, "arguments": c.arguments}} for c in calls],
                wants_logprobs=body.logprobs, wants_ids=body.return_token_ids))
        return Answer(body.model, choices, _usage([prompt], results), body.wants_usage)

    return await _deliver(request, service, body, futures, finish,
                          partial(openai_answer.chat_body, chat), partial(openai_answer.chat_events, chat))


@router.post("/completions")
async def completions(
    request: Request, service: ServiceDep, caller: CallerDep, body: Completion = json_body(Completion)
) -> Response:
    body.check()
    base = await _base_of(service, caller, body.model)
    chat = await _chat(request, base)
    prompts = [await asyncio.to_thread(chat.encode, p) if isinstance(p, str) else p for p in body.prompts]
    futures = _submit(service, caller, body, base, prompts)

    def finish(results: list[SampleResult]) -> Answer:
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
        return Answer(body.model, choices, _usage(prompts, results, body.max_tokens > 0), body.wants_usage)

    return await _deliver(request, service, body, futures, finish,
                          partial(openai_answer.completion_body, chat), partial(openai_answer.completion_events, chat))


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


def _submit(service: Service, caller: Caller, body: Any, base: BaseModelInfo, prompts: list[list[int]]) -> list[Future]:
    top, wanted = body.wanted_top, body.wanted_tokens
    echoes = getattr(body, "echo", False) and top is not None
    futures = []
    for prompt in prompts:
        _check_room(prompt, wanted, base)
        futures.append(service.sampling.submit_by_name(caller, body.model, SampleRequest(
            prompt=_tokens(prompt), num_samples=body.n, params=body.params(wanted), prompt_logprobs=echoes,
            topk_prompt_logprobs=top if echoes else 0, topk_sample_logprobs=top or 0)))
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


# Answers


async def _deliver(
    request: Request, service: Service, body: Completing, futures: list[Future],
    finish: Callable[[list[SampleResult]], Answer], whole: Callable[[Answer], dict],
    events: Callable[[Answer], Iterator[str]],
) -> Response:
    """The answer as soon as it is there, or from `QUIET_SECONDS` on a stream that waits for it."""
    if not body.stream:
        answer = await _results(request, service, futures, None)
        return JSONResponse(await asyncio.to_thread(lambda: whole(finish(answer))))
    answer = await _results(request, service, futures, QUIET_SECONDS)

    async def stream() -> AsyncIterator[str]:
        found = answer
        try:
            while found is None:
                yield ": waiting for the sampler\n\n"
                found = await _results(request, service, futures, QUIET_SECONDS)
            for part in await asyncio.to_thread(lambda: list(events(finish(found)))):
                yield part
        except Exception as error:
            yield openai_answer.event(body_of(as_refused(error)))
        finally:
            _cancel(service, futures)

    return StreamingResponse(stream(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _results(
    request: Request, service: Service, futures: list[Future], seconds: float | None
) -> list[SampleResult] | None:
    """What was sampled, None when it is not there after `seconds`; cancelled when the client has gone meanwhile."""
    loop = asyncio.get_running_loop()
    end = None if seconds is None else loop.time() + seconds
    waits = [future for future in futures if not future.done]
    try:
        while waits:
            rest = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - loop.time())
            if rest <= 0:
                return None
            await waits[0].wait(rest)
            failed = next((future for future in futures if future.error), None)
            if failed is not None:
                raise failed.error
            if await request.is_disconnected():
                raise Refused(499, "the client has gone")
            waits = [future for future in waits if not future.done]
        return [await _result(service, future) for future in futures]
    except BaseException:
        _cancel(service, futures)
        raise


def _cancel(service: Service, futures: list[Future]) -> None:
    for future in futures:
        service.sampling.cancel(future)


async def _result(service: Service, future: Future) -> SampleResult:
    if future.error is not None:
        raise future.error
    encoded = await asyncio.to_thread(lambda: future.result) if future.is_on_disk else future.result
    result = proto.read_sample(encoded.data)
    service.futures.drop(future.request_id)
    return result
