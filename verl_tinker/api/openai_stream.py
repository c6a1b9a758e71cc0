"""Answers on their way to an OpenAI client: whole, or in chunks while they are drawn.

Owns the waiting for samples, what of a growing text may be sent already, and the end of samples that nobody reads. Does not
know what a request asks for: `openai` does, and `openai_answer` knows how chunks look.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
from fastapi import Request
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.responses import Response

from verl_tinker.api import openai_answer, proto
from verl_tinker.api.openai_answer import Answer, Choice, Form
from verl_tinker.api.openai_errors import as_refused, body_of
from verl_tinker.api.openai_text import Scored, numbers
from verl_tinker.api.openai_wire import Refused
from verl_tinker.chat import Chat
from verl_tinker.core.futures import Future
from verl_tinker.core.service import Service
from verl_tinker.core.types import Drawn, SampleResult, TopK

# A stream that is silent for longer may be cut by a proxy; a refusal that comes sooner has its own status.
QUIET_SECONDS = 10.0
# How often it is looked whether the client of an unfinished request is still there.
_LOOK_SECONDS = 1.0


class Growing:
    """One sequence while it is drawn. `hold`: how many letters at its end may yet turn out to be a stop string."""

    def __init__(self, decode: Callable[[int], str], hold: int):
        self._decode, self._hold = decode, hold
        self._tokens: list[int] = []
        self._logprobs: list[float] = []
        self._topk: list[TopK] = []
        self.pieces: list[str] = []
        self.sent = 0

    def add(self, drawn: Drawn) -> None:
        self._tokens += drawn.tokens.tolist()
        self._logprobs += numbers(drawn.logprobs)
        self.pieces += [self._decode(token) for token in drawn.tokens]
        if drawn.topk is not None:
            self._topk.append(drawn.topk)

    def settled(self) -> Scored | None:
        """The tokens up to those whose text may still change, if there are new ones. The last one always may."""
        end, held = len(self.pieces) - 1, len(self.pieces[-1])
        while end > self.sent and held < self._hold:
            end -= 1
            held += len(self.pieces[end])
        if end <= self.sent:
            return None
        topk = None
        if self._topk:
            topk = TopK(*(np.concatenate([getattr(t, name) for t in self._topk])[:end] for name in ("ids", "logprobs")))
        return Scored(self._tokens[:end], self._logprobs[:end], self.pieces[:end], topk)

    def completed(self, scored: Scored) -> Scored:
        """The whole sequence with the text that was sent in it, which cannot be taken back."""
        sent = self.pieces[: self.sent]
        if scored.pieces[: self.sent] == sent:
            return scored
        said = "".join(sent)
        rest = scored.text[len(said):] if scored.text.startswith(said) else ""
        return replace(scored, pieces=[*sent, rest, *[""] * (len(scored.tokens) - self.sent - 1)])


class Live:
    """What is drawn for a request. `choice(index, scored)` makes a choice of what there is of it."""

    def __init__(self, chat: Chat, stops: list[str], per_prompt: int, choice: Callable[[int, Scored], Choice]):
        self._chat, self._per_prompt, self._choice = chat, per_prompt, choice
        self._hold = max((len(stop) - 1 for stop in stops), default=0)
        self.growing: dict[int, Growing] = {}
        self.grown = asyncio.Event()

    def seen(self, prompt: int) -> Callable[[Drawn], None] | None:
        """For the samples of the request's prompt of this number."""
        if self._chat.decoder() is None:
            return None

        def told(drawn: Drawn) -> None:
            index = prompt * self._per_prompt + drawn.index
            if index not in self.growing:
                self.growing[index] = Growing(self._chat.decoder(), self._hold)
            self.growing[index].add(drawn)
            self.grown.set()

        return told

    def chunks(self, form: Form, answer: Answer) -> Iterator[str]:
        """Of all that is new."""
        self.grown.clear()
        for index, growing in self.growing.items():
            scored = growing.settled()
            if scored is not None:
                choice = self._choice(index, scored)
                if not growing.sent:
                    yield from form.opening(answer, choice)
                yield from form.pieces(answer, choice, growing.sent)
                growing.sent = len(scored.tokens)

    def rest(self, form: Form, answer: Answer) -> Iterator[str]:
        sent = {index: growing for index, growing in self.growing.items() if growing.sent}
        choices = [replace(c, scored=sent[c.index].completed(c.scored)) if c.index in sent else c for c in answer.choices]
        return openai_answer.rest_of_stream(form, replace(answer, choices=choices), {i: g.sent for i, g in sent.items()})


