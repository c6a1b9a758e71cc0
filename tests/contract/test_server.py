"""Health from starting to failed, the gate before readiness, shutdown, flags."""

import asyncio
import threading

import pytest
import tinker
from fake_engine import BASE, START_PHASE
from raw import Raw
from server import wait_until

pytestmark = pytest.mark.timeout(180)


def test_starting_then_ready(start_server):
    server = start_server(ready=False)
    with server.http() as http:
        wait_until(lambda: http.get("/healthz").json().get("phase") == START_PHASE)
        health = http.get("/healthz")
        assert health.status_code == 503
        assert health.json() == {"status": "starting", "phase": START_PHASE}
        early = http.post("/create_session", json={})
        assert early.status_code == 503 and START_PHASE in early.json()["detail"]
        assert http.post("/retrieve_future", json={"request_id": "x"}).status_code == 429
        server.engine.hold.clear()
        wait_until(lambda: http.get("/healthz").status_code == 200)
        assert http.get("/healthz").json() == {"status": "ok", "phase": "ready"}


def test_a_client_waits_for_the_start(start_server, connect):
    server = start_server(ready=False)
    client = connect(server)
    threading.Timer(0.5, server.engine.hold.clear).start()
    sampler = client.create_sampling_client(base_model=BASE).result(30)
    assert sampler.get_base_model() == BASE


def test_a_failed_start_tells_the_reason(start_server):
    server = start_server(ready=False)
    server.engine.fail["start"] = ValueError("no weights there")
    server.engine.hold.clear()
    with server.http() as http:
        wait_until(lambda: http.get("/healthz").json()["status"] == "failed")
        health = http.get("/healthz")
        assert health.status_code == 503
        assert health.json() == {"status": "failed", "reason": "the engine did not start: no weights there"}
        assert http.post("/create_session", json={}).status_code == 503


def test_a_dead_engine_ends_every_pending_future(server, raw):
    server.engine.hold |= {"forward_backward", "sample"}
    pending = [raw.forward_backward(1), raw.optim_step(2), raw.sample(raw.base_sampler())]
    server.loop.call_soon_threadsafe(server.service.failed, "worker 0 died: signal 9")
    for request in pending:
        assert raw.result(request) == {"error": "worker 0 died: signal 9", "category": "server"}
    server.engine.hold.clear()
    assert "optim_step" not in server.engine.names()


def test_closing_ends_every_pending_future(server, raw):
    server.engine.hold.add("forward_backward")
    pending = [raw.forward_backward(1), raw.optim_step(2)]
    raw_results = []
    polls = [threading.Thread(target=lambda r=r: raw_results.append(Raw.result(raw, r))) for r in pending]
    for poll in polls:
        poll.start()
    asyncio.run_coroutine_threadsafe(server.service.close(), server.loop).result(5)
    for poll in polls:
        poll.join(10)
    assert [r["category"] for r in raw_results] == ["server", "server"]


def test_shutdown(start_server):
    server = start_server()
    with server.http() as http:
        assert http.post("/shutdown").status_code == 200
    wait_until(server.shutdown_asked.is_set)
    server.stop()
    closed = start_server(allow_shutdown=False)
    with closed.http() as http:
        answer = http.post("/shutdown")
    assert answer.status_code == 403 and answer.json()["detail"]
    assert not closed.shutdown_asked.is_set()


def test_the_sdk_knows_every_flag_it_is_sent(server):
    known = set(tinker.types.ClientConfigResponse.model_fields)
    older = {"proto_write_fwdbwd", "fwd_via_fwdbwd", "create_model_via_load_weights"}
    with server.http() as http:
        config = http.post("/client/config", json={"sdk_version": "0.38.0"}).json()
        dynamic = http.post("/client/dynamic_config", json={"sdk_version": "0.38.0"}).json()
        telemetry = http.post("/telemetry", json={"events": [], "platform": "x"}).json()
    assert set(config) - older <= known
    assert dynamic["refresh_interval_sec"] >= 10
    assert telemetry == {"status": "accepted"}
