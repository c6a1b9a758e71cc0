"""What the log tells of each operation, for people and for programs."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from verl_tinker import logs
from verl_tinker.core.errors import EngineError, UserError
from verl_tinker.core.futures import FutureStore
from verl_tinker.core.request_log import RequestLog
from verl_tinker.core.watch import WatchedEngine

pytestmark = pytest.mark.timeout(60)


class Engine:
    async def sample(self, base_model, version, request):
        return type("Result", (), {"version": version})


@pytest.fixture
def written(capsys):
    """Set the log up and give what is written to it."""
    names = [logging.getLogger(), logging.getLogger("verl_tinker")]
    before = [(name.level, name.handlers[:]) for name in names]

    def lines(form: str, level: str, work) -> list[str]:
        logs.set_up(form, level)
        store = FutureStore()
        store.watchers.add(RequestLog({"run-a": 7}.get, lambda: "/logs"))
        asyncio.run(work(store, WatchedEngine(Engine(), store.watchers)))
        # Other packages' threads may log meanwhile.
        return [line for line in capsys.readouterr().err.splitlines() if "verl_tinker.requests" in line]

    yield lines
    for name, (level, handlers) in zip(names, before):
        name.setLevel(level)
        name.handlers[:] = handlers


async def work(store, engine):
    step = store.create("optim_step", "run-a")
    await asyncio.sleep(0.05)
    store.begin([step])
    await asyncio.sleep(0.1)
    store.succeed_now(step, {})

    async def sample(version):
        future = store.create("sample")
        store.begin([future])
        await asyncio.sleep(0)
        await engine.sample("m", version, None)
        store.succeed_now(future, {})

    await asyncio.gather(*(sample(version) for version in (3, 0, 5)))
    store.create("load_weights", "run-b").fail(UserError("path: no such checkpoint"))
    store.create("forward_backward", "run-a").fail(EngineError("the trainer's process died"))


def test_each_line_is_an_object_with_all_fields(written):
    rows = [json.loads(line) for line in written("json", "debug", work)]
    assert [(row["level"], row["operation"]["kind"]) for row in rows] == [
        ("INFO", "optim_step"), ("DEBUG", "sample"), ("DEBUG", "sample"), ("DEBUG", "sample"),
        ("WARNING", "load_weights"), ("ERROR", "forward_backward")]
    step, *samples, refused, broken = [row["operation"] for row in rows]
    assert step["run"] == "run-a" and step["version"] == 7 and step["request_id"].startswith("optim_step-")
    assert 0.04 < step["queue_s"] < step["run_s"] < 5
    assert [sample["version"] for sample in samples] == [3, 0, 5]
    assert refused["error"] == "path: no such checkpoint" and refused["category"] == "user" and "worker_logs" not in refused
    assert broken["worker_logs"] == "/logs" and broken["category"] == "server"


def test_text_names_the_fields_and_leaves_out_samples_unless_asked(written):
    lines = written("text", "info", work)
    assert len(lines) == 3
    assert "INFO verl_tinker.requests: optim_step ended request_id=optim_step-" in lines[0] and "run=run-a version=7" in lines[0]
    assert "error=the trainer's process died worker_logs=/logs" in lines[2]
