"""Samplers keep their weights; what cannot be served any more says so and is never replaced."""

from dataclasses import replace

import pytest
import tinker
from fake_engine import BASE, FakeEngine
from raw import Raw
from server import wait_until

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def server(start_server):
    return start_server(max_loaded_versions=2)


def train(raw, seq):
    raw.forward_backward(seq)
    raw.result(raw.optim_step(seq + 1))


def named(raw, seq, name):
    return raw.result(raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=seq, path=name)["request_id"])


def sampler_of(raw, path, number):
    body = {"session_id": raw.session, "sampling_session_seq_id": number, "model_path": path}
    return raw.post("create_sampling_session", **body)["sampling_session_id"]


def token(raw, sampler, seq=0):
    return raw.binary(raw.sample(sampler, seq=seq)).sequences[0].tokens[0]


def test_an_evicted_snapshot_is_refused_by_name(server, raw):
    samplers = []
    for n in range(3):
        train(raw, 10 * n + 1)
        samplers.append(raw.result(raw.snapshot(10 * n + 3, n))["sampling_session_id"])
    error = raw.result(raw.sample(samplers[0]))
    assert error["category"] == "user"
    for word in (samplers[0], f"{raw.model}, its version 2", "newest 2 versions", "save_weights_for_sampler"):
        assert word in error["error"]
    assert [token(raw, s) for s in samplers[1:]] == [220, 300]
    assert ("retire_version", 1) in server.engine.calls


def test_an_evicted_name_is_loaded_again_as_a_new_version(server, raw):
    paths = []
    for n in range(3):
        train(raw, 10 * n + 1)
        paths.append(named(raw, 10 * n + 3, f"v{n}")["path"])
    first = sampler_of(raw, paths[0], 0)
    assert token(raw, first) == 140
    assert [call[1] for call in server.engine.calls if call[0] == "load_version"] == [1, 2, 3, 4]
    assert [token(raw, sampler_of(raw, path, n + 1)) for n, path in enumerate(paths)] == [140, 220, 300]


def test_a_version_in_use_outlives_its_eviction(server, raw):
    raw.forward_backward(1)
    sampler = raw.result(raw.snapshot(2, 0))["sampling_session_id"]
    server.engine.hold.add("sample")
    request = raw.sample(sampler)
    wait_until(lambda: server.engine.samples_at_once == 1)
    for n in (1, 2):
        raw.result(raw.snapshot(n + 2, n))
    assert 1 in server.engine.versions
    server.engine.hold.clear()
    assert raw.binary(request).sequences[0].tokens == [100]
    wait_until(lambda: 1 not in server.engine.versions)


def test_a_deleted_name_saved_anew_does_not_answer_for_the_old(server, raw):
    path = named(raw, 1, "a")["path"]
    old = sampler_of(raw, path, 0)
    assert token(raw, old) == 100
    run, kind, name = path.removeprefix("tinker://").split("/")
    assert raw.http.delete(f"/training_runs/{run}/checkpoints/{kind}/{name}").status_code == 200
    assert "no checkpoint" in raw.result(raw.sample(old, seq=1))["error"]
    train(raw, 2)
    named(raw, 4, "a")
    error = raw.result(raw.sample(old, seq=2))["error"]
    assert "other weights were saved under that name" in error
    assert token(raw, sampler_of(raw, path, 1)) == 140


def test_an_answer_from_other_weights_is_not_returned(server, raw):
    right = server.engine._sampled
    server.engine._sampled = lambda version, request: right(0, request)
    sampler = raw.result(raw.snapshot(1, 0))["sampling_session_id"]
    error = raw.result(raw.sample(sampler))
    assert error["category"] == "server" and "version 1 was asked for and version 0 answered" in error["error"]
    assert raw.http.get("/healthz").json() == {"status": "ok", "phase": "ready", "weight_mismatches": 1}


