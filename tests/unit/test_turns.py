"""Turns of trainer and sampler on shared memory, without either."""

from __future__ import annotations

import asyncio

import pytest

from verl_tinker.engine.turns import SideBySide, Turns

pytestmark = pytest.mark.timeout(120)


class Shared:
    """Memory that only one side may use, and a record of who did."""

    def __init__(self, **settings):
        self.owner = "sampling"
        self.users = 0
        self.switches: list[str] = []
        self.log: list[str] = []
        self.broken = False
        self.turns = Turns(self.switch, "sampling", **{"patience_s": 5.0, "linger_s": 0.005, **settings})

    async def switch(self, side: str) -> None:
        assert self.users == 0, "somebody was still at work"
        await asyncio.sleep(0.001)
        if self.broken:
            raise RuntimeError("no room")
        self.owner = side
        self.switches.append(side)

    async def work(self, side: str, seconds: float = 0.001, name: str = "") -> None:
        async with self.turns.turn(side):
            assert self.owner == side
            self.users += 1
            await asyncio.sleep(seconds)
            assert self.owner == side
            self.users -= 1
            self.log.append(name or side)


def run(test) -> None:
    asyncio.run(asyncio.wait_for(test, 10))


def test_the_present_side_works_at_once_and_many_at_a_time():
    async def test():
        shared = Shared()
        await asyncio.gather(*(shared.work("sampling", 0.05) for _ in range(20)))
        assert shared.switches == []

    run(asyncio.wait_for(test(), 0.5))


def test_sides_exclude_each_other_under_interleaved_requests():
    async def test():
        shared = Shared()
        await asyncio.gather(*(shared.work(("sampling", "training")[i % 2], 0.001 * (i % 5)) for i in range(200)))
        assert len(shared.log) == 200
        assert len(shared.switches) <= 3, f"thrashing: {shared.switches}"

    run(test())


def test_a_training_step_of_several_commands_is_one_turn():
    async def test():
        shared = Shared(linger_s=0.02)

        async def step():
            for name in ("forward_backward", "optim_step", "save"):
                await shared.work("training", 0.02, name)

        async def samples():
            await asyncio.sleep(0.03)
            await asyncio.gather(*(shared.work("sampling") for _ in range(8)))

        await asyncio.gather(step(), samples())
        assert shared.switches == ["training", "sampling"], shared.switches
        assert shared.log[:3] == ["forward_backward", "optim_step", "save"]

    run(test())


@pytest.mark.parametrize("busy, other", [("sampling", "training"), ("training", "sampling")])
def test_a_side_that_never_pauses_does_not_starve_the_other(busy, other):
    async def test():
        shared = Shared(patience_s=0.05)
        stop = asyncio.Event()

        async def stream():
            while not stop.is_set():
                await shared.work(busy, 0.004)

        streams = [asyncio.create_task(stream()) for _ in range(3)]
        await asyncio.sleep(0.02)
        for _ in range(3):
            await asyncio.wait_for(shared.work(other), 1)
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        after = len(shared.log)
        await asyncio.sleep(0.1)
        assert len(shared.log) > after, "the stream goes on"
        stop.set()
        await asyncio.gather(*streams)

    run(test())


def test_two_sides_that_never_pause_change_at_the_pace_of_patience():
    async def test():
        shared = Shared(patience_s=0.1)
        loop = asyncio.get_running_loop()
        end = loop.time() + 1.0

        async def stream(side):
            while loop.time() < end:
                await shared.work(side, 0.002)

        await asyncio.gather(*(stream(side) for side in ("sampling", "training") for _ in range(3)))
        assert 4 <= len(shared.switches) <= 12, shared.switches
        share = shared.log.count("training") / len(shared.log)
        assert 0.25 < share < 0.75, share

    run(test())


def test_what_was_admitted_finishes_before_the_switch():
    async def test():
        shared = Shared(patience_s=0.01)
        long = asyncio.create_task(shared.work("sampling", 0.1, "long"))
        await asyncio.sleep(0.01)
        await shared.work("training")
        assert shared.log == ["long", "training"]
        await long

    run(test())


def test_a_failed_switch_is_told_to_those_who_wait_and_tried_again():
    async def test():
        shared = Shared()
        shared.broken = True
        with pytest.raises(RuntimeError, match="no room"):
            await shared.work("training")
        with pytest.raises(RuntimeError, match="no room"):
            await shared.work("sampling")
        shared.broken = False
        await shared.work("training")
        assert shared.switches == ["training"]

    run(test())


def test_an_error_or_a_cancelled_wait_gives_the_turn_back():
    async def test():
        shared = Shared()
        with pytest.raises(ZeroDivisionError):
            async with shared.turns.turn("sampling"):
                1 / 0
        holder = asyncio.create_task(shared.work("sampling", 0.05))
        await asyncio.sleep(0.01)
        waiter = asyncio.create_task(shared.work("training"))
        await asyncio.sleep(0.01)
        waiter.cancel()
        await asyncio.gather(waiter, return_exceptions=True)
        await holder
        await asyncio.wait_for(shared.work("sampling"), 1)
        await asyncio.wait_for(shared.work("training"), 1)

    run(test())


def test_side_by_side_holds_nobody_off():
    async def test():
        async with SideBySide().turn("sampling"), SideBySide().turn("training"):
            pass

    run(test())
