"""A worker that dies while the server lives, and sessions that end: what is told, what is freed, what goes on."""

from __future__ import annotations

import asyncio

import pytest
from raw import Raw
from server import TestServer, wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server(tmp_path):
    server = TestServer(tmp_path / "checkpoints", max_runs=4)
    yield server
    server.stop()


def on_loop(server, coroutine):
    return asyncio.run_coroutine_threadsafe(coroutine, server.loop).result(20)


def trained(http) -> Raw:
    raw = Raw(http)
    raw.create()
    raw.result(raw.forward_backward(1))
    raw.result(raw.optim_step(2))
    return raw


def token(raw: Raw, sampler: str, seq: int) -> list[int]:
    return list(raw.binary(raw.sample(sampler, seq)).sequences[0].tokens)


def test_after_the_death_of_a_worker_the_engine_runs_again_and_runs_say_why_they_ended(server):
    with server.http() as http:
        raw = trained(http)
        path = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=3, path="state")["request_id"])["path"]
        snapshot = raw.result(raw.snapshot(4, 0))["sampling_session_id"]
        before = token(raw, snapshot, 0)
        server.engine.hold.update({"forward_backward", "sample"})
        running, waiting, sampling = raw.forward_backward(5), raw.optim_step(6), raw.sample(snapshot, 1)
        wait_until(lambda: "forward_backward" in server.engine.running)
        on_loop(server, server.service.recover("the trainer's process died (killed)"))
        server.engine.hold.clear()

        for request in (running, waiting, sampling):
            error = raw.result(request)
            assert error["category"] == "server" and "the trainer's process died (killed)" in error["error"], request
        assert server.engine.names().count("close") == 1 and server.service.health.status == "ok"
        later = raw.result(raw.optim_step(7))
        assert later["category"] == "server" and "the trainer's process died (killed)" in later["error"]
        assert f"create_training_client_from_state_with_optimizer('{path}')" in later["error"]
        # A repeat of what was accepted before is still the same command.
        assert raw.optim_step(6) == waiting
        # Samplers keep their weights: they are loaded into the new engine when they are asked for.
        assert token(raw, snapshot, 2) == before
        body = {"session_id": raw.session, "model_seq_id": 1, "path": path, "optimizer": True}
        assert raw.result(raw.post("load_weights", **body)["request_id"])["model_id"] == f"{raw.session}:train:1"
        raw.model = f"{raw.session}:train:1"
        assert "metrics" in raw.result(raw.forward_backward(1)) and "metrics" in raw.result(raw.optim_step(2))


def test_an_engine_that_does_not_start_again_fails_the_server_with_the_reason(server):
    with server.http() as http:
        raw = trained(http)
        server.engine.fail["start"] = RuntimeError("no memory")
        with pytest.raises(RuntimeError, match="no memory"):
            on_loop(server, server.service.recover("the sampler died"))
        assert http.get("/healthz").json() == {"status": "failed", "reason": "the engine did not start: no memory"}
        answer = http.post("/optim_step", json={"model_id": raw.model, "seq_id": 3, "adam_params": {}})
        assert answer.status_code == 503 and "no memory" in answer.json()["detail"]


def test_a_session_that_is_over_frees_its_run_and_its_snapshots_and_keeps_its_checkpoints(server):
    with server.http() as http:
        raw, other = trained(http), trained(http)
        raw.result(raw.post("save_weights", model_id=raw.model, seq_id=3, path="state")["request_id"])
        snapshot = raw.result(raw.snapshot(4, 0))["sampling_session_id"]
        kept = other.result(other.snapshot(3, 0))["sampling_session_id"]
        http.post(f"/sessions/{raw.session}/finish", json={"reason": {"type": "success"}})
        on_loop(server, server.service.housekeep())
        wait_until(lambda: list(server.engine.models) == [other.model])
        wait_until(lambda: len(server.engine.versions) == 2)
        assert "is finished" in raw.result(raw.sample(snapshot, 9))["error"]
        assert token(other, kept, 0)
        assert [c["checkpoint_id"] for c in http.get("/checkpoints").json()["checkpoints"]] == ["weights/state"]


