"""What watchers are told, that they harm nobody, and what the history keeps of it."""

import asyncio

import numpy as np
import pytest

from verl_tinker.core.errors import EngineError, UserError
from verl_tinker.core.futures import FutureStore
from verl_tinker.core.history import History
from verl_tinker.core.types import Datum, ForwardBackwardResult, SampledSequence, SampleResult
from verl_tinker.core.watch import CALLS, WatchedEngine, Watcher, Watchers
from verl_tinker.engine.base import Engine

pytestmark = pytest.mark.timeout(60)


class Broken(Watcher):
    def accepted(self, future):
        raise RuntimeError("broken")

    began = settled = accepted

    def engine_call(self, name):
        raise RuntimeError("broken")

    def http_request(self, scope):
        raise RuntimeError("broken")


class Entered(Watcher):
    """Notes what it was in, and with which error it came out; its own end fails."""

    def __init__(self):
        self.seen = []

    def engine_call(self, name):
        watcher = self

        class Manager:
            def __enter__(self):
                watcher.seen.append(name)

            def __exit__(self, kind, error, traceback):
                watcher.seen.append(error)
                raise RuntimeError("broken at the end")

        return Manager()


def test_a_watcher_that_fails_harms_neither_the_work_nor_the_others():
    async def run():
        store, entered = FutureStore(), Entered()
        for watcher in (Broken(), entered):
            store.watchers.add(watcher)
        future = store.create("sample")
        store.begin([future])
        future.succeed(1)
        assert future.done
        with store.watchers.engine_call("sample"):
            pass
        with store.watchers.http_request({}):
            pass
        error = EngineError("of the work")
        with pytest.raises(EngineError, match="of the work"), store.watchers.engine_call("sample"):
            raise error
        assert entered.seen == ["sample", None, "sample", error]

    asyncio.run(run())


def test_every_working_call_of_an_engine_is_watched():
    methods = {name for name in vars(Engine) if not name.startswith("_")}
    assert set(CALLS) <= methods
    # Begin and end of the engine and questions about it are no work of an operation.
    assert methods - set(CALLS) == {"start", "close", "base_models", "check", "worker_logs"}


def test_other_attributes_of_an_engine_are_its_own():
    class Real:
        colour = "blue"

        async def sample(self, *arguments):
            return arguments

    told = []
    watchers = Watchers()
    watcher = Watcher()
    watcher.engine_returned = lambda *what: told.append(what)
    watchers.add(watcher)
    engine = WatchedEngine(Real(), watchers)
    assert engine.colour == "blue" and asyncio.run(engine.sample(1, 2)) == (1, 2)
    assert told == [("sample", (1, 2), (1, 2))]


def datum(**inputs):
    return Datum(np.arange(4, dtype=np.int32), {k: np.asarray(v, np.float32) for k, v in inputs.items()})


def step(history, data, loss_fn, losses, logprobs=-1.0):
    result = ForwardBackwardResult([np.full(4, logprobs, np.float32) for _ in data], np.asarray(losses, np.float32), {})
    history.engine_returned("forward_backward", ("run", data, loss_fn, {}, True), result)


def test_the_loss_of_a_step_is_for_each_token_that_counts():
    history = History()
    step(history, [datum(weights=[0, 0, 1, 1])], "cross_entropy", [3.0])
    step(history, [datum(weights=[0, 1, 1, 1])], "cross_entropy", [7.0])
    history.engine_returned("optim_step", ("run", None), {"grad_norm": 2.0, "lr:mean": 0.5, "odd": float("nan")})
    step(history, [datum(advantages=[0, 0, 1, -1], logprobs=[9, 9, -0.5, -1.0])], "ppo", [4.0])
    history.engine_returned("optim_step", ("run", None), {"grad_norm": 1.0})
    first, second = history.points("run")
    assert first.values == {"loss": 2.0, "tokens": 8.0, "grad_norm": 2.0, "lr": 0.5}
    # (-0.5 - -1) and (-1 - -1) over the two that count.
    assert second.values == {"loss": 2.0, "tokens": 4.0, "grad_norm": 1.0, "sampler_kl": 0.25}
    assert [point.step for point in history.points("run", after=1)] == [2] and history.last("run") is second
    assert history.points("other") == [] and history.last("other") is None


def test_the_history_is_bounded(monkeypatch):
    from verl_tinker.core import history as module

    monkeypatch.setattr(module, "_RUNS", 3)
    history = History()
    for run in range(5):
        history.engine_returned("optim_step", (f"run-{run}", None), {})
    assert [bool(history.points(f"run-{run}")) for run in range(5)] == [False, False, True, True, True]
    for _ in range(2100):
        history.engine_returned("optim_step", ("run-4", None), {})
    assert len(history.points("run-4")) == 2000 and history.last("run-4").step == 2101

    async def fail():
        store = FutureStore()
        store.watchers.add(history)
        for i in range(250):
            store.create("sample", owner="alice").fail(UserError(f"{i}"))

    asyncio.run(fail())
    assert [failure.text for failure in history.errors] == [str(i) for i in range(50, 250)]
    assert history.errors[0].owner == "alice" and history.errors[0].category == "user"


def test_rates_are_of_the_last_seconds(monkeypatch):
    from verl_tinker.core import history as module

    history, now = History(), [1000.0]
    monkeypatch.setattr(module.time, "time", lambda: now[0])
    result = SampleResult([SampledSequence(np.zeros(30, np.int32), np.zeros(30, np.float32), "stop")], 0)
    for now[0] in (1000.0, 1000.5, 1004.0):
        history.engine_returned("sample", (), result)
    assert history.rates(10) == {"trained": 0.0, "sampled": 9.0}
    now[0] = 1012.0
    assert history.rates(10)["sampled"] == 3.0
