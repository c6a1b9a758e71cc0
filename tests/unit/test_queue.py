import asyncio

import pytest

from verl_tinker.core.errors import UserError
from verl_tinker.core.futures import FutureStore
from verl_tinker.core.journal import Journal
from verl_tinker.core.queue import Chunk, CommandQueue

pytestmark = pytest.mark.timeout(120)


def scenario(body):
    """Run `body(queue, log, command)` on a loop; `command(name)` makes an action that logs its begin and end."""

    async def run():
        queue, log = CommandQueue(FutureStore(), Journal(None)), []

        def command(name, error=None):
            async def act():
                log.append(f"{name}<")
                await asyncio.sleep(0.001)
                log.append(f">{name}")
                if error:
                    raise error
                return name

            return act

        await body(queue, log, command)
        await queue.close()

    asyncio.run(run())


def test_one_at_a_time_in_arrival_order():
    async def body(queue, log, command):
        futures = [queue.submit("m", n, "k", command(n)) for n in (2, 1, 5)]
        assert [await f.wait(5) and f.result for f in futures] == [2, 1, 5]
        assert log == ["2<", ">2", "1<", ">1", "5<", ">5"]

    scenario(body)


def test_models_take_turns():
    async def body(queue, log, command):
        futures = [queue.submit(m, None, "k", command(f"{m}{n}")) for m in "ab" for n in range(2)]
        for future in futures:
            await future.wait(5)
        assert [entry for entry in log if entry.startswith(">")] == [">a0", ">b0", ">a1", ">b1"]

    scenario(body)


def test_a_command_that_arrives_meanwhile_waits_its_turn():
    async def body(queue, log, command):
        futures = [queue.submit("a", 1, "k", command("a1"))]
        while not log:
            await asyncio.sleep(0)
        futures += [queue.submit(m, n, "k", command(f"{m}{n}")) for m, n in (("a", 2), ("b", 1), ("a", 3), ("b", 2))]
        for future in futures:
            await future.wait(5)
        assert [entry for entry in log if entry.startswith(">")] == [">a1", ">b1", ">a2", ">b2", ">a3"]

    scenario(body)


def test_same_seq_same_future_for_each_model():
    async def body(queue, log, command):
        first = queue.submit("m", 1, "k", command("first"))
        assert queue.submit("m", 1, "k", command("second")) is first
        other = queue.submit("m", 1, "other", command("second"))
        assert isinstance(other.error, UserError) and "seq_id 1 was a k already" in str(other.error)
        assert queue.submit("n", 1, "k", command("third")) is not first
        assert queue.submit("m", None, "k", command("x")) is not queue.submit("m", None, "k", command("y"))
        await first.wait(5)
        assert queue.submit("m", 1, "k", command("again")) is first
        assert "second<" not in log

    scenario(body)


def test_a_failure_ends_only_itself():
    async def body(queue, log, command):
        user = queue.submit("m", 1, "k", command("a", UserError("bad")))
        bug = queue.submit("m", 2, "k", command("b", KeyError("x")))
        good = queue.submit("m", 3, "k", command("c"))
        await good.wait(5)
        assert (user.error.category, str(user.error)) == ("user", "bad")
        assert bug.error.category == "server" and "KeyError" in str(bug.error)
        assert good.result == "c"

    scenario(body)


def test_drain_runs_the_commands_of_another_model_inside_a_command():
    async def body(queue, log, command):
        async def leave():
            await queue.drain("old")
            log.append("made room")

        made = queue.submit("new", 0, "k", leave)
        old = [queue.submit("old", n, "k", command(n)) for n in (1, 2)]
        await made.wait(5)
        assert log == ["1<", ">1", "2<", ">2", "made room"]
        assert all(f.done for f in old)

    scenario(body)


def test_commands_whose_future_has_ended_do_not_run():
    async def body(queue, log, command):
        first, second = (queue.submit("m", n, "k", command(n)) for n in (1, 2))
        second.fail(UserError("stopped"))
        await first.wait(5)
        last = queue.submit("m", 3, "k", command(3))
        await last.wait(5)
        assert log == ["1<", ">1", "3<", ">3"]

    scenario(body)


def test_chunks_that_keep_coming_do_not_keep_their_group_open():
    async def run():
        queue, acted = CommandQueue(FutureStore(), Journal(None), gap_seconds=0.05), []

        async def act(contents):
            acted.append(contents)
            return contents

        for seq in range(1000, 1060, 2):
            queue.submit("m", seq, "forward_backward", Chunk("k", seq, act))
            await asyncio.sleep(0.02)
        assert acted and acted[0][0] == 1000
        await queue.close()

    asyncio.run(run())


@pytest.mark.parametrize(("pack_tokens", "calls"), [(0, [[1], [2], [3], ["step"], [4], [5]]), (7, [[1, 2], [3], ["step"], [4], [5]])])
def test_calls_that_wait_run_as_one_up_to_a_bound_and_never_across_a_step(pack_tokens, calls):
    async def run():
        queue, acted, free = CommandQueue(FutureStore(), Journal(None), pack_tokens=pack_tokens), [], asyncio.Event()

        async def act(contents):
            acted.append(contents)
            return [10 * content for content in contents]

        async def step():
            acted.append(["step"])

        queue.submit("m", 1, "save", free.wait)
        futures = [queue.submit("m", seq, "forward_backward", Chunk(key, content, act, 3))
                   for seq, key, content in ((2, "k", 1), (3, "k", 2), (4, "k", 3))]
        queue.submit("m", 5, "optim_step", step)
        futures += [queue.submit("m", 6, "forward_backward", Chunk("k", 4, act, 3)),
                    queue.submit("m", 7, "forward_backward", Chunk("another loss", 5, act, 3))]
        await asyncio.sleep(0)
        free.set()
        for content, future in enumerate(futures, 1):
            assert await future.wait(5) and future.result == 10 * content
        assert acted == calls
        await queue.close()

    asyncio.run(run())
