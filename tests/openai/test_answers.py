"""What OpenAI's client gets: texts, choices, log-probabilities, usage, whole and streamed."""

import pytest
from fake_engine import BASE
from talking import END, TEACHER

pytestmark = pytest.mark.timeout(180)
HELLO = [{"role": "user", "content": "Hello?"}]


def test_a_chat_is_rendered_by_the_models_template_and_answered_by_its_base_weights(server, client):
    answer = client.chat.completions.create(model=BASE, messages=[{"role": "developer", "content": "Be short."}, *HELLO])
    choice = answer.choices[0]
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", "I have weight 0.", "stop")
    assert answer.object == "chat.completion" and answer.model == BASE and answer.id.startswith("chatcmpl-")
    prompt = server.engine.tokenizer.decode(server.engine.requests[0].prompt)
    assert prompt == ("<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHello?<|im_end|>\n<|im_start|>assistant\n")
    drawn = len("I have weight 0.") + 1
    asked = len(server.engine.requests[0].prompt)
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (asked, drawn, asked + drawn)
    assert usage.prompt_tokens_details.cached_tokens == 3


def test_a_path_answers_with_its_own_weights_while_the_base_keeps_its(client, trained):
    by_path = client.chat.completions.create(model=trained.path, messages=HELLO)
    assert by_path.model == trained.path
    assert by_path.choices[0].message.content != "I have weight 0."
    assert client.chat.completions.create(model=BASE, messages=HELLO).choices[0].message.content == "I have weight 0."


def test_a_teacher_answers_by_its_name(server, client):
    assert client.chat.completions.create(model=TEACHER, messages=HELLO).choices[0].message.content == "I have weight 0."
    assert server.engine.asked == [TEACHER]


def test_the_hosted_prefix_and_the_other_header_lead_to_the_same(server, connect):
    hosted = connect(server, prefix="/oai/api/v1")
    assert hosted.chat.completions.create(model=BASE, messages=HELLO).choices[0].message.content == "I have weight 0."
    assert [model.id for model in hosted.models.list()] == [BASE, TEACHER]


def test_models_are_the_sampleable_bases_and_the_callers_sampler_weights(client, trained):
    listed = {model.id: model for model in client.models.list()}
    assert list(listed) == [BASE, TEACHER, trained.path]
    assert listed[trained.path].root == BASE and listed[trained.path].created > 0
    assert client.models.retrieve(trained.path).id == trained.path
    assert client.models.retrieve(BASE).max_model_len == 4096


def test_settings_reach_the_engine(server, client):
    client.chat.completions.create(
        model=BASE, messages=HELLO, temperature=0.3, top_p=0.9, seed=-1, max_completion_tokens=7, max_tokens=99, n=3,
        stop=["x", "y"], extra_body={"top_k": 5, "chat_template_kwargs": {"hint": "think"}})
    request = server.engine.requests[0]
    params = request.params
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (0.3, 0.9, 5, 7)
    assert params.seed == 2**63 - 1 and params.stop == ["x", "y"] and request.num_samples == 3
    assert server.engine.tokenizer.decode(request.prompt).endswith("assistant\n(think) ")


def test_nulls_are_defaults(server, client):
    client.chat.completions.create(
        model=BASE, messages=HELLO, temperature=None, top_p=None, n=None, stop=None, seed=None, max_tokens=None,
        logprobs=None, presence_penalty=None, tools=None)
    request = server.engine.requests[0]
    assert (request.params.temperature, request.num_samples, request.params.stop) == (1.0, 1, None)
    assert request.params.max_tokens == 4096 - len(request.prompt)


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(client):
    answer = client.chat.completions.create(model=BASE, messages=HELLO, stop="weight")
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("I have ", "stop")
    short = client.chat.completions.create(model=BASE, messages=HELLO, max_tokens=6)
    assert (short.choices[0].message.content, short.choices[0].finish_reason) == ("I have", "length")
    assert short.usage.completion_tokens == 6


def test_several_choices_are_numbered(client):
    answer = client.chat.completions.create(model=BASE, messages=HELLO, n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert answer.usage.completion_tokens == 3 * 17


def test_log_probabilities_of_a_chat_name_tokens_bytes_and_alternatives(server, client):
    server.engine.says = lambda prompt, weight: "é!"
    answer = client.chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=2)
    said = answer.choices[0].logprobs.content
    assert [bytes(entry.bytes) for entry in said] == [b"\xc3", b"\xa9", b"!", b"<|im_end|>"]
    assert [entry.logprob for entry in said] == [-0.5] * 4
    assert [entry.token for entry in said] == ["�", "�", "!", "<|im_end|>"]
    assert [(top.token, top.logprob) for top in said[2].top_logprobs] == [("!", -0.5), ("a", -1.5)]


