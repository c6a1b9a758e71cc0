"""Target log-probabilities and alternative tokens of a prompt, through the real SDK: layouts, and what they leave alone."""

import numpy as np
import pytest
import torch
from data import tensor
from fake_engine import BASE
from raw import PROTOBUF
from tinker import types
from tinker.proto.response_conv import deserialize_sample_response

pytestmark = pytest.mark.timeout(180)

PROMPT = types.ModelInput.from_ints([5, 6, 7, 8])
# Row i is for prompt position i + 1.
IDS = np.array([[10, -1, 10], [-1, -1, -1], [0, 999, 3]], np.int64)
SCORES = np.where(IDS < 0, 0, -1 - IDS / 1000)


@pytest.fixture
def sampler(client):
    return client.create_sampling_client(base_model=BASE).result(20)


def ask(sampler, prompt=PROMPT, n=1, **options):
    return sampler.sample(prompt, n, types.SamplingParams(max_tokens=2, temperature=0.5, seed=1), **options).result(20)


def test_dense_targets_are_scored_where_they_were_asked_for(sampler):
    found = ask(sampler, target_prompt_logprobs=tensor(IDS, np.int64)).target_prompt_logprobs
    assert found.dtype == "float32" and found.shape == [3, 3] and found.sparse_crow_indices is None
    np.testing.assert_allclose(found.to_numpy(), SCORES, atol=1e-6)


def test_sparse_targets_come_back_in_their_layout(sampler):
    wide = torch.full((3, 40), -1, dtype=torch.int64)
    wide[0, 1], wide[2, 0], wide[2, 39] = 7, 0, 999
    asked = types.TensorData.from_torch_sparse(wide, pad_value=-1)
    found = ask(sampler, target_prompt_logprobs=asked).target_prompt_logprobs
    assert (found.shape, found.sparse_crow_indices, found.sparse_col_indices) == ([3, 40], [0, 1, 1, 3], [1, 0, 39])
    assert found.data == pytest.approx([-1.007, -1.0, -1.999])
    assert found.to_torch()[2, 39] == pytest.approx(-1.999)


def test_a_listed_cell_may_ask_for_nothing(sampler):
    asked = types.TensorData([-1, 9], "int64", [3, 40], sparse_crow_indices=[0, 1, 2, 2], sparse_col_indices=[3, 3])
    assert ask(sampler, target_prompt_logprobs=asked).target_prompt_logprobs.data == pytest.approx([0.0, -1.009])


def test_alternatives_of_every_position_after_the_first(sampler):
    found = ask(sampler, prompt_alt_tokens_k=2).prompt_alt_tokens
    assert (found.tokens.dtype, found.logprobs.dtype) == ("int64", "float32")
    assert found.tokens.tolist() == [[7, 8], [8, 9], [9, 10]]
    np.testing.assert_allclose(found.logprobs.to_numpy(), -1 - found.tokens.to_numpy() / 1000, atol=1e-6)


def test_a_prompt_of_one_token_has_no_alternatives(sampler):
    found = ask(sampler, types.ModelInput.from_ints([5]), prompt_alt_tokens_k=2).prompt_alt_tokens
    assert found.tokens.shape == found.logprobs.shape == [0, 2]


def test_each_part_of_an_answer_is_there_only_when_asked_for_and_alone(sampler):
    extras = {"target_prompt_logprobs": tensor(IDS, np.int64), "prompt_alt_tokens_k": 3}
    alone = ask(sampler, n=2, **extras)
    assert alone.prompt_logprobs is None and alone.topk_prompt_logprobs is None and len(alone.sequences) == 2
    plain = ask(sampler, include_prompt_logprobs=True)
    assert plain.target_prompt_logprobs is None and plain.prompt_alt_tokens is None
    last = ask(sampler, include_prompt_logprobs=True, topk_prompt_logprobs=2, prompt_logprobs_last_n=1, **extras)
    assert last.prompt_logprobs == [None, None, None, plain.prompt_logprobs[3]]
    assert last.topk_prompt_logprobs[:3] == [None] * 3
    assert last.target_prompt_logprobs.tolist() == alone.target_prompt_logprobs.tolist()
    assert last.prompt_alt_tokens.tokens.tolist() == alone.prompt_alt_tokens.tokens.tolist()


def test_the_engine_is_told_what_was_asked_for_and_nothing_when_it_was_not(server, sampler):
    seen, inner = [], server.engine.sample

    async def sample(base_model, version, request, told=None):
        seen.append(request)
        return await inner(base_model, version, request)

    server.engine.sample = sample
    ask(sampler)
    ask(sampler, target_prompt_logprobs=tensor(IDS, np.int64), prompt_alt_tokens_k=3)
    assert seen[0].target_prompt is None and seen[0].prompt_alt_k == 0
    assert seen[1].target_prompt.values.tolist() == IDS.ravel().tolist() and seen[1].target_prompt.shape == (3, 3)
    assert seen[1].prompt_alt_k == 3 and seen[1].params.temperature == 0.5


@pytest.mark.parametrize("sparse", [False, True])
def test_both_encodings_of_an_answer_say_the_same(raw, sparse):
    asked = {"data": [10, 3], "dtype": "int64", "shape": [2, 1]}
    if sparse:
        asked |= {"shape": [2, 9], "sparse_crow_indices": [0, 1, 2], "sparse_col_indices": [8, 0]}
    request = raw.sample(raw.base_sampler(), prompt=(5, 6, 7), target_prompt_logprobs=asked, prompt_alt_tokens_k=2)
    text = raw.result(request)
    answer = raw.http.post("/retrieve_future", json={"request_id": request}, headers={"Accept": PROTOBUF})
    binary = deserialize_sample_response(answer.content)
    targets = types.TensorData(**text["target_prompt_logprobs"])
    assert targets.tolist() == binary.target_prompt_logprobs.tolist()
    for part in ("tokens", "logprobs"):
        told = types.TensorData(**text["prompt_alt_tokens"][part])
        assert told.tolist() == getattr(binary.prompt_alt_tokens, part).tolist()
