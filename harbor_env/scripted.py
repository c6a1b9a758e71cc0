"""Answers from a file in place of the model's: the whole chain tried out without a model that can solve the task.

Owns the file and the scripted answers' tokens. They are scored under the sampler's weights, so training on them is possible,
and it is off-policy: the policy would not have drawn them.
"""

from __future__ import annotations

import json
from itertools import cycle
from pathlib import Path
from typing import Any

import tinker
from tinker_cookbook.renderers import Message, Renderer, ToolCall
from tinker_cookbook.renderers.base import RenderContext

from harbor_env.errors import SettingError
from harbor_env.policy import Sampled

FORM = 'a list of episodes, each a list of answers, each a text or {"text": TEXT, "tool": NAME, "arguments": {...}}'


def read_script(file: Path) -> list[list[Message]]:
    """The episodes of the file as assistant messages; SettingError names what has the wrong form."""
    try:
        episodes = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SettingError(f"--scripted {file} cannot be read: {error}") from error
    if not isinstance(episodes, list) or not episodes:
        raise SettingError(f"--scripted {file} must hold {FORM}")
    return [[_message(answer, f"--scripted {file}: episode {i}, answer {j}")
             for j, answer in enumerate(_list(answers, file, i))] for i, answers in enumerate(episodes)]


def _list(answers: Any, file: Path, i: int) -> list:
    if not isinstance(answers, list) or not answers:
        raise SettingError(f"--scripted {file}: episode {i} is no list of answers; the file holds {FORM}")
    return answers


def _message(answer: Any, where: str) -> Message:
    if isinstance(answer, str):
        return Message(role="assistant", content=answer)
    right = isinstance(answer, dict) and {"tool"} <= set(answer) <= {"text", "tool", "arguments"}
    if not right or not isinstance(answer.get("arguments", {}), dict):
        raise SettingError(f"{where} is {json.dumps(answer)[:80]}; the file holds {FORM}")
    function = ToolCall.FunctionBody(name=answer["tool"], arguments=json.dumps(answer.get("arguments", {})))
    return Message(role="assistant", content=answer.get("text", ""), tool_calls=[ToolCall(function=function)])


class Script:
    """The episodes in turn, again from the first when all were played."""

    def __init__(self, file: Path, renderer: Renderer):
        self._episodes, self._renderer = cycle(read_script(file)), renderer

    def sampler(self, client: tinker.SamplingClient) -> ScriptedSampler:
        """The next episode's."""
        return ScriptedSampler(client, self._renderer, next(self._episodes))


class ScriptedSampler:
    """Gives one answer after another as tokens, with their log-probabilities under the client's weights."""

    def __init__(self, client: tinker.SamplingClient, renderer: Renderer, answers: list[Message]):
        self._client, self._renderer, self._left = client, renderer, list(answers)

    async def sample(self, prompt, max_tokens, stop):
        if not self._left:
            raise ValueError("the script of this episode has no further answer")
        tokens = answer_tokens(self._renderer, self._left.pop(0))
        if len(tokens) > max_tokens:
            raise ValueError(f"a scripted answer has {len(tokens)} tokens where {max_tokens} are allowed")
        scores = await self._client.compute_logprobs(tinker.ModelInput.from_ints([*prompt, *tokens]))
        return Sampled(tokens, scores[len(prompt):], "stop")


def answer_tokens(renderer: Renderer, message: Message) -> list[int]:
    """What a policy would have had to draw to give this answer, with the tokens that end it."""
    asked = Message(role="user", content="")
    rendered = renderer.render_message(message, RenderContext(idx=1, is_last=True, prev_message=asked))
    chunks = [*rendered.output, *([rendered.stop_overlap] if rendered.stop_overlap else [])]
    return [token for chunk in chunks for token in chunk.tokens]
