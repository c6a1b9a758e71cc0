"""Runs that rest wait on disk, come back by themselves, and train on as if they had never left."""

import asyncio

import pytest
from data import sft
from fake_engine import BASE
from raw import Raw

from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(120)

CLOSE = {"reason": {"type": "success"}}


def step(raw: Raw, seq: int) -> dict:
    """One forward_backward and one optim_step, under this seq and the next."""
    raw.binary(raw.forward_backward(seq))
    return raw.result(raw.optim_step(seq + 1))


def housekeep(server) -> None:
    asyncio.run_coroutine_threadsafe(server.service.housekeep(), server.loop).result(10)


def parked_folders(server) -> list:
    return [run.parked for run in server.service.runs.all() if run.parked is not None]


def park(server, raw: Raw) -> bool:
    """Whether housekeeping had a run parked that rested for long enough."""
    run = server.service.runs.find(raw.model)
    run.last_request -= 3600
    housekeep(server)
    drained = asyncio.run_coroutine_threadsafe(_until(lambda: run.parked is not None), server.loop)
    return drained.result(10)


async def _until(condition) -> bool:
    for _ in range(200):
        if condition():
            return True
        await asyncio.sleep(0.01)
    return False


def test_more_runs_than_places_take_turns_and_train_as_if_alone(start_server):
    server = start_server(max_runs=2)
    with server.http() as http:
        runs = [Raw(http) for _ in range(5)]
        for run in runs:
            run.create()
        for seq in (1, 3, 5):
            for run in runs:
                assert step(run, seq)["metrics"]["weights_version"] == 1 + (seq + 1) / 2
                assert len(server.engine.models) == 2
        # By the arithmetic of the tests' engine: moments were kept, or the second and third step would be smaller.
        for run in runs:
            run.binary(run.forward_backward(7))
            assert server.engine.models[run.model].weight == pytest.approx(0.04 + 0.08 + 0.08)
        # Now each has a gradient, which must survive on disk as well.
        for run in runs:
            assert run.result(run.optim_step(8))["metrics"]["grad_norm"] == 4.0
        assert len(parked_folders(server)) == 3 and all(folder.exists() for folder in parked_folders(server))


def test_a_run_that_rests_is_parked_and_comes_back(start_server):
    server = start_server(max_runs=4, park_after_s=0.05)
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        step(raw, 1)
        assert park(server, raw) and not server.engine.models
        folder = parked_folders(server)[0]
        snapshot = raw.result(raw.snapshot(3, 0))
        assert snapshot["sampling_session_id"] and list(server.engine.models) == [raw.model]
        assert not folder.exists()
        step(raw, 4)
        assert server.engine.models[raw.model].weight == pytest.approx(0.12)


def test_full_fine_tuning_is_not_parked(start_server):
    server = start_server(max_runs=4, park_after_s=0.05)
    with server.http() as http:
        full = Raw(http)
        made = full.post("create_model", session_id=full.session, model_seq_id=0, base_model=BASE, lora_config={"rank": 0})
        full.result(made["request_id"])
        assert not park(server, full)


def test_a_return_that_fails_is_tried_again_by_the_next_command(start_server):
    server = start_server(max_runs=4, park_after_s=0.05)
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        step(raw, 1)
        assert park(server, raw)
        server.engine.fail["unpark"] = EngineError("short of memory")
        assert raw.result(raw.forward_backward(3))["error"].startswith("short of memory")
        assert not server.engine.models
        step(raw, 4)
        assert server.engine.models[raw.model].weight == pytest.approx(0.12)


def test_a_run_that_cannot_be_written_stays_in_memory(start_server):
    server = start_server(max_runs=4, park_after_s=0.05)
    with server.http() as http:
        raw = Raw(http)
        raw.create()
        step(raw, 1)
        server.engine.fail["park"] = EngineError("No space left on device")
        assert not park(server, raw)
        step(raw, 3)
        assert server.engine.models[raw.model].weight == pytest.approx(0.12)


def test_parked_runs_outlive_the_death_of_the_engine(start_server):
    server = start_server(max_runs=1)
    with server.http() as http:
        first, second = Raw(http), Raw(http)
        first.create()
        step(first, 1)
        second.create()
        asyncio.run_coroutine_threadsafe(server.service.recover("fake worker 0 died"), server.loop).result(10)
        assert "fake worker 0 died" in second.result(second.forward_backward(1))["error"]
        step(first, 3)
        assert server.engine.models[first.model].weight == pytest.approx(0.12)


def test_a_parked_run_whose_session_ends_leaves_nothing_on_disk(start_server):
    server = start_server(max_runs=1)
    with server.http() as http:
        first, second = Raw(http), Raw(http)
        first.create()
        second.create()
        folder = parked_folders(server)[0]
        http.post(f"/sessions/{first.session}/finish", json=CLOSE)
        housekeep(server)
        second.binary(second.forward_backward(1, [sft()]))
        assert not folder.exists() and list(server.engine.models) == [second.model]
        assert "its session finished (success)" in first.result(first.forward_backward(1))["error"]
