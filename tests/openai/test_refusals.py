"""Refusals in OpenAI's shape, by the exception that OpenAI's client makes of each; keys, load, and clients that go away."""

import threading

import httpx
import openai
import pytest
from fake_engine import BASE
from server import wait_until
from talking import TEACHER

from verl_tinker.api import openai_stream
from verl_tinker.core.access import Keys
from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(180)
HELLO = [{"role": "user", "content": "Hello?"}]


def refused(call, kind=openai.BadRequestError, **options):
    with pytest.raises(kind) as caught:
        call(**{"model": BASE, **options})
    error = caught.value
    assert set(error.response.json()) == {"error"} and set(error.body) == {"message", "type", "param", "code"}
    return error


@pytest.mark.parametrize("options, param, words", [
    ({"n": 0}, "n", "greater than or equal to 1"),
    ({"temperature": -1}, "temperature", "give 0"),
    ({"top_p": 0}, "top_p", "more than 0"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"presence_penalty": 1}, "presence_penalty", "must be 0"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "left out"),
    ({"top_logprobs": 2}, "top_logprobs", "logprobs=true"),
    ({"tool_choice": "required", "tools": []}, "tool_choice", "cannot force"),
    ({"tools": [{"type": "code"}]}, "tools[0]", "function"),
    ({"response_format": {"type": "json_object"}}, "response_format", "text"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "stream=true"),
    ({"messages": []}, "messages", "at least 1"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages.0.role", "system"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
     "messages[0].content[0]", "text only"),
])
def test_a_bad_field_is_named(client, options, param, words):
    error = refused(client.chat.completions.create, **{"messages": HELLO, **options})
    assert error.type == "invalid_request_error" and error.param == param and words in error.message


@pytest.mark.parametrize("options, param", [
    ({"prompt": []}, "prompt"), ({"prompt": ""}, "prompt"), ({"prompt": [2**40]}, "prompt"), ({"prompt": [5000]}, "prompt"),
    ({"prompt": "x", "max_tokens": 0}, "max_tokens"), ({"prompt": "x", "suffix": "y"}, "suffix"),
    ({"prompt": "x", "best_of": 3}, "best_of"), ({"prompt": ["x"] * 300}, "prompt"),
])
def test_a_bad_completion_names_its_field(client, options, param):
    assert refused(client.completions.create, **options).param == param


def test_too_long_a_chat_has_the_code_by_which_agents_shorten_it(client):
    error = refused(client.chat.completions.create, messages=[{"role": "user", "content": "x" * 5000}])
    assert error.code == "context_length_exceeded" and "maximum context length is 4096 tokens" in error.message
    error = refused(client.chat.completions.create, messages=HELLO, max_tokens=4096)
    assert error.code == "context_length_exceeded"


@pytest.mark.parametrize("model", ["gpt-4o", "fake/mute", "tinker://a:train:0/sampler_weights/none"])
def test_unknown_models_are_not_found(client, model):
    error = refused(client.chat.completions.create, openai.NotFoundError, model=model, messages=HELLO)
    assert (error.code, error.param, error.type) == ("model_not_found", "model", "invalid_request_error")
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve(model)


def test_training_checkpoints_cannot_be_sampled(client, trained):
    saved = trained.raw.post("save_weights", model_id=trained.raw.model, seq_id=4, path="state")
    path = trained.raw.result(saved["request_id"])["path"]
    error = refused(client.chat.completions.create, model=path, messages=HELLO)
    assert "cannot be sampled" in error.message and error.param == "model"


def test_a_template_that_refuses_is_a_refusal(start, connect, tmp_path):
    from talking import save_tokenizer

    folder = save_tokenizer(tmp_path / "strict", "{{ raise_exception('roles must alternate') }}")
    error = refused(connect(start(folder)).chat.completions.create, messages=HELLO)
    assert "roles must alternate" in error.message and error.param == "messages"
    bare = connect(start(save_tokenizer(tmp_path / "bare", None)))
    assert "/v1/completions" in refused(bare.chat.completions.create, messages=HELLO).message
    assert bare.completions.create(model=BASE, prompt="x").choices[0].text == "I have weight 0."


def test_a_model_without_a_tokenizer_says_so(start, connect, tmp_path):
    (tmp_path / "empty").mkdir()
    client = connect(start(tmp_path / "empty"))
    for _ in range(2):
        assert "tokenizer" in refused(client.chat.completions.create, messages=HELLO).message
    assert "no tokenizers" in refused(connect(start(tokenizers=None)).chat.completions.create, messages=HELLO).message


@pytest.fixture
def keyed(start, tmp_path, train):
    keys = Keys(tmp_path / "keys.json")
    secrets = {name: keys.add(name) for name in ("alice", "bob")}
    server = start(keys=keys)
    with server.http() as http:
        http.headers["X-API-Key"] = secrets["alice"]
        yield server, secrets, train(http)


