"""Tools: offered in the model's template, their calls read back by vLLM's parsers."""

import json

import pytest
from fake_engine import BASE
from talking import make_tokenizer, save_tokenizer

from verl_tinker.chat import Chat
from verl_tinker.tool_calls import tool_format

pytestmark = pytest.mark.timeout(300)
TOOL = {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}}}
ASKED = [{"role": "user", "content": "Will it rain?"}]
CALL = '<tool_call>{"name": "weather", "arguments": {"city": "Köln"}}</tool_call>'


def test_a_call_is_read_back_and_its_result_goes_to_the_model(server, client):
    server.engine.says = lambda prompt, weight: "Let me look." + CALL if "sunny" not in prompt else "No."
    answer = client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content == "Let me look."
    (call,) = choice.message.tool_calls
    assert call.type == "function" and call.id.startswith("call_") and call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Köln"}
    assert '"name": "weather"' in server.engine.tokenizer.decode(server.engine.requests[0].prompt)
    history = [*ASKED, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    again = client.chat.completions.create(model=BASE, messages=history, tools=[TOOL])
    assert (again.choices[0].message.content, again.choices[0].finish_reason) == ("No.", "stop")
    prompt = server.engine.tokenizer.decode(server.engine.requests[1].prompt)
    assert '<tool_call>{"arguments": {"city": "Köln"}' in prompt or '"arguments": {"city": "Köln"}' in prompt
    assert "<|im_start|>tool\nsunny<|im_end|>" in prompt


def test_a_stream_builds_the_same_calls(server, client):
    server.engine.says = lambda prompt, weight: "Two.\n" + CALL + CALL.replace("Köln", "Bonn")
    chunks = list(client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL], stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [call.index for call in calls] == [0, 1] and len({call.id for call in calls}) == 2
    assert [json.loads(call.function.arguments)["city"] for call in calls] == ["Köln", "Bonn"]
    assert "".join(delta.content or "" for delta in deltas).strip() == "Two."
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    one = client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL], parallel_tool_calls=False)
    assert len(one.choices[0].message.tool_calls) == 1


@pytest.mark.parametrize("text", ["Nothing to call.", "<tool_call>{broken</tool_call>"])
def test_what_is_no_call_is_text(server, client, text):
    server.engine.says = lambda prompt, weight: text
    choice = client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL]).choices[0]
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")


def test_tools_are_not_offered_with_choice_none(server, client):
    server.engine.says = lambda prompt, weight: CALL
    choice = client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL], tool_choice="none").choices[0]
    assert choice.message.content == CALL
    assert "weather" not in server.engine.tokenizer.decode(server.engine.requests[0].prompt)


@pytest.mark.parametrize("template, words", [
    ("{% for m in messages %}{{ m.content }}{% endfor %}", "no place for tools"),
    ("{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}", "is not known"),
])
def test_a_template_without_tools_refuses_them(start, connect, tmp_path, template, words):
    import openai

    client = connect(start(save_tokenizer(tmp_path / "other", template)))
    with pytest.raises(openai.BadRequestError, match=words) as caught:
        client.chat.completions.create(model=BASE, messages=ASKED, tools=[TOOL])
    assert caught.value.param == "tools"


FORMS = {
    "hermes": ("<tool_call>\n{",
               'Well. <tool_call>\n{"name": "weather", "arguments": {"city": "Ulm", "days": 2}}\n</tool_call>'),
    "qwen3_coder": ("<tool_call>\n<function=name>", "<tool_call>\n<function=weather>\n<parameter=city>\nUlm\n</parameter>\n"
                    "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call>"),
    "llama3_json": ("<|python_tag|>", '{"name": "weather", "parameters": {"city": "Ulm", "days": 2}}'),
    "glm45": ("<tool_call>name\n<arg_key>", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Ulm</arg_value>\n"
              "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0"
                '<|tool_call_argument_begin|>{"city": "Ulm", "days": 2}<|tool_call_end|><|tool_calls_section_end|>'),
}
MARKS = ["<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>", "<|tool_call_end|>",
         "<|tool_call_argument_begin|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<function=",
         "</function>", "<parameter=", "</parameter>", "<|python_tag|>"]


@pytest.mark.parametrize("name", FORMS)
def test_each_known_form_is_told_by_its_template_and_read(name):
    mark, text = FORMS[name]
    tokenizer = make_tokenizer("{{ tools }}" + mark)
    tokenizer.add_tokens(MARKS)
    form = tool_format(mark)
    assert form.name == name
    _, calls = Chat("made up", tokenizer).tool_calls(text, [TOOL], form)
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Ulm", "days": 2})]
