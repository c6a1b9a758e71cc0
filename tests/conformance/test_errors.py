"""Bad content is told by the future as the user's, changes nothing, and the next good command works."""

import numpy as np
import pytest
import tinker
from programs import batch, datum, now, prompt, prompt_of, step, tensor, train, weights_of
from tinker import types

NO_TARGETS = types.Datum(model_input=types.ModelInput.from_ints([10, 11]), loss_fn_inputs={})
RAGGED = types.Datum(
    model_input=types.ModelInput.from_ints([10, 11, 12]),
    loss_fn_inputs={"target_tokens": tensor([13, 14], np.int64), "weights": tensor([1.0, 1.0], np.float32)})
OUTSIDE = types.Datum(
    model_input=types.ModelInput.from_ints([2**31 - 1]),
    loss_fn_inputs={"target_tokens": tensor([10], np.int64), "weights": tensor([1.0], np.float32)})
BAD_BATCHES = {
    "a loss that is not there": ([datum(1)], "cross_entrpy"),
    "an input that is missing": ([datum(1)], "ppo"),
    "no targets": ([datum(1), NO_TARGETS], "cross_entropy"),
    "lengths that differ": ([datum(1), RAGGED], "cross_entropy"),
    "a token outside the vocabulary": ([OUTSIDE], "cross_entropy"),
}


def refusal(future) -> tinker.RequestFailedError:
    with pytest.raises(tinker.RequestFailedError) as failure:
        now(future)
    assert str(failure.value)
    return failure.value


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_adds_nothing(case, target, new_run):
    disturbed, plain = new_run(), new_run()
    data, loss_fn = BAD_BATCHES[case]
    assert refusal(disturbed.forward_backward(data, loss_fn)).category == "user"
    for run in (disturbed, plain):
        train(run, batch(1, 2))
    assert target.same(weights_of(disturbed), weights_of(plain))


def test_a_bad_chunk_fails_alone(target, wire, new_run):
    """A refusal of the POST itself would lock up the client, so the chunk is accepted and its future fails."""
    plain = new_run()
    requests = {seq: wire.send_batch(seq, [NO_TARGETS if seq == 2 else datum(seq)]) for seq in (3, 2, 1)}
    assert wire.result(requests[2])["category"] == "user"
    for seq in (1, 3):
        assert wire.result(requests[seq]).metrics["loss:sum"] > 0
    assert "error" not in wire.result(wire.step(4))
    train(plain, [datum(1), datum(3)])
    assert target.same(wire.weights(5), weights_of(plain))


@pytest.mark.parametrize("params", [
    {"temperature": -1.0}, {"top_p": 0.0}, {"max_tokens": 2_000_000_000}], ids=str)
def test_a_bad_sample_is_told_by_its_future(params, service, target):
    sampler = now(service.create_sampling_client(base_model=target.model))
    bad = types.SamplingParams(**{"max_tokens": 2, **params})
    assert refusal(sampler.sample(prompt(1), num_samples=1, sampling_params=bad)).category == "user"
    good = now(sampler.sample(prompt(1), num_samples=1, sampling_params=types.SamplingParams(max_tokens=2)))
    assert len(good.sequences) == 1


def test_a_prompt_outside_the_vocabulary_is_told_by_its_future(service, target):
    sampler = now(service.create_sampling_client(base_model=target.model))
    outside = types.ModelInput.from_ints([*prompt_of(1), 2**31 - 1])
    assert refusal(sampler.compute_logprobs(outside)).category == "user"
    assert now(sampler.compute_logprobs(prompt(1)))[0] is None


def test_what_is_not_there_is_refused_by_name(service, new_run):
    run = new_run()
    assert refusal(run.load_state(f"tinker://{run.model_id}/weights/none")).category == "user"
    with pytest.raises(tinker.TinkerError):
        now(service.create_lora_training_client("no/such-model", rank=8))
    with pytest.raises(tinker.TinkerError):
        now(service.create_sampling_client(model_path=f"tinker://{run.model_id}/sampler_weights/none"))
    train(run, batch(1, 1))


def test_a_name_is_taken_once_unless_overwritten(target, new_run):
    run = new_run()
    path = now(run.save_state("taken")).path
    saved = weights_of(run)
    train(run, batch(1, 2))
    assert refusal(run.save_state("taken")).category == "user"
    trained = weights_of(run)
    now(run.load_state(path))
    assert target.same(weights_of(run), saved)
    train(run, batch(1, 2))
    assert now(run.save_state("taken", overwrite=True)).path == path
    train(run, batch(5, 2))
    now(run.load_state(path))
    assert target.same(weights_of(run), trained)


def test_sampling_weights_are_no_state_to_train_on(service, new_run):
    run = new_run()
    path = now(run.save_weights_for_sampler("to-sample")).path
    assert refusal(run.load_state(path)).category == "user"
    with pytest.raises(tinker.TinkerError):
        now(service.create_training_client_from_state(path))
    now(run.forward_backward(batch(1, 1), "cross_entropy"))
    now(step(run))
