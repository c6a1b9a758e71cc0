import asyncio

import pytest

from verl_tinker.core.fair import FairQueue, FairSlots

pytestmark = pytest.mark.timeout(120)


def test_owners_take_turns_and_so_do_their_lines():
    queue = FairQueue()
    for owner, line, item in (("a", "x", 1), ("a", "x", 2), ("a", "y", 3), ("a", "x", 4), ("b", "z", 5), ("b", "z", 6)):
        queue.push(owner, line, item)
    assert len(queue) == 6
    assert [queue.pop() for _ in range(6)] == [1, 5, 3, 6, 2, 4]
    with pytest.raises(IndexError):
        queue.pop()


def test_slots_bound_and_alternate_between_owners():
    async def run():
        slots, order, running, most, go = FairSlots(2), [], 0, 0, asyncio.Event()

        async def use(owner, n):
            nonlocal running, most
            async with slots.slot(owner, "line"):
                running += 1
                most = max(most, running)
                await go.wait()
                order.append(f"{owner}{n}")
                running -= 1

        tasks = [asyncio.create_task(use(owner, n)) for owner, count in (("a", 6), ("b", 2)) for n in range(count)]
        await asyncio.sleep(0)
        go.set()
        await asyncio.gather(*tasks)
        assert most == 2
        assert order == ["a0", "a1", "a2", "b0", "a3", "b1", "a4", "a5"]

    asyncio.run(run())


def test_a_waiter_that_gives_up_leaves_the_slot_to_the_next():
    async def run():
        slots = FairSlots(1)
        entered = []

        async def use(name):
            async with slots.slot("a", name):
                entered.append(name)

        async with slots.slot("a", "first"):
            tasks = [asyncio.create_task(use(n)) for n in ("gone", "next")]
            await asyncio.sleep(0)
            tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert entered == ["next"]
        # The slot is free again.
        await asyncio.wait_for(use("last"), 1)

    asyncio.run(run())
