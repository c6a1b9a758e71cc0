"""Chat requests are checked field by field, and answers have the form that agents read."""

import json

import pytest

from harbor_env.chat import Answer, key_of, read_request, write_response
from harbor_env.errors import RequestRefused

USER = {"role": "user", "content": "fix it"}
CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}, "index": 0}
BASH = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}


def test_a_whole_conversation_is_reduced_to_what_is_rendered():
    ask = read_request({
        "model": "openai/policy", "temperature": 0.2, "max_tokens": 100, "tools": [BASH],
        "messages": [
            {"role": "developer", "content": "rules"},
            {"role": "user", "content": [{"type": "text", "text": "fix "},
                                         {"type": "text", "text": "it", "cache_control": {}}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL], "reasoning_content": "hm", "refusal": None},
            {"role": "tool", "tool_call_id": "c1", "name": "bash", "content": "a.py"},
        ]})
    assert ask.max_tokens == 100 and ask.tools == [BASH] and ask.model == "openai/policy"
    assert ask.messages == [
        {"role": "system", "content": "rules"},
        {"role": "user", "content": "fix it"},
        {"role": "assistant", "content": "", "tool_calls": [{k: v for k, v in CALL.items() if k != "index"}]},
        {"role": "tool", "content": "a.py", "tool_call_id": "c1", "name": "bash"},
    ]


@pytest.mark.parametrize(("body", "named"), [
    ([], "the request is a list"),
    ({}, "messages is missing"),
    ({"messages": []}, "messages is missing or empty"),
    ({"messages": [USER], "stream": True}, "stream is true"),
    ({"messages": [USER], "n": 2}, "n is 2"),
    ({"messages": [USER], "max_tokens": 0}, "max_tokens is 0"),
    ({"messages": [USER], "max_completion_tokens": "9"}, "max_tokens is '9'"),
    ({"messages": ["hello"]}, r"messages\[0\] is a str"),
    ({"messages": [USER, {"role": "robot", "content": ""}]}, r"messages\[1\].role is 'robot'"),
    ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content is a int"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"messages\[0\].content\[0\] is 'image_url'"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}, r"tool_calls\[0\] has no function"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": "{"}}]}]}, "not the JSON"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "b", "arguments": "1"}}]}]}, "not the JSON"),
    ({"messages": [USER], "tools": [{"type": "web_search"}]}, r"tools\[0\] is no function"),
    ({"messages": [USER], "tools": "bash"}, "tools is a str"),
])
def test_what_cannot_be_answered_is_refused_by_its_field(body, named):
    with pytest.raises(RequestRefused, match=named):
        read_request(body)


def test_the_smaller_of_two_limits_counts():
    assert read_request({"messages": [USER], "max_tokens": 9, "max_completion_tokens": 7}).max_tokens == 7


def test_an_answer_with_calls():
    answer = Answer("I look.", (("bash", '{"command": "ls"}'),), "thinking")
    body = write_response(read_request({"messages": [USER], "model": "m"}), answer, "stop", call_id="e_1", prompt_tokens=5,
                          sampled_tokens=3)
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["reasoning_content"] == "thinking"
    assert choice["message"]["tool_calls"] == [{"id": "e_1_0", "type": "function", "function": {
        "name": "bash", "arguments": '{"command": "ls"}'}}]
    assert body["usage"] == {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8} and body["model"] == "m"
    assert json.loads(json.dumps(body)) == body


@pytest.mark.parametrize(("stop_reason", "expected"), [("stop", "stop"), ("length", "length")])
def test_why_an_answer_ended(stop_reason, expected):
    body = write_response(read_request({"messages": [USER]}), Answer("so"), stop_reason, call_id="e", prompt_tokens=1,
                          sampled_tokens=1)
    assert body["choices"][0]["finish_reason"] == expected and "tool_calls" not in body["choices"][0]["message"]


def test_an_answer_is_known_again_when_it_comes_back():
    answer = Answer("I look. \n", (("bash", '{"command": "ls"}'),))
    body = write_response(read_request({"messages": [USER]}), answer, "stop", call_id="e", prompt_tokens=1, sampled_tokens=1)
    back = read_request({"messages": [USER, body["choices"][0]["message"]]}).messages[1]
    assert key_of(back) == answer.key
    assert key_of({**back, "content": "I look."}) == answer.key, "stripped by the agent"
    assert key_of({**back, "content": "Something else"}) != answer.key
