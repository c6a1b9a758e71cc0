"""Checkpoints: listed, described, given an end, deleted, and resumed from."""

import pytest
import tinker
from programs import batch, datum, greedy, now, prompt, train, weights_of


def paths(rest, run, kind=None):
    listed = now(rest.list_checkpoints(run.model_id)).checkpoints
    return [c.tinker_path for c in listed if kind in (None, c.checkpoint_type)]


def resumed(create, path):
    run = now(create(path))
    return run, weights_of(run)


def test_resume_goes_on_as_if_nothing_had_been(target, service, new_run):
    run = new_run()
    train(run, batch(1, 3))
    train(run, [datum(7, weight=3.0)])
    path = now(run.save_state("here")).path
    saved = weights_of(run)
    train(run, batch(4, 2))
    went_on = weights_of(run)
    with_moments, begun = resumed(service.create_training_client_from_state_with_optimizer, path)
    assert target.same(begun, saved) and target.differ(saved, went_on)
    train(with_moments, batch(4, 2))
    assert target.same(weights_of(with_moments), went_on)
    without, begun = resumed(service.create_training_client_from_state, path)
    assert target.same(begun, saved)
    train(without, batch(4, 2))
    assert target.differ(weights_of(without), went_on)


def test_a_live_run_goes_back_to_a_state(target, new_run):
    run = new_run()
    train(run, batch(1, 3))
    path = now(run.save_state("back")).path
    saved = weights_of(run)
    train(run, batch(4, 2))
    went_on = weights_of(run)
    now(run.load_state_with_optimizer(path))
    assert target.same(weights_of(run), saved)
    train(run, batch(4, 2))
    assert target.same(weights_of(run), went_on)
    now(run.load_state(path))
    assert target.same(weights_of(run), saved)


def test_paths_and_listings(service, rest, target):
    metadata = {"renderer_name": "plain", "made_by": "conformance"}
    run = now(service.create_lora_training_client(target.model, rank=8, user_metadata=metadata))
    state = now(run.save_state("one", user_metadata={"step": "1"})).path
    sampler = now(run.save_weights_for_sampler("one")).path
    assert state == f"tinker://{run.model_id}/weights/one" and sampler == f"tinker://{run.model_id}/sampler_weights/one"
    listed = {c.tinker_path: c for c in now(rest.list_checkpoints(run.model_id)).checkpoints}
    assert {path: (c.checkpoint_id, c.checkpoint_type) for path, c in listed.items()} == {
        state: ("weights/one", "training"), sampler: ("sampler_weights/one", "sampler")}
    assert listed[state].user_metadata == {"step": "1"} and listed[state].size_bytes > 0
    found = now(rest.get_training_run_by_tinker_path(sampler))
    assert (found.training_run_id, found.base_model, found.lora_rank) == (run.model_id, target.model, 8)
    assert found.user_metadata == metadata and found.last_checkpoint.tinker_path == state
    assert now(rest.get_training_run(run.model_id)).last_sampler_checkpoint.tinker_path == sampler
    info = now(rest.get_weights_info_by_tinker_path(state))
    assert (info.base_model, info.is_lora, info.lora_rank) == (target.model, True, 8)
    assert run.model_id in [r.training_run_id for r in now(rest.list_training_runs(limit=1000)).training_runs]


def test_the_newest_is_listed_first(rest, new_run):
    run = new_run()
    saved = [now(run.save_state(name)).path for name in ("a", "b", "c")]
    mine = [c.tinker_path for c in now(rest.list_user_checkpoints(limit=1000)).checkpoints if c.tinker_path in saved]
    assert mine == saved[::-1]


def test_a_deleted_checkpoint_is_gone(rest, service, new_run):
    run = new_run()
    state, weights = now(run.save_state("gone")).path, now(run.save_weights_for_sampler("gone")).path
    kept = now(run.save_state("kept")).path
    for path in (state, weights):
        now(rest.delete_checkpoint_from_tinker_path(path))
    assert paths(rest, run) == [kept]
    with pytest.raises(tinker.NotFoundError):
        now(rest.delete_checkpoint_from_tinker_path(state))
    with pytest.raises(tinker.RequestFailedError):
        now(run.load_state(state))
    with pytest.raises(tinker.TinkerError):
        now(now(service.create_sampling_client(model_path=weights)).compute_logprobs(prompt(1)))
    # The name is free again.
    assert now(run.save_state("gone")).path == state
    now(run.load_state(kept))


def test_time_to_live_is_set_and_taken_back(rest, new_run):
    run = new_run()
    path = now(run.save_state("short", ttl_seconds=7200)).path

    def found():
        return next(c for c in now(rest.list_checkpoints(run.model_id)).checkpoints if c.tinker_path == path)

    made = found()
    assert abs((made.expires_at - made.time).total_seconds() - 7200) < 60
    now(rest.set_checkpoint_ttl_from_tinker_path(path, None))
    assert found().expires_at is None
    now(rest.set_checkpoint_ttl_from_tinker_path(path, 86400))
    assert (found().expires_at - made.expires_at).total_seconds() > 70000


def test_saved_weights_sample_after_their_run_is_over(target, connect, new_run):
    first = connect()
    run = new_run(first)
    train(run, batch(1, 3))
    path = now(run.save_weights_for_sampler("outlives")).path
    drawn = greedy(now(first.create_sampling_client(model_path=path)), max_tokens=4).sequences[0]
    now(first.close("success"))
    again = greedy(now(connect().create_sampling_client(model_path=path)), max_tokens=4).sequences[0]
    assert list(again.tokens) == list(drawn.tokens)
    assert all(abs(a - b) <= target.tolerance for a, b in zip(again.logprobs, drawn.logprobs, strict=True))