@pytest.mark.parametrize("text", ["I have weight 0.", "Grüße, 你好 🙂!", " leading and trailing \n", ""])
def test_a_stream_says_what_the_whole_answer_says(server, client, text):
    server.engine.says = lambda prompt, weight: text
    whole = client.chat.completions.create(model=BASE, messages=HELLO, n=2, logprobs=True)
    chunks = list(client.chat.completions.create(
        model=BASE, messages=HELLO, n=2, logprobs=True, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert mine[0].delta.role == "assistant"
        assert "".join(c.delta.content or "" for c in mine) == choice.message.content == text
        assert [c.finish_reason for c in mine][-1] == "stop" and not any(c.finish_reason for c in mine[:-1])
        said = [entry for c in mine if c.logprobs for entry in c.logprobs.content]
        assert said == choice.logprobs.content
    assert len(chunks) > 2 * len(text.split())


def test_a_completion_takes_text_and_token_ids_one_or_many(server, client):
    answer = client.completions.create(model=BASE, prompt=["ab", "c"], n=2, max_tokens=3)
    assert [(choice.index, choice.text) for choice in answer.choices] == [(i, "I h") for i in range(4)]
    assert answer.object == "text_completion" and answer.usage.prompt_tokens == 3
    assert [r.prompt.tolist() for r in server.engine.requests] == [[97, 98], [99]]
    client.completions.create(model=BASE, prompt=[5, 6, 7])
    client.completions.create(model=BASE, prompt=[[1], [2, 3]])
    assert [r.prompt.tolist() for r in server.engine.requests[2:]] == [[5, 6, 7], [1], [2, 3]]
    assert server.engine.requests[2].params.max_tokens == 16


def test_a_completion_repeats_its_prompt_with_its_scores(client):
    """What evaluation harnesses ask for: the prompt scored, and nothing drawn."""
    answer = client.completions.create(model=BASE, prompt="né", max_tokens=0, echo=True, logprobs=2)
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason, answer.usage.completion_tokens) == ("né", "length", 0)
    said = choice.logprobs
    assert said.token_logprobs == [None, -1.5, -1.5] and said.text_offset == [0, 1, 1]
    assert said.tokens[0] == "n" and said.top_logprobs[0] is None
    assert said.top_logprobs[1]["a"] == -1.5
    both = client.completions.create(model=BASE, prompt="né", max_tokens=2, echo=True, logprobs=0).choices[0]
    assert both.text == "néI " and both.logprobs.token_logprobs == [None, -1.5, -1.5, -0.5, -0.5]
    assert both.logprobs.text_offset == [0, 1, 1, 2, 3] and both.logprobs.top_logprobs is None


def test_a_streamed_completion_says_what_the_whole_one_says(client):
    asked = dict(model=BASE, prompt="hé", max_tokens=5, logprobs=1, echo=True)
    whole = client.completions.create(**asked).choices[0]
    parts = [c.choices[0] for c in client.completions.create(**asked, stream=True)]
    assert "".join(part.text for part in parts) == whole.text
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [x for p in parts if p.logprobs for x in getattr(p.logprobs, field)] == getattr(whole.logprobs, field)
    assert parts[-1].finish_reason == "length"


def test_token_ids_come_with_the_text_when_they_are_asked_for(server, client):
    extra = {"return_token_ids": True}
    answer = client.chat.completions.create(model=BASE, messages=HELLO, max_tokens=2, extra_body=extra)
    assert answer.prompt_token_ids == server.engine.requests[0].prompt.tolist()
    assert answer.choices[0].token_ids == [ord("I"), ord(" ")]
    chunks = list(client.chat.completions.create(model=BASE, messages=HELLO, extra_body=extra, stream=True))
    ids = [token for chunk in chunks for token in getattr(chunk.choices[0], "token_ids", None) or []]
    assert ids == [*b"I have weight 0.", END]


def test_a_request_leaves_no_session_sampler_or_result_behind(server, client, trained):
    def kept():
        sessions = trained.raw.http.get("/sessions").json()["sessions"]
        samplers = [trained.raw.http.get(f"/sessions/{session}").json()["sampler_ids"] for session in sessions]
        return samplers, len(server.service.futures)

    before = kept()
    for model in (trained.path, BASE):
        client.chat.completions.create(model=model, messages=HELLO)
    assert kept() == before


def test_an_answer_too_large_for_memory_comes_from_disk(server, client, monkeypatch):
    from verl_tinker.core import futures

    monkeypatch.setattr(futures, "_IN_THREAD", 1)
    monkeypatch.setattr(futures, "_ON_DISK", 1)
    answer = client.chat.completions.create(model=BASE, messages=HELLO, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "I have weight 0."
    assert not list(server.service.journal.results_folder().glob("result-*"))
