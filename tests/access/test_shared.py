"""Exports, archives, copies and sessions through two keys: what is shared, and what is not."""

from __future__ import annotations

import httpx
import pytest
from fake_engine import BASE
from raw import Raw
from server import TestServer

from verl_tinker.core.access import Keys

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def two(tmp_path):
    """A raw client of each of two keys, Alice's with an export and a state, and the keys themselves."""
    keys = Keys(tmp_path / "keys.json")
    secrets = {name: keys.add(name) for name in ("alice", "bob")}
    server = TestServer(tmp_path / "checkpoints", keys=keys, max_runs=10)
    clients = []
    for secret in secrets.values():
        http = server.http()
        http.headers["X-API-Key"] = secret
        clients.append(Raw(http, BASE))
    alice, bob = clients
    alice.create()
    for seq, command in ((1, "save_weights"), (2, "save_weights_external")):
        alice.result(alice.post(command, model_id=alice.model, seq_id=seq, path="a")["request_id"])
    yield alice, bob, secrets
    server.stop()


def where(raw: Raw, kind: str) -> str:
    return f"/training_runs/{raw.model}/checkpoints/{kind}/a"


def test_a_link_is_made_for_those_who_may_read_and_opens_for_all(two):
    alice, bob, _ = two
    for rest in ("external_weights/a/external_weights_urls", "weights/a/archive"):
        address = f"/training_runs/{alice.model}/checkpoints/{rest}"
        assert bob.http.get(address).status_code == 404
    assert bob.http.get(f"{where(alice, 'weights')}/archive").status_code == 404
    url = alice.http.get(f"{where(alice, 'external_weights')}/external_weights_urls").json()["urls"]["weights.json"]
    assert httpx.get(url).content == b"0.0"


def test_a_published_export_is_read_by_all_and_changed_by_its_owner(two):
    alice, bob, _ = two
    address = where(alice, "external_weights")
    assert alice.http.post(f"{address}/publish").status_code == 200
    urls = bob.http.get(f"{address}/external_weights_urls").json()["urls"]
    assert httpx.get(urls["weights.json"]).status_code == 200
    for refused in (
        bob.http.delete(address),
        bob.http.delete(f"{address}/publish"),
        bob.http.put(f"{address}/ttl", json={"ttl_seconds": 1}),
    ):
        assert refused.status_code == 404 and "belongs to another API key" in refused.json()["detail"]
    run = f"/training_runs/{alice.model}"
    assert bob.http.get(run).status_code == 404
    shown = bob.http.get(f"{run}?access_scope=accessible").json()
    assert (shown["model_owner"], shown["last_checkpoint"]) == ("alice", None)


def test_a_copy_is_read_with_the_token_of_its_owner_and_belongs_to_the_copier(two):
    alice, bob, secrets = two
    body = {"source_path": f"tinker://{alice.model}/weights/a", "destination_project_id": "p"}

    def copy(**headers):
        return bob.http.post("/copy_weights", json=body, headers=headers)

    token = "X-Tinker-Weights-Access-Token"
    assert copy().status_code == 404
    assert copy(**{token: "tml-nobody"}).status_code == 400
    first, again = (copy(**{token: secrets["alice"], "X-Idempotency-Key": "k"}).json()["tinker_path"] for _ in range(2))
    assert first == again
    mine = [[c["tinker_path"] for c in raw.http.get("/checkpoints").json()["checkpoints"]] for raw in (alice, bob)]
    assert mine[1] == [first] and first not in mine[0]
    same_key = alice.http.post("/copy_weights", json=body, headers={"X-Idempotency-Key": "k"}).json()["tinker_path"]
    assert same_key != first
    loaded = bob.post("load_weights", session_id=bob.session, model_seq_id=0, path=first)
    assert bob.result(loaded["request_id"])["path"] == first


def test_a_run_is_created_from_the_state_of_another_key_with_its_token(two):
    alice, bob, secrets = two
    body = {"session_id": bob.session, "path": f"tinker://{alice.model}/weights/a"}

    def load(number, **more):
        return bob.result(bob.post("load_weights", **body, model_seq_id=number, **more)["request_id"])

    assert "there is no checkpoint" in load(0)["error"]
    refused = load(1, weights_access_token="tml-nobody")
    assert refused["category"] == "user" and "weights_access_token is not a key of this server" in refused["error"]
    assert load(2, weights_access_token=secrets["alice"])["model_id"] == f"{bob.session}:train:2"


def test_sessions_are_listed_searched_and_moved_by_their_key_alone(two):
    alice, bob, _ = two
    assert bob.http.get("/sessions").json() == {"sessions": [bob.session]}
    found = bob.http.post("/sessions/search", json={"owner": {"type": "accessible"}}).json()["sessions"]
    assert [(s["session_id"], s["owner"]) for s in found] == [(bob.session, "bob")]
    assert bob.http.get(f"/sessions/{alice.session}").status_code == 404
    assert bob.http.put(f"/sessions/{alice.session}/project", json={"project_id": "p"}).status_code == 404
