"""The policy as an agent sees it: a chat request in, an answer out, and an exact record of what was sampled.

Owns the rendering of one episode and its record. Does not own the weights: a sampler with one method does.
"""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass, replace
from typing import Protocol

import tinker
from tinker_cookbook.exceptions import RendererError
from tinker_cookbook.renderers import Message, Renderer, ToolCall, get_text_content
from tinker_cookbook.renderers.base import RenderedMessage
from tinker_cookbook.third_party.openai_compat import openai_messages_to_tinker, openai_tools_to_tinker

from harbor_env.budget import Budget
from harbor_env.chat import Answer, Ask, key_of, read_request, write_response
from harbor_env.errors import InputBudgetExceeded, RequestRefused, SamplingFailed, TurnBudgetExceeded
from harbor_env.record import Turn


@dataclass(frozen=True)
class Sampled:
    """Token ids, nats of each, and "stop" or "length"."""

    tokens: list[int]
    logprobs: list[float]
    stop_reason: str


class Sampler(Protocol):
    async def sample(self, prompt: list[int], max_tokens: int, stop: list[int] | list[str]) -> Sampled:
        """One answer to the prompt; the tokens that ended it are part of it."""


class TinkerSampler:
    """A Tinker sampling client as a Sampler. `seed` makes the draws repeatable: each call adds one to it.

    `died` is done, with the reason, when the server has ended: the SDK would go on asking it.
    """

    def __init__(self, client: tinker.SamplingClient, temperature: float = 1.0, seed: int | None = None,
                 died: asyncio.Future[str] | None = None):
        self._client, self._temperature, self._seed, self._died = client, temperature, seed, died

    async def sample(self, prompt, max_tokens, stop):
        params = tinker.SamplingParams(max_tokens=max_tokens, temperature=self._temperature, stop=stop, seed=self._seed)
        if self._seed is not None:
            self._seed += 1
        asked = asyncio.ensure_future(self._ask(prompt, params))
        try:
            await asyncio.wait({asked, self._died} if self._died else {asked}, return_when=asyncio.FIRST_COMPLETED)
            if not asked.done():
                raise ConnectionError(self._died.result())
            sequence = asked.result().sequences[0]
        finally:
            asked.cancel()
        return Sampled(list(sequence.tokens), list(sequence.logprobs), sequence.stop_reason)

    async def _ask(self, prompt: list[int], params: tinker.SamplingParams) -> tinker.SampleResponse:
        return await self._client.sample(tinker.ModelInput.from_ints(prompt), num_samples=1, sampling_params=params)


