"""Sampled tokens as text and log-probabilities, in the two forms that OpenAI has for them.

Owns where a text ends and what is said of each token. Does not know of choices, chunks or usage: `openai_answer` does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from verl_tinker.core.types import EMPTY_CELL, SampledSequence, SampleResult, TopK

# JSON has no infinity; a token that could not have been drawn.
_NEVER = -9999.0


class TextOf(Protocol):
    """What is needed of `verl_tinker.chat.Chat`."""

    def text(self, tokens, with_special: bool = False) -> str: ...

    def pieces(self, tokens, text: str) -> list[str]: ...

    def token(self, token: int) -> tuple[str, bytes]: ...


@dataclass(frozen=True)
class Scored:
    """Tokens with their log-probabilities in nats, None where there is none, and the text that each adds.

    `topk` has a row for each token, or is None.
    """

    tokens: list[int]
    logprobs: list[float | None]
    pieces: list[str]
    topk: TopK | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def since(self, begin: int) -> Scored:
        """Without the first `begin` tokens."""
        topk = self.topk and TopK(self.topk.ids[begin:], self.topk.logprobs[begin:])
        return Scored(self.tokens[begin:], self.logprobs[begin:], self.pieces[begin:], topk)

    def none(self) -> Scored:
        """No token of it."""
        return Scored([], [], [], self.topk and TopK(self.topk.ids[:0], self.topk.logprobs[:0]))

    def __add__(self, after: Scored) -> Scored:
        topk = None
        if self.topk is not None and after.topk is not None:
            both = (self.topk, after.topk)
            topk = TopK(np.concatenate([t.ids for t in both]), np.concatenate([t.logprobs for t in both]))
        return Scored(self.tokens + after.tokens, self.logprobs + after.logprobs, self.pieces + after.pieces, topk)


def sampled(chat: TextOf, sequence: SampledSequence, stops: list[str]) -> Scored:
    """All sampled tokens, and the text before the stop string or end token that is the last of them."""
    tokens = sequence.tokens.tolist()
    text = _until_stop(chat.text(tokens), sequence, stops)
    return Scored(tokens, numbers(sequence.logprobs), chat.pieces(tokens, text), sequence.topk)


def marked(chat: TextOf, sequence: SampledSequence, stops: list[str]) -> str:
    """The same text with the special tokens in it, but for the one that ends it: tool calls are marked by such."""
    tokens = sequence.tokens.tolist()
    if sequence.stop_reason == "stop" and not chat.text(tokens[-1:]):
        tokens = tokens[:-1]
    return _until_stop(chat.text(tokens, with_special=True), sequence, stops)


def _until_stop(text: str, sequence: SampledSequence, stops: list[str]) -> str:
    if sequence.stop_reason != "stop":
        return text
    return text[: min((at for at in (text.find(stop) for stop in stops) if at >= 0), default=len(text))]


def of_prompt(chat: TextOf, tokens: list[int], result: SampleResult) -> Scored:
    """The prompt's tokens with their log-probabilities, where they were asked for."""
    scores = result.prompt_logprobs
    logprobs = [None] * len(tokens) if scores is None else [None, *numbers(scores[1:])]
    return Scored(tokens, logprobs, chat.pieces(tokens, chat.text(tokens)), result.topk_prompt)


def chat_logprobs(chat: TextOf, scored: Scored) -> list[dict[str, Any]]:
    return [_entry(chat, token, logprob) | {"top_logprobs": [_entry(chat, *pair) for pair in _likeliest(scored, i)]}
            for i, (token, logprob) in enumerate(zip(scored.tokens, scored.logprobs, strict=True))]


def completion_logprobs(chat: TextOf, scored: Scored, begin: int = 0) -> dict[str, Any]:
    """`begin`: how many characters came before."""
    offsets = np.cumsum([begin, *map(len, scored.pieces)]).tolist()
    top = [_by_text(chat, scored, i) for i in range(len(scored.tokens))]
    return {
        "tokens": [chat.token(token)[0] for token in scored.tokens],
        "token_logprobs": scored.logprobs,
        "top_logprobs": top if scored.topk is not None else None,
        "text_offset": offsets[:-1],
    }


def _entry(chat: TextOf, token: int, logprob: float | None) -> dict[str, Any]:
    text, data = chat.token(token)
    return {"token": text, "logprob": _NEVER if logprob is None else logprob, "bytes": list(data)}


def _likeliest(scored: Scored, row: int) -> list[tuple[int, float]]:
    if scored.topk is None:
        return []
    pairs = zip(scored.topk.ids[row].tolist(), scored.topk.logprobs[row].tolist(), strict=True)
    return [(token, _number(logprob)) for token, logprob in pairs if logprob > EMPTY_CELL]


def _by_text(chat: TextOf, scored: Scored, row: int) -> dict[str, float] | None:
    """The likeliest tokens and the one that stands there; the likelier of two that read the same."""
    own = scored.logprobs[row]
    if own is None:
        return None
    found: dict[str, float] = {}
    for token, logprob in [*_likeliest(scored, row), (scored.tokens[row], own)]:
        found.setdefault(chat.token(token)[0], logprob)
    return found


def numbers(values: np.ndarray) -> list[float]:
    return [_number(value) for value in values.tolist()]


def _number(value: float) -> float:
    return value if math.isfinite(value) else _NEVER
