"""Listings, deletion, time to live and capabilities through the SDK's RestClient."""

import time

import pytest
import tinker
from fake_engine import BASE, CONTEXT, UNTIED

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def rest(server):
    return tinker.RestClient(base_url=server.url)


def test_a_run_is_described_by_its_path(client, rest):
    metadata = {"renderer_name": "role_colon"}
    training = client.create_lora_training_client(base_model=BASE, rank=8, user_metadata=metadata).result(20)
    state = training.save_state("one", user_metadata={"step": "1"}).result(20).path
    sampler = training.save_weights_for_sampler("one").result(20).path
    run = rest.get_training_run_by_tinker_path(state).result(20)
    assert (run.training_run_id, run.base_model, run.lora_rank) == (training.model_id, BASE, 8)
    assert run.user_metadata == metadata
    assert run.last_checkpoint.tinker_path == state
    assert run.last_sampler_checkpoint.tinker_path == sampler
    assert run.last_checkpoint.user_metadata == {"step": "1"} and run.last_checkpoint.size_bytes > 0
    listed = rest.list_training_runs().result(20)
    assert [r.training_run_id for r in listed.training_runs] == [training.model_id]
    info = rest.get_weights_info_by_tinker_path(sampler).result(20)
    assert (info.base_model, info.is_lora, info.lora_rank) == (BASE, True, 8)


def test_checkpoints_are_listed_newest_first_and_deleted(rest, training):
    paths = [training.save_state(name).result(20).path for name in ("a", "b", "c")]
    page = rest.list_user_checkpoints(limit=2, offset=1).result(20)
    assert [c.tinker_path for c in page.checkpoints] == [paths[1], paths[0]]
    assert page.cursor.total_count == 3
    rest.delete_checkpoint_from_tinker_path(paths[1]).result(20)
    left = rest.list_checkpoints(training.model_id).result(20).checkpoints
    assert [c.checkpoint_id for c in left] == ["weights/c", "weights/a"]
    assert {c.checkpoint_type for c in left} == {"training"}
    with pytest.raises(tinker.NotFoundError):
        rest.delete_checkpoint_from_tinker_path(paths[1]).result(20)


def test_time_to_live(rest, training):
    path = training.save_state("short", ttl_seconds=1).result(20).path
    kept = training.save_state("kept", ttl_seconds=3600).result(20).path
    rest.set_checkpoint_ttl_from_tinker_path(kept, None).result(20)
    time.sleep(1.1)
    left = rest.list_checkpoints(training.model_id).result(20).checkpoints
    assert [(c.tinker_path, c.expires_at) for c in left] == [(kept, None)]
    with pytest.raises(tinker.RequestFailedError, match="expired"):
        training.load_state(path).result(20)


def test_capabilities(rest):
    models = rest.get_server_capabilities().result(20).supported_models
    assert {(m.model_name, m.max_context_length) for m in models} == {(BASE, CONTEXT), (UNTIED, CONTEXT)}


def test_unknown_runs_and_paths(server):
    with server.http() as http:
        for path in ("/training_runs/nobody:train:0", "/training_runs/x/checkpoints", "/nowhere", "/samplers/x"):
            answer = http.get(path)
            assert answer.status_code == 404 and answer.json()["detail"]
        assert http.get("/training_runs?limit=-1").status_code == 422
        outside = http.delete("/training_runs/a:train:0/checkpoints/weights/..%2f..%2fb")
        assert outside.status_code in (400, 404) and outside.json()["detail"]
