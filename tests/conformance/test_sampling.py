"""Answers and their log-probabilities: of the weights that were asked for, and only of those."""

import string

import numpy as np
import pytest
from programs import batch, datum, greedy, now, prompt, prompt_of, rows, tensor, train
from tinker import types

COUNT = 6


@pytest.fixture
def base(service, target):
    return now(service.create_sampling_client(base_model=target.model))


def forward_of(run, tokens) -> np.ndarray:
    """The trainer's log-probabilities of a sequence, from its second token on."""
    targets = {"target_tokens": tensor(tokens[1:], np.int64), "weights": tensor(np.ones(len(tokens) - 1), np.float32)}
    data = types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=targets)
    return rows(now(run.forward([data], "cross_entropy")))


def check_agreement(target, run, sampler):
    """Prompt and answer score the same in the trainer, in the answer and as a prompt."""
    tokens = prompt_of(3)
    assert target.same(np.array(now(sampler.compute_logprobs(prompt(3)))[1:]), forward_of(run, tokens))
    drawn = greedy(sampler, 3).sequences[0]
    whole = [*tokens, *drawn.tokens]
    scored = np.array(now(sampler.compute_logprobs(types.ModelInput.from_ints(whole)))[1:])
    assert target.same(np.array(drawn.logprobs), scored[len(tokens) - 1:])
    assert target.same(forward_of(run, whole), scored)


def test_a_fresh_adapter_is_its_base_model(target, new_run, base):
    check_agreement(target, new_run(), base)


def test_trainer_and_sampler_agree_after_training(target, new_run):
    run = new_run()
    train(run, batch(1, 3))
    check_agreement(target, run, now(run.save_weights_and_get_sampling_client()))


def test_prompt_logprobs(target, base):
    scores = now(base.compute_logprobs(prompt(1)))
    assert len(scores) == 8 and scores[0] is None and all(score <= 0 for score in scores[1:])
    last = now(base.compute_logprobs(prompt(1), prompt_logprobs_last_n=2))
    assert last[:-2] == [None] * 6 and target.same(np.array(last[-2:]), np.array(scores[-2:]))


def test_prompt_logprobs_are_absent_unless_asked_for(base):
    assert greedy(base).prompt_logprobs is None
    with_both = greedy(base, include_prompt_logprobs=True)
    assert len(with_both.prompt_logprobs) == 8 and len(with_both.sequences[0].tokens) == COUNT


def test_topk_rows_of_a_prompt(target, base):
    answer = greedy(base, include_prompt_logprobs=True, topk_prompt_logprobs=3)
    table = answer.topk_prompt_logprobs
    assert len(table) == 8 and table[0] is None
    for token, score, row in zip(prompt_of(1)[1:], answer.prompt_logprobs[1:], table[1:], strict=True):
        found = dict(row)
        assert len(row) == len(found) == 3 and sorted(found.values(), reverse=True) == [p for _, p in row]
        assert abs(found.get(token, score) - score) <= target.tolerance
        assert sum(np.exp(list(found.values()))) <= 1 + target.tolerance


def test_targets_are_scored_as_the_prompts_own_tokens_are(target, base):
    tokens = prompt_of(1)
    answer = greedy(base, include_prompt_logprobs=True, target_prompt_logprobs=tensor([[t, -1] for t in tokens[1:]], np.int64))
    found = answer.target_prompt_logprobs
    assert found.dtype == "float32" and found.shape == [7, 2] and not np.any(found.to_numpy()[:, 1])
    assert target.same(found.to_numpy()[:, 0], np.array(answer.prompt_logprobs[1:]))
    sparse = types.TensorData(
        [tokens[3], tokens[7]], "int64", [7, 50], sparse_crow_indices=[0, 0, 0, 1, 1, 1, 1, 2], sparse_col_indices=[49, 0])
    found = greedy(base, target_prompt_logprobs=sparse).target_prompt_logprobs
    assert (found.shape, found.sparse_crow_indices, found.sparse_col_indices) == (
        [7, 50], sparse.sparse_crow_indices, sparse.sparse_col_indices)
    assert target.same(np.array(found.data), np.array([answer.prompt_logprobs[3], answer.prompt_logprobs[7]]))


