"""One training run at a time: who holds the place, who is refused, who makes room."""

import time

import pytest
import tinker
from data import sft
from fake_engine import BASE
from raw import Raw

pytestmark = pytest.mark.timeout(180)


def test_a_second_run_beside_full_fine_tuning_is_refused_by_the_name_of_the_first(server, client, connect):
    training = client.create_lora_training_client(base_model=BASE, rank=0).result(20)
    other = connect(server)
    for second in (client, other):
        with pytest.raises(tinker.RequestFailedError, match=training.model_id) as failure:
            second.create_lora_training_client(base_model=BASE).result(20)
        assert failure.value.category == "user"
    training.forward_backward([sft()], "cross_entropy").result(20)


def test_a_finished_session_makes_room_and_its_checkpoints_stay(server, connect):
    first = connect(server)
    training = first.create_lora_training_client(base_model=BASE).result(20)
    path = training.save_state("a").result(20).path
    snapshot = training.save_weights_and_get_sampling_client().result(20)
    first.close("success").result(10)
    resumed = connect(server).create_training_client_from_state_with_optimizer(path).result(20)
    assert server.engine.names()[-3:] == ["drop_model", "create_model", "load_state"]
    assert list(server.engine.models) == [resumed.model_id]
    assert list(server.engine.versions) == [0]
    del snapshot


def test_a_silent_session_makes_room(start_server):
    server = start_server(session_timeout_s=0.3)
    with server.http() as http:
        first, second = Raw(http), Raw(http)
        first.create(rank=0)
        assert "makes room" in second.create(0)["error"]
        time.sleep(0.4)
        assert second.create(1) == {"model_id": f"{second.session}:train:1", "type": "create_model"}
        error = first.result(first.forward_backward(1))
    assert error["category"] == "user" and "no heartbeat for 0 s" in error["error"]


def test_heartbeats_hold_the_place(start_server):
    server = start_server(session_timeout_s=0.5)
    with server.http() as http:
        first, second = Raw(http), Raw(http)
        first.create(rank=0)
        for n in range(4):
            time.sleep(0.2)
            assert http.post("/session_heartbeat", json={"session_id": first.session}).status_code == 200
            assert "error" in second.create(n)


def test_what_a_leaving_run_was_promised_is_kept(server, raw):
    server.engine.hold.add("forward_backward")
    promised = [raw.forward_backward(1), raw.optim_step(2)]
    raw.http.post(f"/sessions/{raw.session}/finish", json={"reason": {"type": "success"}, "detail": None})
    late = raw.forward_backward(3)
    second = Raw(raw.http)
    accepted = second.post("create_model", session_id=second.session, model_seq_id=0, base_model=BASE)
    server.engine.hold.clear()
    assert raw.binary(promised[0]).metrics["loss:sum"] == pytest.approx(4.04)
    assert raw.result(promised[1])["metrics"] == {"grad_norm": 4.0, "weights_version": 2.0}
    assert "is finished (success)" in raw.result(late)["error"]
    assert second.result(accepted["request_id"])["model_id"] == second.model
    names = server.engine.names()
    assert names == ["create_model", "forward_backward", "optim_step", "drop_model", "create_model"]


def test_a_finished_or_unknown_session_has_no_heartbeat(raw):
    raw.http.post(f"/sessions/{raw.session}/finish", json={"reason": {"type": "errored"}})
    for session in (raw.session, "unknown"):
        assert raw.http.post("/session_heartbeat", json={"session_id": session}).status_code == 410
    again = raw.post("create_model", session_id=raw.session, model_seq_id=5, base_model=BASE)
    assert "is finished (errored)" in raw.result(again["request_id"])["error"]


def test_a_failed_resume_leaves_the_place_free(server, raw):
    saved = raw.post("save_weights", model_id=raw.model, seq_id=1, path="a")
    path = raw.result(saved["request_id"])["path"]
    raw.http.post(f"/sessions/{raw.session}/finish", json={"reason": {"type": "success"}})
    second = Raw(raw.http)
    server.engine.fail["load_state"] = ValueError("short file")
    body = {"session_id": second.session, "path": path, "optimizer": True}
    assert "short file" in second.result(second.post("load_weights", model_seq_id=0, **body)["request_id"])["error"]
    assert second.result(second.post("load_weights", model_seq_id=1, **body)["request_id"])["path"] == path
    assert list(server.engine.models) == [f"{second.session}:train:1"]


def test_clones_of_a_sampler_count_from_one(raw):
    sampler = raw.base_sampler()
    joined = [raw.post("join_sampling_session", sampling_session_id=sampler)["client_counter"] for _ in range(2)]
    assert joined == [1, 2]


def test_full_fine_tuning_takes_the_place_of_finished_adapters_and_of_no_other(start_server):
    server = start_server(max_runs=4)
    with server.http() as http:
        adapters, full = [Raw(http), Raw(http)], Raw(http)
        body = {"session_id": full.session, "base_model": BASE, "lora_config": {"rank": 0}}
        for adapter in adapters:
            adapter.create()
        for number, adapter in enumerate(adapters):
            error = full.result(full.post("create_model", model_seq_id=number, **body)["request_id"])["error"]
            assert "needs all training runs of others to end" in error and adapter.model in error
            http.post(f"/sessions/{adapter.session}/finish", json={"reason": {"type": "success"}})
        full.result(full.post("create_model", model_seq_id=2, **body)["request_id"])
        assert list(server.engine.models) == [f"{full.session}:train:2"]
        late = Raw(http)
        assert "an adapter beside full fine-tuning" in late.create()["error"]