def test_names_survive_a_restart(start_server, server, raw):
    train(raw, 1)
    sampler_path = named(raw, 3, "a")["path"]
    saved = raw.post("save_weights", model_id=raw.model, seq_id=4, path="b", user_metadata={"k": 1})
    state_path = raw.result(saved["request_id"])["path"]
    server.stop()
    with start_server().http() as http:
        again = Raw(http)
        assert token(again, sampler_of(again, sampler_path, 0)) == 140
        load = {"session_id": again.session, "model_seq_id": 0, "path": state_path, "optimizer": True}
        loaded = again.result(again.post("load_weights", **load)["request_id"])
        assert loaded["model_id"] == again.model
        listed = http.get("/checkpoints").json()["checkpoints"]
        assert [c["tinker_path"] for c in listed] == [state_path, sampler_path]
        assert listed[0]["user_metadata"] == {"k": "1"}
        assert again.result(saved["request_id"]) == {"path": state_path, "type": "save_weights"}


def inflight(raw, seq, number):
    accepted = raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=seq, sampling_session_seq_id=number, kind="inflight")
    return raw.result(accepted["request_id"])["sampling_session_id"]


def test_inflight_samplers_follow_the_newest_published_weights(server, raw):
    train(raw, 1)
    first = inflight(raw, 3, 0)
    snapshot = raw.result(raw.snapshot(4, 1))["sampling_session_id"]
    assert token(raw, first) == token(raw, snapshot) == 140
    train(raw, 5)
    # A step alone publishes nothing.
    assert token(raw, first, 1) == 140
    second = inflight(raw, 7, 2)
    assert [token(raw, first, 2), token(raw, second), token(raw, snapshot, 1)] == [220, 220, 140]
    assert raw.http.get(f"/samplers/{second}").json() == {"sampler_id": second, "base_model": raw.base_model}


def test_inflight_weights_are_not_pushed_out_by_snapshots_and_end_with_their_run(server, raw):
    train(raw, 1)
    live = inflight(raw, 3, 0)
    for n in (1, 2, 3):
        raw.result(raw.snapshot(3 + n, n))
    assert token(raw, live) == 140
    assert sorted(server.engine.versions) == [0, 1, 3, 4]
    inflight(raw, 7, 4)
    assert sorted(server.engine.versions) == [0, 3, 4, 5]
    raw.http.post(f"/sessions/{raw.session}/finish", json={"reason": {"type": "success"}})
    other = Raw(raw.http)
    other.create()
    other.result(other.post("create_model", session_id=other.session, model_seq_id=1, base_model=other.base_model,
                            lora_config={"rank": 4})["request_id"])
    wait_until(lambda: sorted(server.engine.versions) == [0])


def test_a_published_version_in_use_ends_its_answers(server, raw):
    train(raw, 1)
    live = inflight(raw, 3, 0)
    server.engine.hold.add("sample")
    begun = raw.sample(live)
    wait_until(lambda: server.engine.samples_at_once == 1)
    train(raw, 4)
    inflight(raw, 6, 1)
    late = raw.sample(live, 1)
    server.engine.hold.clear()
    assert [raw.binary(request).sequences[0].tokens[0] for request in (begun, late)] == [140, 220]
    wait_until(lambda: sorted(server.engine.versions) == [0, 2])


class TrainingOnly(FakeEngine):
    """An engine without a sampler."""

    def base_models(self):
        return [replace(model, sampleable=False) for model in super().base_models()]

    async def load_version(self, version, base_model, folder):
        raise AssertionError("there is no sampler that could load a version")


def test_a_server_without_a_sampler_writes_named_sampler_weights_and_samples_none(start_server, connect):
    """The cookbook's recipes for supervised training end with such a save."""
    client = connect(start_server(engine=TrainingOnly()))
    training = client.create_lora_training_client(base_model=BASE, rank=8).result(20)
    path = training.save_weights_for_sampler("final").result(20).path
    listed = client.create_rest_client().list_checkpoints(training.model_id).result(20).checkpoints
    assert [checkpoint.tinker_path for checkpoint in listed] == [path]
    with pytest.raises(tinker.BadRequestError, match="served for training only"):
        client.create_sampling_client(model_path=path).result(20)
