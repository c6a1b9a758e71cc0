"""OpenAI's answers: choices, chunks and usage, whole or as a stream of events.

Owns their shapes. Does not sample or decode: `openai` hands it what was sampled.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping
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
    """Everything that is said to one request, or so far."""

    model: str
    choices: list[Choice] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    wants_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    token: str = field(default_factory=lambda: secrets.token_hex(12))


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached}}


class ChatForm:
    """Chat completions. One of these two forms says how an answer looks, whole and in chunks."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, chat: TextOf):
        self.chat = chat

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = []
        for choice in answer.choices:
            message = {"role": "assistant", "content": choice.content, "refusal": None}
            if choice.tool_calls:
                message["tool_calls"] = choice.tool_calls
            said = {"content": chat_logprobs(self.chat, choice.scored), "refusal": None} if choice.wants_logprobs else None
            choices.append({"index": choice.index, "message": message, "logprobs": said,
                            "finish_reason": choice.finish_reason, **choice.ids()})
        return _whole(answer, self.kind, choices)

    def opening(self, answer: Answer, choice: Choice) -> Iterator[str]:
        ids = {"prompt_token_ids": choice.prompt_tokens} if choice.wants_ids else {}
        yield self._chunk(answer, choice, {"role": "assistant", "content": ""}, **ids)

    def pieces(self, answer: Answer, choice: Choice, begin: int) -> Iterator[str]:
        """A chunk for each token from `begin` on; of an answer that calls tools, a chunk for each call."""
        part = choice.scored.since(begin)
        said = chat_logprobs(self.chat, part) if choice.wants_logprobs else None
        if choice.tool_calls:
            if choice.content or said is not None or choice.wants_ids:
                yield self._chunk(answer, choice, {"content": choice.content or ""}, said=said, **choice.ids())
            for i, call in enumerate(choice.tool_calls):
                yield self._chunk(answer, choice, {"tool_calls": [{"index": i, **call}]})
            return
        for i, piece in enumerate(part.pieces):
            if piece or said is not None or choice.wants_ids:
                ids = {"token_ids": part.tokens[i : i + 1]} if choice.wants_ids else {}
                yield self._chunk(answer, choice, {"content": piece}, said=None if said is None else said[i : i + 1], **ids)

    def ending(self, answer: Answer, choice: Choice) -> Iterator[str]:
        yield self._chunk(answer, choice, {}, choice.finish_reason)

    def _chunk(self, answer: Answer, choice: Choice, delta: dict, finish: str | None = None, said: list | None = None,
               **more: Any) -> str:
        logprobs = None if said is None else {"content": said, "refusal": None}
        one = {"index": choice.index, "delta": delta, "logprobs": logprobs, "finish_reason": finish, **more}
        return event(_chunk(answer, self.chunk_kind, [one]))


class CompletionForm:
    """Completions."""

    kind = chunk_kind = "text_completion"

    def __init__(self, chat: TextOf):
        self.chat = chat

    def body(self, answer: Answer) -> dict[str, Any]:
        choices = []
        for choice in answer.choices:
            whole = _with_prompt(choice)
            said = completion_logprobs(self.chat, whole) if choice.wants_logprobs else None
            ids = choice.ids() | ({"prompt_token_ids": choice.prompt_tokens} if choice.wants_ids else {})
            choices.append({"index": choice.index, "text": whole.text, "logprobs": said,
                            "finish_reason": choice.finish_reason, **ids})
        return _whole(answer, self.kind, choices)

    def opening(self, answer: Answer, choice: Choice) -> Iterator[str]:
        return iter(())

    def pieces(self, answer: Answer, choice: Choice, begin: int) -> Iterator[str]:
        """A chunk for each token from `begin` on, with those of the prompt where it is to be repeated."""
        whole = _with_prompt(choice)
        part = whole.since(begin)
        before = len(whole.text) - len(part.text)
        said = completion_logprobs(self.chat, part, before) if choice.wants_logprobs else None
        for i, piece in enumerate(part.pieces):
            if piece or said is not None or choice.wants_ids:
                here = None if said is None else {k: v and v[i : i + 1] for k, v in said.items()}
                ids = {"token_ids": part.tokens[i : i + 1]} if choice.wants_ids else {}
                yield self._chunk(answer, choice, piece, said=here, **ids)

    def ending(self, answer: Answer, choice: Choice) -> Iterator[str]:
        yield self._chunk(answer, choice, "", choice.finish_reason)

    def _chunk(self, answer: Answer, choice: Choice, text: str, finish: str | None = None, said: dict | None = None,
               **more: Any) -> str:
        one = {"index": choice.index, "text": text, "logprobs": said, "finish_reason": finish, **more}
        return event(_chunk(answer, self.chunk_kind, [one]))


Form = ChatForm | CompletionForm


def _with_prompt(choice: Choice) -> Scored:
    return choice.scored if choice.before is None else choice.before + choice.scored


def rest_of_stream(form: Form, answer: Answer, sent: Mapping[int, int]) -> Iterator[str]:
    """The chunks of a finished answer but for the tokens that were sent, as many as `sent` says of each choice."""
    for choice in answer.choices:
        if choice.index not in sent:
            yield from form.opening(answer, choice)
        yield from form.pieces(answer, choice, sent.get(choice.index, 0))
        yield from form.ending(answer, choice)
    if answer.wants_usage:
        yield event(_head(answer, form.chunk_kind) | {"choices": [], "usage": answer.usage})
    yield DONE


def _whole(answer: Answer, kind: str, choices: list[dict]) -> dict[str, Any]:
    body = _head(answer, kind) | {"choices": choices, "usage": answer.usage}
    if kind == "chat.completion" and answer.choices[0].wants_ids:
        body["prompt_token_ids"] = answer.choices[0].prompt_tokens
    return body


def _chunk(answer: Answer, kind: str, choices: list[dict]) -> dict[str, Any]:
    # With usage asked for, every chunk has the field, and all but the last one null in it.
    return _head(answer, kind) | {"choices": choices} | ({"usage": None} if answer.wants_usage else {})


def _head(answer: Answer, kind: str) -> dict[str, Any]:
    prefix = "chatcmpl" if kind.startswith("chat") else "cmpl"
    return {"id": f"{prefix}-{answer.token}", "object": kind, "created": answer.created, "model": answer.model,
            "system_fingerprint": None}


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False)}\n\n"