def test_alternatives_to_a_prompts_tokens_are_scored_by_the_model_and_repeated_by_a_seed(target, base):
    params = types.SamplingParams(max_tokens=1, temperature=0.8, seed=7)

    def ask(**more):
        return now(base.sample(prompt(1), num_samples=1, sampling_params=params, **more))

    drawn = ask(prompt_alt_tokens_k=3).prompt_alt_tokens
    assert drawn.tokens.shape == drawn.logprobs.shape == [7, 3]
    scored = ask(target_prompt_logprobs=tensor(drawn.tokens.to_numpy(), np.int64)).target_prompt_logprobs
    assert target.same(drawn.logprobs.to_numpy(), scored.to_numpy())
    assert ask(prompt_alt_tokens_k=3, include_prompt_logprobs=True).prompt_alt_tokens.tokens.tolist() == drawn.tokens.tolist()


def test_topk_rows_of_an_answer(target, base):
    drawn = greedy(base, topk_sample_logprobs=3).sequences[0]
    table = drawn.topk_logprobs_np
    assert table.token_ids.shape == table.logprobs.shape == (COUNT, 3)
    # At temperature 0 the likeliest token is the one that is drawn.
    assert target.same(table.logprobs[:, 0], np.array(drawn.logprobs))
    assert (np.diff(table.logprobs, axis=1) <= 0).all()
    assert all(token in row for token, row in zip(drawn.tokens, table.token_ids.tolist(), strict=True))


def test_several_answers_to_one_prompt(base):
    params = types.SamplingParams(max_tokens=3, temperature=1.0, stop=[])
    answer = now(base.sample(prompt(2), num_samples=4, sampling_params=params))
    assert [len(s.tokens) for s in answer.sequences] == [len(s.logprobs) for s in answer.sequences] == [3] * 4
    assert len({s.sequence_id for s in answer.sequences}) == 4
    assert all(score <= 0 for s in answer.sequences for score in s.logprobs)


def test_without_stops_an_answer_is_as_long_as_it_may_be(base):
    drawn = greedy(base, stop=[], max_tokens=20).sequences[0]
    assert len(drawn.tokens) == len(drawn.logprobs) == 20 and str(drawn.stop_reason) == "length"


def test_the_models_own_end_stops_by_default(base):
    drawn = greedy(base, stop=None).sequences[0]
    whole = list(greedy(base).sequences[0].tokens)
    assert list(drawn.tokens) == whole[: len(drawn.tokens)]
    assert str(drawn.stop_reason) == ("length" if len(drawn.tokens) == COUNT else "stop")


def test_a_stop_token_ends_an_answer_and_stays_in_it(base):
    whole = list(greedy(base).sequences[0].tokens)
    end = whole[3]
    drawn = greedy(base, stop=[end]).sequences[0]
    assert list(drawn.tokens) == whole[: whole.index(end) + 1] and str(drawn.stop_reason) == "stop"
    assert len(drawn.logprobs) == len(drawn.tokens)


def test_a_stop_string_ends_an_answer_and_stays_in_it(base):
    """Without a tokenizer: a text of a model has a letter, a digit or a mark soon, and a NUL never."""
    whole = list(greedy(base, max_tokens=20).sequences[0].tokens)
    never = greedy(base, max_tokens=20, stop=["\x00never\x00"]).sequences[0]
    assert list(never.tokens) == whole and str(never.stop_reason) == "length"
    anything = [*string.ascii_letters, *string.digits, *string.punctuation]
    drawn = greedy(base, max_tokens=20, stop=anything).sequences[0]
    assert 1 <= len(drawn.tokens) < 20 and str(drawn.stop_reason) == "stop"
    assert list(drawn.tokens) == whole[: len(drawn.tokens)] and len(drawn.logprobs) == len(drawn.tokens)


def scores(sampler) -> np.ndarray:
    return np.array(now(sampler.compute_logprobs(prompt(4)))[1:])


def test_samplers_keep_their_weights(target, service, new_run, base):
    run, before = new_run(), scores(base)
    train(run, batch(1, 3))
    snapshot = now(run.save_weights_and_get_sampling_client())
    path = now(run.save_weights_for_sampler("kept")).path
    named = now(service.create_sampling_client(model_path=path))
    then, drawn = scores(snapshot), list(greedy(snapshot).sequences[0].tokens)
    assert target.differ(then, before) and target.same(scores(named), then)
    for _ in range(2):
        train(run, [datum(50, weight=3.0)])
    later = now(run.save_weights_and_get_sampling_client())
    assert target.differ(scores(later), then)
    for sampler in (snapshot, named, now(service.create_sampling_client(model_path=path))):
        assert target.same(scores(sampler), then)
        assert list(greedy(sampler).sequences[0].tokens) == drawn
    assert target.same(scores(base), before)


def test_a_sampler_tells_its_base_model(service, target, new_run, rest):
    run = new_run()
    path = now(run.save_weights_for_sampler("told")).path
    assert now(service.create_sampling_client(model_path=path)).get_base_model() == target.model
