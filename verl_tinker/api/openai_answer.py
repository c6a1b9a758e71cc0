"""OpenAI's answers: choices, chunks and usage, whole or as a stream of events.

Owns their shapes. Does not sample or decode: `openai` hands it what was sampled.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl_tinker.api.openai_text import Scored, TextOf, chat_logprobs, completion_logprobs

DONE = "data: [DONE]\n\n"


@dataclass(frozen=True)
class Choice:
    """One answer: what was sampled, and of a chat what it says beside the tools that it calls.

    `before`: the prompt, where it is to be repeated. `wants_logprobs` of both.
    """

    index: int
    scored: Scored
    finish_reason: str
    prompt_tokens: list[int]
    content: str | None = None
    tool_calls: list[dict[str, Any]] = field(default_factory=list)
    before: Scored | None = None
    wants_logprobs: bool = False
    wants_ids: bool = False

    def ids(self) -> dict[str, Any]:
        return {"token_ids": self.scored.tokens} if self.wants_ids else {}


@dataclass(frozen=True)
class Answer:
    """Everything that is said to one request."""

    model: str
    choices: list[Choice]
    usage: dict[str, Any]
    wants_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: secrets.token_hex(12))


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}


# Chats


def chat_body(chat: TextOf, answer: Answer) -> dict[str, Any]:
    choices = []
    for choice in answer.choices:
        message = {"role": "assistant", "content": choice.content, "refusal": None}
        if choice.tool_calls:
            message["tool_calls"] = choice.tool_calls
        said = {"content": chat_logprobs(chat, choice.scored), "refusal": None} if choice.wants_logprobs else None
        choices.append({"index": choice.index, "message": message, "logprobs": said,
                        "finish_reason": choice.finish_reason, **choice.ids()})
    return _whole(answer, "chat.completion", choices)


def chat_events(chat: TextOf, answer: Answer) -> Iterator[str]:
    """The finished answer in chunks of one token each; of one that calls tools, a chunk for each call."""

    def chunk(choice: Choice, delta: dict, finish: str | None = None, said: list | None = None, **more: Any) -> str:
        logprobs = None if said is None else {"content": said, "refusal": None}
        one = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return event(_chunk(answer, "chat.completion.chunk", [one]))

    for choice in answer.choices:
        ids = {"prompt_token_ids": choice.prompt_tokens} if choice.wants_ids else {}
        yield chunk(choice, {"role": "assistant", "content": ""}, **ids)
        said = chat_logprobs(chat, choice.scored) if choice.wants_logprobs else None
        if choice.tool_calls:
            if choice.content or said is not None or choice.wants_ids:
                yield chunk(choice, {"content": choice.content or ""}, said=said, **choice.ids())
            for i, call in enumerate(choice.tool_calls):
                yield chunk(choice, {"tool_calls": [{"index": i, **call}]})
        else:
            for i, piece in enumerate(choice.scored.pieces):
                if piece or said is not None or choice.wants_ids:
                    ids = {"token_ids": choice.scored.tokens[i : i + 1]} if choice.wants_ids else {}
                    yield chunk(choice, {"content": piece}, said=None if said is None else said[i : i + 1], **ids)
        yield chunk(choice, {}, choice.finish_reason)
    yield from _end(answer, "chat.completion.chunk")


# Completions


def completion_body(chat: TextOf, answer: Answer) -> dict[str, Any]:
    choices = []
    for choice in answer.choices:
        whole = _with_prompt(choice)
        said = completion_logprobs(chat, whole) if choice.wants_logprobs else None
        ids = choice.ids() | ({"prompt_token_ids": choice.prompt_tokens} if choice.wants_ids else {})
        choices.append({"index": choice.index, "text": whole.text, "logprobs": said,
                        "finish_reason": choice.finish_reason, **ids})
    return _whole(answer, "text_completion", choices)


def completion_events(chat: TextOf, answer: Answer) -> Iterator[str]:
    def chunk(choice: Choice, text: str, finish: str | None = None, said: dict | None = None, **more: Any) -> str:
        one = {"index": choice.index, "text": text, "logprobs": said, "finish_reason": finish, **more}
        return event(_chunk(answer, "text_completion", [one]))

    for choice in answer.choices:
        whole = _with_prompt(choice)
        said = completion_logprobs(chat, whole) if choice.wants_logprobs else None
        for i, piece in enumerate(whole.pieces):
            if piece or said is not None or choice.wants_ids:
                here = None if said is None else {k: v and v[i : i + 1] for k, v in said.items()}
                ids = {"token_ids": whole.tokens[i : i + 1]} if choice.wants_ids else {}
                yield chunk(choice, piece, said=here, **ids)
        yield chunk(choice, "", choice.finish_reason)
    yield from _end(answer, "text_completion")


def _with_prompt(choice: Choice) -> Scored:
    return choice.scored if choice.before is None else choice.before + choice.scored


# Both


def _whole(answer: Answer, kind: str, choices: list[dict]) -> dict[str, Any]:
    body = _head(answer, kind) | {"choices": choices, "usage": answer.usage}
    if kind == "chat.completion" and answer.choices[0].wants_ids:
        body["prompt_token_ids"] = answer.choices[0].prompt_tokens
    return body


def _chunk(answer: Answer, kind: str, choices: list[dict]) -> dict[str, Any]:
    # With usage asked for, every chunk has the field, and all but the last one null in it.
    return _head(answer, kind) | {"choices": choices} | ({"usage": None} if answer.wants_usage else {})


def _end(answer: Answer, kind: str) -> Iterable[str]:
    if answer.wants_usage:
        yield event(_head(answer, kind) | {"choices": [], "usage": answer.usage})
    yield DONE


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{answer.token}", "object": kind, "created": answer.created, "model": answer.model,
            "system_fingerprint": None}


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