def test_a_session_without_heartbeat_ends_by_itself(tmp_path):
    server = TestServer(tmp_path / "checkpoints", max_runs=4, session_timeout_s=0.2)
    try:
        with server.http() as http:
            raw = trained(http)
            wait_until(lambda: server.service.sessions.over(server.service.sessions.get(raw.session, None)))
            on_loop(server, server.service.housekeep())
            wait_until(lambda: not server.engine.models)
            assert http.post("/session_heartbeat", json={"session_id": raw.session}).status_code == 410
            error = raw.result(raw.optim_step(3))
            assert error["category"] == "user" and "no heartbeat for 0 s" in error["error"]
    finally:
        server.stop()


def test_large_results_lie_on_disk_until_they_are_acknowledged_or_old(server, tmp_path):
    from data import sft

    results = tmp_path / "checkpoints" / ".state" / "results"
    with server.http() as http:
        raw = trained(http)
        data = [sft(length=64, target=10) for _ in range(5000)]
        request = raw.forward_backward(3, data)
        for _ in range(2):
            output = raw.binary(request)
            assert len(output.loss_fn_outputs) == 5000 and len(output.loss_fn_outputs[4999]["logprobs"].data) == 64
        files = list(results.iterdir())
        assert len(files) == 1 and files[0].stat().st_size > 5000 * 64 * 4
        as_json = raw.result(request)
        assert len(as_json["loss_fn_outputs"]) == 5000
        server.service.futures.drop(request)
        assert not list(results.iterdir())


def test_completions_of_one_client_are_told_once_and_in_the_order_of_their_end(server):
    with server.http() as http:
        raw = Raw(http)
        sampler = raw.base_sampler()
        first = [raw.sample(sampler, n) for n in range(3)]
        clone = raw.sample(sampler, 7_000_000_001)
        target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
        wait_until(lambda: server.service.futures.pending == 0)
        answer = raw.post("retrieve_futures", target=target, prev_cursor=0)
        assert {c["request_id"] for c in answer["completions"]} == set(first) and answer["cursor"] == 3
        assert all(c["state"] == "finished" and c["response_payload_uncompressed_size"] > 0 for c in answer["completions"])
        acknowledged = {"prev_cursor": 3, "timeout": 0, "retrieved_request_ids": first}
        assert raw.post("retrieve_futures", target=target, **acknowledged) == {"completions": [], "cursor": 3}
        assert http.post("/retrieve_future", json={"request_id": first[0]}).status_code == 410
        other = raw.post("retrieve_futures", target={**target, "cloned_sampler_id": 7}, prev_cursor=0)
        assert [c["request_id"] for c in other["completions"]] == [clone]
        bad = raw.sample(sampler, 4, params={"max_tokens": -1})
        raw.result(bad)
        answer = raw.post("retrieve_futures", target=target, prev_cursor=3)
        assert answer == {"completions": [{"state": "failed", "request_id": bad}], "cursor": 4}


def test_a_cancelled_sample_ends_and_gives_its_place_to_the_next(tmp_path):
    server = TestServer(tmp_path / "checkpoints", max_concurrent_samples=1)
    try:
        with server.http() as http:
            raw = Raw(http)
            sampler = raw.base_sampler()
            server.engine.hold.add("sample")
            running, waiting, last = (raw.sample(sampler, n) for n in range(3))
            for request in (running, waiting):
                raw.post("cancel_future", request_id=request)
            assert "cancelled by its client" in raw.result(running)["error"]
            assert "cancelled by its client" in raw.result(waiting)["error"]
            server.engine.hold.clear()
            assert list(raw.binary(last).sequences[0].tokens) == [100]
            for request in (last, running, "sample-unknown"):
                raw.post("cancel_future", request_id=request)
            assert list(raw.binary(last).sequences[0].tokens) == [100]
    finally:
        server.stop()


def test_housekeeping_that_fails_once_goes_on(server, monkeypatch):
    rounds = []

    async def housekeep():
        rounds.append(len(rounds))
        if rounds == [0]:
            raise OSError("the disk was away")

    async def three_rounds():
        keeping = asyncio.create_task(server.service.keep_house(0.01))
        while len(rounds) < 3:
            await asyncio.sleep(0.01)
        assert not keeping.done()
        keeping.cancel()

    monkeypatch.setattr(server.service, "housekeep", housekeep)
    on_loop(server, three_rounds())
    assert rounds[:3] == [0, 1, 2]
