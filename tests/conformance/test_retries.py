"""Calls and answers that are lost on the way: clients send again, and everything happens once."""

import numpy as np
import pytest
from programs import batch, datum, greedy, now, prompt_of, step, weights_of

ENDPOINTS = ("create_session create_model forward_backward optim_step save_weights save_weights_for_sampler asample "
             "retrieve_future").split()


def program(service, new_run):
    """Two unequal gradients, a step, one more, a save, a snapshot, an answer: each shows if anything acted twice."""
    run = new_run(service)
    pending = [run.forward_backward(batch(1, 3), "cross_entropy"),
               run.forward_backward([datum(9, weight=-2.0)], "cross_entropy"), step(run),
               run.forward_backward(batch(5, 2), "cross_entropy"), step(run)]
    for future in pending:
        now(future)
    path = now(run.save_state("once")).path
    sampler = now(run.save_weights_and_get_sampling_client())
    return weights_of(run), greedy(sampler).sequences[0].tokens, path, run.model_id


@pytest.fixture
def undisturbed(service, new_run):
    return program(service, new_run)


def check_same(target, rest, one, other):
    assert target.same(one[0], other[0])
    assert list(one[1]) == list(other[1])
    saved = [c.tinker_path for c in now(rest.list_checkpoints(one[3])).checkpoints if c.checkpoint_type == "training"]
    assert saved == [one[2]]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_a_lost_answer_changes_nothing(endpoint, target, connect, proxy, rest, new_run, undisturbed):
    proxy.lose(endpoint, delivered=True)
    disturbed = program(connect(proxy.url), new_run)
    assert proxy.lost == [endpoint]
    check_same(target, rest, disturbed, undisturbed)


def test_calls_that_never_arrive_change_nothing(target, connect, proxy, rest, new_run, undisturbed):
    proxy.lose(*ENDPOINTS, delivered=False)
    disturbed = program(connect(proxy.url), new_run)
    assert set(ENDPOINTS) == set(proxy.lost)
    check_same(target, rest, disturbed, undisturbed)


def test_a_repeated_command_is_the_same_command(target, wire, new_run):
    """The body of a repeat may differ; the number says that it is one."""
    plain = new_run()
    first = wire.send_batch(1, batch(1, 2))
    assert wire.send_batch(1, batch(1, 2)) == first
    wire.result(first)
    assert wire.send_batch(1, batch(1, 2)) == first
    stepped = wire.step(2)
    assert wire.step(2, learning_rate=1.0) == stepped
    assert wire.result(stepped) == wire.result(stepped)
    now(plain.forward_backward(batch(1, 2), "cross_entropy"))
    now(step(plain))
    assert target.same(wire.weights(3), weights_of(plain))


def test_results_may_be_read_twice(wire):
    request = wire.send_batch(1, batch(1, 2))
    one, two = wire.result(request), wire.result(request)
    assert one.metrics == two.metrics
    for a, b in zip(one.loss_fn_outputs, two.loss_fn_outputs, strict=True):
        assert np.array_equal(a["logprobs"].data, b["logprobs"].data)


def test_a_repeated_snapshot_is_the_first_one(wire):
    """SDKs send another sampler number with a repeat, and use the sampler that the result names."""
    requests = [wire.post("save_weights_for_sampler", model_id=wire.run, seq_id=1, sampling_session_seq_id=number,
                          kind="snapshot", type="save_weights_for_sampler")["request_id"] for number in (0, 1)]
    assert requests[0] == requests[1] and wire.result(requests[0])["sampling_session_id"]


def test_a_repeated_sample_is_the_same_sample(wire):
    made = {"session_id": wire.session, "sampling_session_seq_id": 5, "base_model": wire.model}
    sampler, again = (wire.post("create_sampling_session", **made)["sampling_session_id"] for _ in range(2))
    assert sampler == again
    body = {
        "sampling_session_id": sampler, "num_samples": 3, "type": "sample",
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": prompt_of(1)}]}, "prompt_logprobs": False,
        "sampling_params": {"max_tokens": 4, "temperature": 1.0, "top_k": -1, "top_p": 1.0}}
    # Numbers of clients of one sampler have 64 bits.
    first, repeat, other = (wire.post("asample", seq_id=seq, **body) for seq in (10**18 + 5, 10**18 + 5, 6))
    assert first["request_id"] == repeat["request_id"] != other["request_id"]
    assert first["sample_sequence_ids"] == repeat["sample_sequence_ids"]
    ids = [*first["sample_sequence_ids"], *other["sample_sequence_ids"]]
    assert len(ids) == len(set(ids)) == 6
    one, two = wire.result(first["request_id"]), wire.result(first["request_id"])
    assert [list(s.tokens) for s in one.sequences] == [list(s.tokens) for s in two.sequences]


def test_a_session_is_made_once_for_each_key(http):
    body = {"tags": [], "user_metadata": {}, "sdk_version": "0.38.0", "type": "create_session"}
    made = [http.post("create_session", json=body, headers={"X-Idempotency-Key": f"conformance-{k}-{id(http)}"}).json()
            ["session_id"] for k in "aab"]
    assert made[0] == made[1] != made[2]