@dataclass(frozen=True)
class Delivery:
    """One request's samples and what becomes of them. `live` is None where an answer is sent in one go."""

    request: Request
    service: Service
    futures: list[Future]
    form: Form
    answer: Answer
    finish: Callable[[Answer, list[SampleResult]], Answer]
    live: Live | None = None

    async def whole(self) -> Response:
        results = await self._results()
        return JSONResponse(await asyncio.to_thread(lambda: self.form.body(self.finish(self.answer, results))))

    async def stream(self) -> Response:
        """Begins with the first text, with the answer, or after `QUIET_SECONDS`, so that a refusal has its own status."""
        await self._change(QUIET_SECONDS)
        return StreamingResponse(self._events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _events(self) -> AsyncIterator[str]:
        live = self.live
        try:
            while not self._is_done():
                if live and live.grown.is_set():
                    for part in live.chunks(self.form, self.answer):
                        yield part
                else:
                    yield ": waiting for the sampler\n\n"
                await self._change(QUIET_SECONDS)
            results = await self._results()
            rest = live.rest if live else lambda form, answer: openai_answer.rest_of_stream(form, answer, {})
            for part in await asyncio.to_thread(lambda: list(rest(self.form, self.finish(self.answer, results)))):
                yield part
        except Exception as error:
            yield openai_answer.event(body_of(as_refused(error)))
        finally:
            self._cancel()

    def _is_done(self) -> bool:
        return all(future.done for future in self.futures)

    async def _results(self) -> list[SampleResult]:
        """What was sampled; cancelled when the client has gone meanwhile."""
        try:
            while not self._is_done():
                await self._change(None, False)
            return [await _result(self.service, future) for future in self.futures]
        except BaseException:
            self._cancel()
            raise

    async def _change(self, seconds: float | None, grows: bool = True) -> None:
        """Until all samples have ended, or there is more text, or so many seconds have passed."""
        loop = asyncio.get_running_loop()
        end = None if seconds is None else loop.time() + seconds
        try:
            while not self._is_done() and not (grows and self.live and self.live.grown.is_set()):
                rest = _LOOK_SECONDS if end is None else min(_LOOK_SECONDS, end - loop.time())
                if rest <= 0:
                    return
                await self._wait(rest, grows)
                failed = next((future for future in self.futures if future.error), None)
                if failed is not None:
                    raise failed.error
                if await self.request.is_disconnected():
                    raise Refused(499, "the client has gone")
        except BaseException:
            self._cancel()
            raise

    async def _wait(self, seconds: float, grows: bool) -> None:
        first = next(future for future in self.futures if not future.done)
        waits = [asyncio.ensure_future(first.wait(seconds))]
        if grows and self.live:
            waits.append(asyncio.ensure_future(self.live.grown.wait()))
        try:
            await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def _cancel(self) -> None:
        for future in self.futures:
            self.service.sampling.cancel(future)


async def _result(service: Service, future: Future) -> SampleResult:
    if future.error is not None:
        raise future.error
    encoded = await asyncio.to_thread(lambda: future.result) if future.is_on_disk else future.result
    result = proto.read_sample(encoded.data)
    service.futures.drop(future.request_id)
    return result