def test_keys_open_the_door_as_bearers_and_in_the_sdks_header(keyed, connect):
    server, secrets, _ = keyed
    error = refused(connect(server, "tml-wrong").chat.completions.create, openai.AuthenticationError, messages=HELLO)
    assert (error.code, error.type) == ("invalid_api_key", "authentication_error")
    assert connect(server, secrets["bob"]).chat.completions.create(model=BASE, messages=HELLO).choices
    answer = httpx.get(f"{server.url}/v1/models", headers={"X-API-Key": secrets["bob"]}, verify=False)
    assert answer.status_code == 200
    assert httpx.get(f"{server.url}/v1/models", verify=False).status_code == 401


def test_anothers_weights_are_not_there_until_they_are_published(keyed, connect):
    server, secrets, trained = keyed
    alice, bob = (connect(server, secrets[name]) for name in ("alice", "bob"))
    assert alice.chat.completions.create(model=trained.path, messages=HELLO).choices
    assert [model.id for model in bob.models.list()] == [BASE, TEACHER]
    mine = refused(bob.chat.completions.create, openai.NotFoundError, model=trained.path, messages=HELLO).message
    nowhere = trained.path.replace("first", "never")
    assert refused(bob.chat.completions.create, openai.NotFoundError, model=nowhere, messages=HELLO).message \
        == mine.replace("first", "never")
    where = trained.path.removeprefix("tinker://").split("/")
    trained.raw.http.post(f"/training_runs/{where[0]}/checkpoints/{where[1]}/{where[2]}/publish")
    assert bob.chat.completions.create(model=trained.path, messages=HELLO).choices


def test_a_server_that_starts_says_so(start, connect):
    error = refused(connect(start(ready=False)).chat.completions.create, openai.InternalServerError, messages=HELLO)
    assert error.status_code == 503 and "starting" in error.message and error.response.headers["Retry-After"]


def test_too_many_at_once_are_told_to_come_again(start, connect):
    server = start(max_waiting_samples=1)
    server.engine.hold.add("sample")
    client = connect(server)
    first = threading.Thread(target=lambda: client.chat.completions.create(model=BASE, messages=HELLO))
    first.start()
    wait_until(lambda: server.engine.samples_at_once == 1)
    error = refused(client.chat.completions.create, openai.RateLimitError, messages=HELLO)
    assert error.code == "rate_limit_exceeded" and error.response.headers["Retry-After"] == "1"
    server.engine.hold.clear()
    first.join(20)
    assert not first.is_alive()


def test_a_failed_sample_is_a_server_error(server, client):
    server.engine.fail["sample"] = EngineError("the sampler died")
    error = refused(client.chat.completions.create, openai.InternalServerError, messages=HELLO)
    assert error.type == "server_error" and "the sampler died" in error.message


def test_what_fails_inside_the_server_has_the_same_shape(client, monkeypatch):
    def broken(self, tokens, text):
        raise RuntimeError("no such token in /srv/models/tokenizer.json")

    monkeypatch.setattr("verl_tinker.chat.Chat.pieces", broken)
    error = refused(client.chat.completions.create, openai.InternalServerError, messages=HELLO)
    assert error.type == "server_error" and "no such token in tokenizer.json" in error.message
    with pytest.raises(openai.APIError, match="no such token in tokenizer.json"):
        list(client.chat.completions.create(model=BASE, messages=HELLO, stream=True))


@pytest.mark.parametrize("stream", [False, True])
def test_the_sample_of_a_client_that_goes_away_is_cancelled(server, stream, monkeypatch):
    monkeypatch.setattr(openai_stream, "QUIET_SECONDS", 0.05)
    server.engine.hold.add("sample")
    body = {"model": BASE, "messages": HELLO, "stream": stream}
    with httpx.Client(verify=False, timeout=2) as http:
        if stream:
            with http.stream("POST", f"{server.url}/v1/chat/completions", json=body) as answer:
                assert next(answer.iter_raw()).startswith(b":")
        else:
            with pytest.raises(httpx.ReadTimeout):
                http.post(f"{server.url}/v1/chat/completions", json=body)
    wait_until(lambda: server.engine.samples_at_once == 0)
    assert "sample" in server.engine.hold


def test_a_stream_that_waits_shows_life_and_ends_with_the_answer_or_the_reason(server, client, monkeypatch):
    monkeypatch.setattr(openai_stream, "QUIET_SECONDS", 0.05)
    for error in (None, EngineError("the sampler died")):
        server.engine.hold.add("sample")
        stream = client.chat.completions.create(model=BASE, messages=HELLO, stream=True)
        assert stream.response.status_code == 200
        lines = stream.response.iter_lines()
        assert next(lines) == ": waiting for the sampler"
        if error:
            server.engine.fail["sample"] = error
        server.engine.hold.clear()
        rest = "\n".join(lines)
        assert ("the sampler died" in rest and '"server_error"' in rest) if error else rest.endswith("data: [DONE]\n")
