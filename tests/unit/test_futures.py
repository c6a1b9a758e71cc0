import asyncio
import time

import pytest

from verl_tinker.core.completions import CompletionTable
from verl_tinker.core.errors import EngineError, NotFound, UserError
from verl_tinker.core.futures import FutureStore, Limits

pytestmark = pytest.mark.timeout(120)


def test_a_result_stands_and_is_readable_many_times():
    store = FutureStore()
    future = store.create("optim_step", "m")
    future.succeed(1)
    future.fail(EngineError("late"))
    future.succeed(2)
    assert [store.get(future.request_id).result for _ in range(3)] == [1, 1, 1]
    assert future.error is None


def test_waiting_ends_with_the_result_not_with_the_time():
    async def run():
        future = FutureStore().create("sample")
        asyncio.get_running_loop().call_later(0.05, future.succeed, 1)
        begin = time.monotonic()
        assert await future.wait(5)
        assert time.monotonic() - begin < 1
        assert not await FutureStore().create("sample").wait(0.01)

    asyncio.run(run())


def test_the_first_settled_go_first_and_pending_ones_stay():
    store = FutureStore(Limits(count=3))
    pending = store.create("a")
    settled = [store.create("b") for _ in range(5)]
    for future in reversed(settled):
        future.succeed(0)
    store.create("c")
    assert pending.request_id in store
    assert [f.request_id in store for f in settled] == [True, True, True, False, False]
    with pytest.raises(NotFound, match="submit the operation again"):
        store.get(settled[-1].request_id)


def test_old_results_go():
    store = FutureStore(Limits(age_s=0.0))
    old = store.create("a")
    old.fail(UserError("x"))
    store.create("b")
    assert old.request_id not in store


def test_a_dropped_result_is_freed_for_those_who_still_hold_its_future():
    store = FutureStore(Limits(count=1))
    ended = CompletionTable()
    for n in range(5):
        future = store.create("sample")
        store.succeed_now(future, {"n": n})
        ended.add("sampler", n, future)
        first = future if n == 0 else first
    with pytest.raises(FileNotFoundError):
        _ = first.result
    assert future.result == {"n": 4}
    assert [f.result["n"] for f in asyncio.run(ended.after("sampler", 0, 0, 0))[0]] == [4]


def test_lists_end_with_their_session():
    store, ended = FutureStore(), CompletionTable()
    for session in ("gone", "here"):
        future = store.create("sample")
        store.succeed_now(future, {})
        ended.add(f"{session}:sample:0", 0, future)
    ended.forget({"gone"})
    assert [len(asyncio.run(ended.after(f"{session}:sample:0", 0, 0, 0))[0]) for session in ("gone", "here")] == [0, 1]


def test_fail_pending():
    store = FutureStore()
    done, pending = store.create("a"), store.create("a")
    done.succeed(1)
    store.fail_pending(EngineError("dead"))
    assert done.error is None and str(pending.error) == "dead"


def test_sequence_ids_are_unique():
    store = FutureStore()
    ids = [i for _ in range(3) for i in store.create("sample", sequences=4).sequence_ids]
    assert len(set(ids)) == 12
