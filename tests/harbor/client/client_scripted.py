"""Scripted answers are tokens that the renderer reads back as what the file says."""

import asyncio
import json

import pytest

from harbor_env.errors import SettingError
from harbor_env.scripted import Script, answer_tokens, read_script

CALL = {"text": "First.", "tool": "bash", "arguments": {"command": "ls \"a b\" <x>"}}


def written(tmp_path, content):
    file = tmp_path / "answers.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def test_answers_are_read_back_as_they_were_written(renderer, tmp_path):
    (call, text), = read_script(written(tmp_path, [[CALL, "The middle one."]]))
    message, termination = renderer.parse_response(answer_tokens(renderer, call))
    assert termination.is_clean and [c.function.name for c in message["tool_calls"]] == ["bash"]
    assert json.loads(message["tool_calls"][0].function.arguments) == CALL["arguments"]
    tokens = answer_tokens(renderer, text)
    assert renderer.parse_response(tokens)[0]["content"] == "The middle one."
    assert tokens[-1] in renderer.get_stop_sequences() and tokens[0] not in renderer.get_stop_sequences()


def test_each_episode_has_its_answers_and_their_scores(renderer, tmp_path):
    class Client:
        async def compute_logprobs(self, prompt):
            return [None, *(-float(i) for i in range(1, prompt.length))]

    script = Script(written(tmp_path, [["One."], ["Two.", "Three."]]), renderer)
    first, second, again = (script.sampler(Client()) for _ in range(3))
    one = asyncio.run(first.sample([5, 6, 7], 50, []))
    assert one.logprobs == [-float(i) for i in range(3, 3 + len(one.tokens))] and one.stop_reason == "stop"
    assert asyncio.run(again.sample([5], 50, [])).tokens == one.tokens != asyncio.run(second.sample([5], 50, [])).tokens
    with pytest.raises(ValueError, match="no further answer"):
        asyncio.run(first.sample([5], 50, []))
    with pytest.raises(ValueError, match="where 1 are allowed"):
        asyncio.run(second.sample([5], 1, []))


@pytest.mark.parametrize(("content", "words"), [
    ("{", "cannot be read"), ([], "a list of episodes"), ([[]], "episode 0 is no list"), (["x"], "episode 0 is no list"),
    ([["a"], [{"command": "ls"}]], "episode 1, answer 0"), ([[{"tool": "bash", "arguments": "ls"}]], "episode 0, answer 0")])
def test_a_file_of_another_form_is_named(tmp_path, content, words):
    with pytest.raises(SettingError, match=words):
        read_script(written(tmp_path, content))
