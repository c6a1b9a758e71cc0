"""OpenAI's client and the SDK against the real server: the same greedy tokens give the same text."""

import httpx
import openai
import pytest
import tinker
from real_server import start_server, stop_server
from tinker import types
from transformers import AutoTokenizer

from verl_tinker.models import resolve_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]
HELLO = [{"role": "user", "content": "Tell me of the sea."}]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    process, url = start_server(tmp_path_factory.mktemp("server"), "server.model_path=bundled:tiny")
    yield url
    assert stop_server(process) == 0


@pytest.fixture(scope="module")
def client(server):
    with openai.OpenAI(base_url=f"{server}/v1", api_key="tml-local", timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def sdk(server):
    client = tinker.ServiceClient(base_url=server, api_key="tml-local")
    yield client
    client.close("success").result(60)


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("bundled:tiny"))


@pytest.fixture(scope="module")
def paths(client, sdk):
    """The base model, and the weights of a run that has moved away from it."""
    base = client.models.list().data[0].id
    training = sdk.create_lora_training_client(base_model=base, rank=8).result(120)
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(list(range(10, 30))),
        loss_fn_inputs={"target_tokens": types.TensorData(data=[700] * 20, dtype="int64"),
                        "weights": types.TensorData(data=[1.0] * 20, dtype="float32")})
    for _ in range(3):
        training.forward_backward([datum], "cross_entropy").result(120)
        training.optim_step(types.AdamParams(learning_rate=0.05)).result(120)
    return [base, training.save_weights_for_sampler("openai").result(120).path]


def greedy(sdk, model, tokens, count):
    sampler = sdk.create_sampling_client(model_path=model) if model.startswith("tinker:") else sdk.create_sampling_client(
        base_model=model)
    params = types.SamplingParams(max_tokens=count, temperature=0)
    return sampler.sample(types.ModelInput.from_ints(tokens), 1, params).result(120).sequences[0]


@pytest.mark.parametrize("number", [0, 1])
def test_a_greedy_chat_is_the_sdks_sample_of_the_same_tokens(client, sdk, tokenizer, paths, number):
    model = paths[number]
    answer = client.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=24, logprobs=True,
                                            extra_body={"return_token_ids": True})
    text = tokenizer.apply_chat_template(HELLO, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer(text, add_special_tokens=False).input_ids
    assert answer.prompt_token_ids == prompt
    sequence = greedy(sdk, model, prompt, 24)
    choice = answer.choices[0]
    assert choice.token_ids == list(sequence.tokens)
    assert choice.message.content == tokenizer.decode(sequence.tokens, skip_special_tokens=True)
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(list(sequence.logprobs), abs=1e-4)
    streamed = client.chat.completions.create(model=model, messages=HELLO, temperature=0, max_tokens=24, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed) == choice.message.content


def test_text_comes_while_the_sample_runs(server, client, paths):
    stream = client.completions.create(model=paths[1], prompt="The sea", max_tokens=1500, temperature=0, stream=True)
    first = next(iter(stream))
    assert 'operations_running{kind="sample"} 1.0' in httpx.get(f"{server}/metrics", trust_env=False).text
    rest = list(stream)
    assert first.choices[0].text is not None and len(rest) > 500 and rest[-1].choices[0].finish_reason


def test_other_weights_give_another_answer(client, paths):
    said = [client.completions.create(model=model, prompt="The sea", temperature=0, max_tokens=16).choices[0].text
            for model in paths]
    assert said[0] != said[1]


def test_a_stop_string_a_seed_and_several_choices(client, paths):
    asked = dict(model=paths[0], prompt="The sea", max_tokens=16, temperature=1, seed=7, n=3)
    first, second = (client.completions.create(**asked) for _ in range(2))
    assert [c.text for c in first.choices] == [c.text for c in second.choices]
    assert len({c.text for c in first.choices}) > 1
    greedy_text = client.completions.create(model=paths[0], prompt="The sea", max_tokens=16, temperature=0).choices[0].text
    stop = greedy_text[len(greedy_text) // 2 :][:3]
    cut = client.completions.create(model=paths[0], prompt="The sea", max_tokens=16, temperature=0, stop=stop).choices[0]
    assert cut.text == greedy_text[: greedy_text.index(stop)] and cut.finish_reason == "stop"


def test_the_prompts_scores_are_those_of_the_sdk(client, sdk, tokenizer, paths):
    prompt = tokenizer("The sea is deep").input_ids
    scored = client.completions.create(model=paths[0], prompt=prompt, max_tokens=0, echo=True, logprobs=1).choices[0]
    expected = sdk.create_sampling_client(base_model=paths[0]).compute_logprobs(types.ModelInput.from_ints(prompt)).result(120)
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[1:] == pytest.approx(expected[1:], abs=1e-4)
