"""API keys through HTTP: who gets in, and what they see of each other."""

from __future__ import annotations

import pytest
import tinker
from data import sft
from fake_engine import BASE
from raw import Raw
from server import TestServer

from verl_tinker.core.access import Keys

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def keyed(tmp_path):
    """A server with two keys: `server`, and a raw client of each with a live model and saved weights."""
    keys = Keys(tmp_path / "keys.json")
    secrets = {name: keys.add(name) for name in ("alice", "bob")}
    server = TestServer(tmp_path / "checkpoints", keys=keys, max_runs=10)
    clients = {}
    for name, secret in secrets.items():
        http = server.http()
        http.headers["X-API-Key"] = secret
        clients[name] = raw = Raw(http)
        raw.create()
        raw.result(raw.forward_backward(1))
        raw.result(raw.optim_step(2))
        raw.state = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=3, path="a")["request_id"])["path"]
        named = raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=4, path="b")
        raw.weights = raw.result(named["request_id"])["path"]
    yield server, clients["alice"], clients["bob"], secrets
    server.stop()


def test_nobody_gets_in_without_a_key(keyed):
    server, *_ = keyed
    with server.http() as http:
        for method, path in (("POST", "client/config"), ("POST", "create_session"), ("GET", "training_runs"),
                             ("POST", "retrieve_future"), ("POST", "asample"), ("GET", "get_server_capabilities")):
            answer = http.request(method, f"/{path}", json={})
            assert answer.status_code == 401 and "verl_tinker.keys" in answer.json()["detail"], path
        assert http.get("/healthz").status_code == 200


def test_the_sdk_trains_with_its_key_and_is_refused_with_another(keyed):
    server, _, _, secrets = keyed
    client = tinker.ServiceClient(base_url=server.url, api_key=secrets["alice"])
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(20)
    assert training.forward_backward([sft()], "cross_entropy").result(20).metrics["loss:sum"] > 0
    client.close("success").result(20)
    with pytest.raises(tinker.AuthenticationError, match="API key is missing or not known"):
        tinker.ServiceClient(base_url=server.url, api_key="tml-wrong").get_server_capabilities()


def test_single_calls_on_what_is_not_yours_are_404(keyed):
    _, alice, bob, _ = keyed
    sampler = alice.base_sampler()
    name = alice.weights.removeprefix("tinker://")
    run, kind, label = name.split("/")
    calls = [
        ("POST", "get_info", {"model_id": alice.model}),
        ("POST", "asample", {"sampling_session_id": sampler, "seq_id": 0, "prompt": {"chunks": []}, "sampling_params": {}}),
        ("POST", "join_sampling_session", {"sampling_session_id": sampler}),
        ("POST", "weights_info", {"tinker_path": alice.weights}),
        ("POST", "create_sampling_session",
         {"session_id": bob.session, "sampling_session_seq_id": 0, "model_path": alice.weights}),
        ("POST", "create_sampling_session",
         {"session_id": alice.session, "sampling_session_seq_id": 0, "base_model": BASE}),
        ("POST", f"sessions/{alice.session}/finish", {"reason": {"type": "success"}}),
        ("GET", f"samplers/{sampler}", None),
        ("GET", f"training_runs/{run}", None),
        ("GET", f"training_runs/{run}/checkpoints", None),
        ("GET", f"sessions/{alice.session}", None),
        ("DELETE", f"training_runs/{run}/checkpoints/{kind}/{label}", None),
        ("PUT", f"training_runs/{run}/checkpoints/{kind}/{label}/ttl", {"ttl_seconds": 3600}),
        ("POST", f"training_runs/{run}/checkpoints/{kind}/{label}/publish", {}),
    ]
    for method, path, body in calls:
        answer = bob.http.request(method, f"/{path}", json=body)
        assert answer.status_code == 404 and answer.json()["detail"], (path, answer.status_code, answer.text)
        assert answer.json()["detail"].count("alice") == 0
    assert bob.http.post("/session_heartbeat", json={"session_id": alice.session}).status_code == 410
    # Nothing of it happened.
    assert alice.http.get(f"/training_runs/{run}/checkpoints").json()["checkpoints"]
    assert alice.http.post("/session_heartbeat", json={"session_id": alice.session}).status_code == 200


def test_commands_on_what_is_not_yours_are_refused_by_their_future(keyed):
    server, alice, bob, _ = keyed
    before = list(server.engine.calls)
    mine, bob.model = bob.model, alice.model
    for request in (bob.forward_backward(7), bob.optim_step(8), bob.snapshot(9, 0)):
        error = bob.result(request)
        assert error["category"] == "user" and "not a training run of this server" in error["error"]
    bob.model = mine
    request = bob.post("load_weights", model_id=bob.model, seq_id=5, path=alice.state, optimizer=True)["request_id"]
    error = bob.result(request)
    assert error["category"] == "user" and "there is no checkpoint" in error["error"]
    body = {"session_id": bob.session, "model_seq_id": 1, "path": alice.state, "optimizer": True}
    assert "there is no checkpoint" in bob.result(bob.post("load_weights", **body)["request_id"])["error"]
    trained = [call for call in server.engine.calls[len(before):] if call[0] in ("forward_backward", "optim_step", "load_state")]
    assert trained == []


def test_results_are_their_owners(keyed):
    _, alice, bob, _ = keyed
    request = alice.optim_step(5)
    assert "metrics" not in bob.result(request)
    alice.result(request)


def test_listings_show_only_what_is_yours(keyed):
    _, alice, bob, _ = keyed
    for raw in (alice, bob):
        assert [r["training_run_id"] for r in raw.http.get("/training_runs").json()["training_runs"]] == [raw.model]
        assert {c["tinker_path"] for c in raw.http.get("/checkpoints").json()["checkpoints"]} == {raw.state, raw.weights}
        assert raw.http.get("/sessions").json()["sessions"] == [raw.session]


def test_what_is_published_is_read_by_all_and_still_changed_by_its_owner_alone(keyed):
    _, alice, bob, _ = keyed
    run, kind, label = alice.state.removeprefix("tinker://").split("/")
    place = f"/training_runs/{run}/checkpoints/{kind}/{label}"
    assert alice.http.post(f"{place}/publish").is_success
    assert bob.http.post("/weights_info", json={"tinker_path": alice.state}).json()["base_model"] == BASE
    body = {"session_id": bob.session, "model_seq_id": 1, "path": alice.state, "optimizer": True}
    assert bob.result(bob.post("load_weights", **body)["request_id"])["model_id"] == f"{bob.session}:train:1"
    assert bob.http.delete(place).status_code == 404
    assert alice.http.delete(f"{place}/publish").is_success
    assert bob.http.post("/weights_info", json={"tinker_path": alice.state}).status_code == 404


def test_keys_are_in_no_log(keyed, caplog, capfd):
    _, alice, _, secrets = keyed
    alice.http.post("/telemetry", json={"events": [{"headers": {"x-api-key": secrets["alice"]}}]})
    alice.http.post("/retrieve_future", content=b"{")
    seen = caplog.text + "".join(capfd.readouterr())
    assert not [secret for secret in secrets.values() if secret in seen]
