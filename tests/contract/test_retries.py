"""Every submission may arrive twice, and every result may be asked for twice."""

import threading

import pytest
from raw import Raw
from server import wait_until

pytestmark = pytest.mark.timeout(180)


def test_a_repeated_command_is_the_same_command(server, raw):
    first = raw.forward_backward(1)
    assert raw.forward_backward(1) == first
    raw.result(first)
    assert raw.forward_backward(1) == first
    step = raw.optim_step(2)
    assert raw.optim_step(2, learning_rate=9.0) == step
    assert raw.result(step) == raw.result(step) == {
        "metrics": {"grad_norm": 4.0, "weights_version": 2.0}, "type": "optim_step"}
    assert server.engine.names() == ["create_model", "forward_backward", "optim_step"]


def test_a_repeated_snapshot_keeps_its_first_sampler(server, raw):
    first = raw.snapshot(1, number=0)
    assert raw.snapshot(1, number=1) == first
    assert raw.result(first)["sampling_session_id"] == f"{raw.session}:sample:0"
    assert server.engine.names().count("export_sampler") == 1


def test_repeated_saves_and_creates(server, raw):
    save = {"model_id": raw.model, "seq_id": 1, "path": "a"}
    first = raw.post("save_weights", **save)
    assert raw.post("save_weights", **save) == first
    assert raw.result(first["request_id"])["path"] == f"tinker://{raw.model}/weights/a"
    raw.create()
    assert server.engine.names() == ["create_model", "save_state"]


def test_a_repeated_sample_draws_once(server, raw):
    sampler = raw.base_sampler()
    assert raw.base_sampler() == sampler
    big = 10**18 + 5
    first = raw.sample(sampler, seq=big)
    assert raw.sample(sampler, seq=big) == first
    assert raw.sample(sampler, seq=1) != first
    raw.result(first)
    assert raw.binary(first).sequences[0].tokens == [100]


def test_sample_sequence_ids_are_the_same_for_a_repeat(raw):
    body = {
        "sampling_session_id": raw.base_sampler(),
        "seq_id": 0,
        "num_samples": 3,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": [1]}]},
        "sampling_params": {"max_tokens": 1},
    }
    first = raw.post("asample", **body)
    assert len(set(first["sample_sequence_ids"])) == 3
    assert raw.post("asample", **body) == first


def test_create_session_is_idempotent_by_its_key(server):
    with server.http() as http:
        ids = [http.post("/create_session", json={}, headers={"X-Idempotency-Key": k}).json() for k in "aab"]
    assert ids[0] == ids[1] != ids[2]


def test_seqs_may_come_in_any_order_and_with_gaps(server, raw):
    server.service._queue._gap_seconds = 0.3
    for seq in (3, 2, 7):
        raw.result(raw.forward_backward(seq))
    assert server.engine.models[raw.model].gradient == 12


def test_samples_do_not_wait_for_training(server, raw):
    sampler = raw.base_sampler()
    server.engine.hold.add("forward_backward")
    held = raw.forward_backward(1)
    assert raw.binary(raw.sample(sampler)).sequences[0].tokens == [100]
    server.engine.hold.clear()
    assert raw.binary(held).metrics["loss:sum"] == pytest.approx(4.04)


def test_concurrent_samples_are_bounded(start_server):
    server = start_server(max_concurrent_samples=3)
    with server.http() as http:
        raw = Raw(http)
        sampler = raw.base_sampler()
        server.engine.hold.add("sample")
        requests = [raw.sample(sampler, seq=n) for n in range(10)]
        wait_until(lambda: server.engine.samples_at_once == 3)
        server.engine.hold.clear()
        for request in requests:
            raw.result(request)
    assert server.engine.most_samples_at_once == 3


def test_a_poll_that_is_too_early_says_try_again(start_server):
    server = start_server(poll_seconds=0.05)
    with server.http() as http:
        raw = Raw(http)
        server.engine.hold.add("sample")
        request = raw.sample(raw.base_sampler())
        answer = http.post("/retrieve_future", json={"request_id": request})
    assert answer.status_code == 408
    assert answer.json() == {"type": "try_again", "request_id": request, "queue_state": "active", "queue_state_reason": "sample is running"}


def test_a_long_poll_returns_when_the_result_is_there(server, raw):
    server.engine.hold.add("sample")
    request = raw.sample(raw.base_sampler())
    threading.Timer(0.3, server.engine.hold.clear).start()
    assert raw.binary(request).sequences[0].tokens == [100]


def test_an_unknown_sample_is_to_be_sent_again_and_an_unknown_command_is_not(raw):
    answer = raw.http.post("/retrieve_future", json={"request_id": "sample-0"})
    assert answer.status_code == 410 and "submit the sample again" in answer.json()["detail"]
    answer = raw.http.post("/retrieve_future", json={"request_id": "optim_step-0"})
    assert answer.status_code == 200 and answer.json()["category"] == "server"
    assert "create_training_client_from_state_with_optimizer" in answer.json()["error"]


def test_a_sample_whose_result_was_dropped_is_taken_anew(server, raw):
    sampler = raw.base_sampler()
    first = raw.sample(sampler, 0)
    raw.binary(first)
    server.service.futures.drop(first)
    assert raw.http.post("/retrieve_future", json={"request_id": first}).status_code == 410
    again = raw.sample(sampler, 0)
    assert again != first and raw.binary(again).sequences[0].tokens == [100]
