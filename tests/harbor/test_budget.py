"""Limits that contradict one another are refused, and observations are cut to theirs."""

import pytest

from harbor_env.budget import LEFT_OUT, Budget
from harbor_env.errors import SettingError


def conversation(observations):
    messages = [{"role": "system", "content": "rules" * 100}, {"role": "user", "content": "task" * 100}]
    for text in observations:
        messages += [{"role": "assistant", "content": "look"}, {"role": "tool", "content": text}]
    return messages


def test_the_defaults_are_the_quick_starts():
    assert vars(Budget()) == {"input_tokens": 32768, "output_tokens": 8192, "context_tokens": 65536,
                              "observation_chars": 12000, "observations_kept": 8, "turns": 32}


def test_input_and_output_must_fit_the_context():
    Budget(input_tokens=6, output_tokens=4, context_tokens=10)
    with pytest.raises(SettingError, match="input_tokens 7 and output_tokens 4 .* context of 10"):
        Budget(input_tokens=7, output_tokens=4, context_tokens=10)


@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True])
def test_a_limit_is_a_whole_number(value):
    with pytest.raises(SettingError, match="turns is"):
        Budget(turns=value)


def test_a_long_observation_keeps_both_its_ends():
    trimmed = Budget(observation_chars=10).trimmed(conversation(["a" * 20 + "b" * 20]))
    assert trimmed[-1]["content"] == "aaaaa\n(... 30 characters were left out ...)\nbbbbb"
    assert trimmed[:3] == conversation(["x"])[:3], "the task, the rules and the answers stay whole"


def test_an_observation_at_the_limit_stays():
    assert Budget(observation_chars=10).trimmed(conversation(["a" * 10]))[-1]["content"] == "a" * 10


def test_only_the_newest_observations_stay():
    trimmed = Budget(observations_kept=2).trimmed(conversation(["1", "2", "3", "4"]))
    assert [m["content"] for m in trimmed if m["role"] == "tool"] == [LEFT_OUT, LEFT_OUT, "3", "4"]


def test_observations_of_an_agent_without_tools_are_the_users_later_messages():
    messages = [{**m, "role": "user"} if m["role"] == "tool" else m for m in conversation(["1", "2"])]
    trimmed = Budget(observations_kept=1).trimmed(messages)
    assert [m["content"] for m in trimmed if m["role"] == "user"] == ["task" * 100, LEFT_OUT, "2"]


def test_the_messages_that_were_given_stay_as_they_were():
    messages = conversation(["a" * 50, "b"])
    Budget(observation_chars=5, observations_kept=1).trimmed(messages)
    assert messages == conversation(["a" * 50, "b"])
