"""Text reaches the client while it is drawn, never more than the whole answer will say, and never after a refusal."""

import asyncio
import threading
from types import SimpleNamespace

import httpx
import openai
import pytest
from fake_engine import BASE
from server import wait_until

from verl_tinker.api.openai_stream import Delivery
from verl_tinker.core.errors import EngineError
from verl_tinker.core.futures import Future

pytestmark = pytest.mark.timeout(120)
HELLO = [{"role": "user", "content": "Hello?"}]


@pytest.fixture
def paused(server):
    """Have the engine wait before a token; gives the event that lets it go on."""
    def at(token, error=None):
        go_on = threading.Event()
        server.engine.pause = (token, go_on, error)
        return go_on

    return at


def texts(stream):
    return (choice.delta.content for chunk in stream for choice in chunk.choices if choice.delta.content)


def test_text_comes_before_the_answer_is_complete(client, paused):
    go_on = paused(8)
    stream = client.chat.completions.create(model=BASE, messages=HELLO, stream=True)
    pieces = texts(stream)
    # The last of the eight drawn may yet turn out to be the end.
    assert "".join(next(pieces) for _ in range(7)) == "I have "
    go_on.set()
    assert "".join(pieces) == "weight 0."


@pytest.mark.parametrize("n", [1, 3])
def test_the_parts_hold_what_the_whole_answer_holds(server, client, paused, n):
    server.engine.says = lambda prompt, weight: "Grüße, 你好 🙂!"
    asked = dict(model=BASE, messages=HELLO, n=n, logprobs=True, top_logprobs=2, extra_body={"return_token_ids": True})
    whole = client.chat.completions.create(**asked)
    paused(11).set()
    chunks = list(client.chat.completions.create(**asked, stream=True))
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert [c.delta.role for c in mine if c.delta.role] == ["assistant"] and mine[0].delta.role
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content
        assert [entry for c in mine if c.logprobs for entry in c.logprobs.content] == choice.logprobs.content
        assert [t for c in mine for t in getattr(c, "token_ids", None) or []] == choice.token_ids
        assert [c.finish_reason for c in mine if c.finish_reason] == ["stop"]


def test_completions_of_several_prompts_stream_too(client, paused):
    asked = dict(model=BASE, prompt=["ab", "c"], n=2, max_tokens=9, logprobs=1)
    whole = client.completions.create(**asked)
    paused(4).set()
    chunks = list(client.completions.create(**asked, stream=True))
    for choice in whole.choices:
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(part.text for part in mine) == choice.text == "I have we"
        for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [x for p in mine if p.logprobs for x in getattr(p.logprobs, field)] == getattr(choice.logprobs, field)


def test_what_may_become_a_stop_string_is_held_back(client, paused):
    """Eleven tokens are "I have weig", of which the last four letters begin the stop string."""
    go_on = paused(11)
    stream = client.chat.completions.create(model=BASE, messages=HELLO, stop=["weight"], stream=True)
    pieces, said = texts(stream), ""
    while len(said) < len("I have"):
        said += next(pieces)
    go_on.set()
    assert said + "".join(pieces) == "I have "


def test_what_is_held_back_makes_no_noise(server):
    body = {"model": BASE, "messages": HELLO, "stop": ["weight 0."], "stream": True}
    with httpx.Client(verify=False, timeout=10) as http:
        with http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"


def test_an_error_in_the_middle_is_an_event_after_the_text(client, paused):
    go_on = paused(8, EngineError("the sampler died"))
    stream = client.chat.completions.create(model=BASE, messages=HELLO, stream=True)
    pieces = texts(stream)
    assert next(pieces) == "I"
    go_on.set()
    with pytest.raises(openai.APIError, match="the sampler died"):
        list(pieces)


def test_a_client_that_goes_away_in_the_middle_ends_its_sample(server, paused):
    go_on = paused(8)
    body = {"model": BASE, "messages": HELLO, "stream": True}
    with httpx.Client(verify=False, timeout=10) as http:
        with http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
            assert next(answer.iter_lines()).startswith("data: ")
    wait_until(lambda: server.engine.samples_open == 0)
    go_on.set()


def test_an_answer_that_may_call_tools_comes_in_one_go(server, client, paused):
    server.engine.says = lambda prompt, weight: '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    paused(8).set()
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    chunks = list(client.chat.completions.create(model=BASE, messages=HELLO, tools=[tool], stream=True))
    calls = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    assert [call.function.name for call in calls] == ["add"] and not any(c.choices[0].delta.content for c in chunks)


def test_a_stream_that_ends_in_the_middle_of_a_send_ends_its_samples():
    """A client that stops reading and goes: nobody waits for a change then, which is where its absence is noticed."""
    async def run():
        futures, cancelled = [Future("sample-1", "sample")], []
        service = SimpleNamespace(sampling=SimpleNamespace(cancel=cancelled.append))
        events = Delivery(None, service, futures, None, None, None)._events()
        await anext(events)
        await events.aclose()
        assert cancelled == futures

    asyncio.run(run())