class Policy:
    """Answers the requests of one episode, one after another or several at once.

    A request that is repeated under its index gets the answer that it got. `turn_seconds` bounds one sampling call.
    """

    def __init__(self, sampler: Sampler, renderer: Renderer, budget: Budget, name: str = "episode",
                 turn_seconds: float = 1800.0):
        self._sampler, self._budget, self._name, self._turn_seconds = sampler, budget, name, turn_seconds
        self._renderer = renderer
        self._answers: dict[int, dict] = {}
        self._said: list[tuple[tuple, tuple[int, ...]]] = []
        self.turns: list[Turn] = []

    async def answer(self, index: int, body: dict) -> dict:
        """The chat completion for request `index`. Raises the EpisodeError that ends the episode."""
        if index in self._answers:
            return self._answers[index]
        ask = read_request(body)
        if len(self._answers) >= self._budget.turns:
            raise TurnBudgetExceeded(f"the agent asked for turn {len(self._answers) + 1}; turns is {self._budget.turns}")
        prompt = self._render(ask)
        sampled = await self._sample(prompt, ask.max_tokens)
        answer = self._parse(sampled)
        response = write_response(ask, answer, sampled.stop_reason, call_id=f"{self._name}_{index}",
                                  prompt_tokens=len(prompt), sampled_tokens=len(sampled.tokens))
        self._answers[index] = response
        self._said.append((answer.key, tuple(sampled.tokens)))
        self.turns.append(Turn(index, tuple(prompt), tuple(sampled.tokens), tuple(sampled.logprobs),
                               sampled.stop_reason, body, response))
        return response

    def _render(self, ask: Ask) -> list[int]:
        messages = openai_messages_to_tinker(self._budget.trimmed(ask.messages))
        try:
            if ask.tools:
                messages = self._with_tools(messages, ask.tools)
            prompt = self._repeating(messages).build_generation_prompt(messages).to_ints()
        except NotImplementedError:
            raise RequestRefused(f"tools: {type(self._renderer).__name__} knows no form for them; choose a renderer that "
                                 "does, or an agent that puts its commands into text") from None
        except RendererError as error:
            raise RequestRefused(f"messages: {error}") from error
        if len(prompt) > self._budget.input_tokens:
            raise InputBudgetExceeded(f"the prompt of turn {len(self._answers) + 1} has {len(prompt)} tokens; "
                                      f"input_tokens is {self._budget.input_tokens}")
        return prompt

    def _with_tools(self, messages: list[Message], tools: list[dict]) -> list[Message]:
        """The tools stand where the renderer wants them, which is in or beside the system message."""
        system = messages[0]["content"] if messages[0]["role"] == "system" else ""
        rest = messages[1:] if messages[0]["role"] == "system" else messages
        return [*self._renderer.create_conversation_prefix_with_tools(openai_tools_to_tinker(tools), system), *rest]

    def _repeating(self, messages: list[Message]) -> Renderer:
        """A renderer that repeats the policy's own answers as they were sampled, so that a prompt extends the former one.

        Text that is tokenised anew can give other tokens. Renderers that change earlier answers, or whose answers end with
        text of the next message, keep their own way.
        """
        stops = self._renderer.get_stop_sequences()
        if not self._renderer.has_extension_property or not all(isinstance(stop, int) for stop in stops):
            return self._renderer
        left, own = list(self._said), {}
        for i, message in enumerate(messages):
            key = _key_of(message) if message["role"] == "assistant" else None
            found = next((n for n, (said, _) in enumerate(left) if said == key), None)
            if found is not None:
                own[i] = left[found][1]
                del left[: found + 1]
        renderer, plain = copy.copy(self._renderer), self._renderer.render_message

        def render_message(message, ctx):
            rendered = plain(message, ctx)
            repeats = ctx.idx in own and message is messages[ctx.idx]
            return _as_sampled(rendered, own[ctx.idx], stops) if repeats else rendered

        renderer.render_message = render_message
        return renderer

    async def _sample(self, prompt: list[int], asked: int | None) -> Sampled:
        room = self._budget.context_tokens - len(prompt)
        limit = min(self._budget.output_tokens, room, asked or room)
        try:
            call = self._sampler.sample(prompt, limit, self._renderer.get_stop_sequences())
            sampled = await asyncio.wait_for(call, self._turn_seconds)
        except TimeoutError:
            raise SamplingFailed(f"the server gave no answer within {self._turn_seconds:.0f} s") from None
        except Exception as error:  # The SDK, and below it its transports, raise types of their own for one and the same.
            raise SamplingFailed(f"the server gave no answer: {error}") from error
        if len(sampled.tokens) > limit:
            raise SamplingFailed(f"the server drew {len(sampled.tokens)} tokens where {limit} were allowed")
        return sampled

    def _parse(self, sampled: Sampled) -> Answer:
        """Text and calls. What is cut off, or calls in a malformed way, is plain text to the agent, who may say so."""
        try:
            message, termination = self._renderer.parse_response(sampled.tokens)
        except RendererError:
            return Answer(self._plain_text(sampled))
        if not termination.is_clean or message.get("unparsed_tool_calls"):
            return Answer(self._plain_text(sampled))
        calls = tuple((c.function.name, c.function.arguments) for c in message.get("tool_calls", []))
        return Answer(get_text_content(message), calls, _reasoning(message))

    def _plain_text(self, sampled: Sampled) -> str:
        return str(self._renderer.tokenizer.decode(sampled.tokens, skip_special_tokens=True))


def _reasoning(message: Message) -> str:
    content = message["content"]
    return "" if isinstance(content, str) else "".join(p["thinking"] for p in content if p["type"] == "thinking")


def _key_of(message: Message) -> tuple:
    calls = [{"function": {"name": c.function.name, "arguments": c.function.arguments}}
             for c in message.get("tool_calls", []) if isinstance(c, ToolCall)]
    return key_of({"content": get_text_content(message), "tool_calls": calls})


def _as_sampled(rendered: RenderedMessage, tokens: tuple[int, ...], stops: list[int]) -> RenderedMessage:
    """The message with the sampled tokens in place of its text. An answer that was cut off gets the end that the renderer
    gives it; where that is no stop token, the rendering stays as it is.
    """
    end = rendered.output[-1].tokens[-1] if rendered.output else None
    if end not in stops:
        return rendered
    return replace(rendered, output=[tinker.EncodedTextChunk(tokens=[*tokens, *([] if tokens[-1:] == (end,) else [end])])])
