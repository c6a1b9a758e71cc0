"""Replicas of one model: who answers, what happens when one dies, and when none can be had."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest
import ray

from verl_tinker.core.errors import EngineError, UserError, WorkerDied
from verl_tinker.core.types import Drawn, SampledSequence, SampleRequest, SampleResult, SamplingParams
from verl_tinker.engine import replicas
from verl_tinker.engine.replicas import Launch, Replicas, Told

pytestmark = pytest.mark.timeout(60)


DEADLY = np.array([2])


@pytest.fixture(autouse=True)
def deaths_show_at_once(monkeypatch):
    monkeypatch.setattr(replicas, "_SETTLE_S", 0.0)


def ask(affinity: str = "") -> SampleRequest:
    return SampleRequest(np.array([1]), 1, SamplingParams(), affinity=affinity)


class Server:
    """What a replica's actor handle looks like; `sample` answers with the server's own number."""

    def __init__(self, number: int):
        self.number = number
        self.is_dead = False
        # As with vLLM, whose own watch takes a moment to see that one of its processes died.
        self.shows = asyncio.Event()
        self.shows.set()
        self.held = asyncio.Event()
        self.held.set()
        self.holds: set[int] = set()
        self.ping = self.sample = self.load = self.refuse = None
        for name in ("ping", "sample", "load", "refuse"):
            setattr(self, name, type("Method", (), {"remote": staticmethod(getattr(self, f"_{name}"))}))

    async def _alive(self):
        await self.held.wait()
        if self.is_dead:
            raise ray.exceptions.RayActorError(error_msg="killed")

    async def _ping(self):
        if self.shows.is_set():
            await self._alive()

    async def _sample(self, request, version):
        self.is_dead = self.is_dead or request.prompt is DEADLY
        await self._alive()
        if version and version not in self.holds:
            raise AssertionError("a replica was chosen that has not all weights")
        return self.number

    async def _load(self, version):
        await self._alive()
        self.holds.add(version)
        return self.number

    async def _refuse(self):
        await self._alive()
        raise UserError("no")


class World:
    """Replicas over such servers; `versions` is what a new one must be brought to."""

    def __init__(self, count: int, **options):
        self.servers: list[Server] = []
        self.versions: list[int] = []
        self.closed: list[int] = []
        self.start_fails = False
        self.start_takes = 0.0
        self.replicas = Replicas("the sampler", count, Launch(self.build, self.start, self.restore), 5, 5, **options)

    def build(self, rank):
        world, server = self, Server(len(self.servers))
        self.servers.append(server)

        class Replica:
            server_handle = server

            async def close(self):
                world.closed.append(server.number)

        return Replica()

    async def start(self, replica):
        if self.start_fails:
            raise RuntimeError("no room")
        await asyncio.sleep(self.start_takes)

    async def restore(self, replicas, rank):
        for version in self.versions:
            await replicas.ask(rank, "load", version)


def run(test):
    return asyncio.run(test())


def test_a_session_keeps_its_replica_until_that_has_much_more_to_do():
    async def test():
        world = World(2)
        await world.replicas.start()
        assert len({await world.replicas.generate(ask("a session"), 0) for _ in range(10)}) == 1
        for server in world.servers:
            server.held.clear()
        waiting = [asyncio.create_task(world.replicas.generate(ask("a session"), 0)) for _ in range(40)]
        await asyncio.sleep(0)
        for server in world.servers:
            server.held.set()
        shares = Counter(await asyncio.gather(*waiting))
        assert shares.total() == 40 and min(shares.values()) >= 12, shares

    run(test)


def test_requests_outlive_the_death_of_all_replicas_at_once():
    async def test():
        world = World(3)
        await world.replicas.start()
        for server in world.servers:
            server.is_dead = True
        answers = await asyncio.gather(*(world.replicas.generate(ask(), 0) for _ in range(4)))
        assert set(answers) <= {3, 4, 5} and sorted(world.closed) == [0, 1, 2]

    run(test)


def test_requests_of_a_replica_that_dies_are_answered_by_another_and_it_comes_back_with_all_weights():
    async def test():
        world = World(2)
        await world.replicas.start()
        for version in (1, 2):
            await world.replicas.ask_all("load", version)
            world.versions.append(version)
        dying = world.servers[await world.replicas.generate(ask("s"), 2)]
        dying.held.clear()
        waiting = [asyncio.create_task(world.replicas.generate(ask("s"), 2)) for _ in range(6)]
        await asyncio.sleep(0)
        dying.is_dead = True
        dying.held.set()
        assert set(await asyncio.gather(*waiting)) == {1 - dying.number}
        await world.replicas.check()
        await asyncio.wait_for(world.replicas.places[dying.number].replacement, 5)
        assert world.closed == [dying.number] and world.servers[2].holds == {1, 2}
        assert await world.replicas.generate(ask("s"), 2) == 2
        await world.replicas.close()
        assert sorted(world.closed) == [0, 1, 2]

    run(test)


def test_with_one_replica_requests_wait_for_the_new_one():
    async def test():
        world = World(1)
        await world.replicas.start()
        world.servers[0].is_dead = True
        assert await asyncio.gather(*(world.replicas.generate(ask(), 0) for _ in range(3))) == [1, 1, 1]

    run(test)


def test_deaths_of_all_at_once_are_one_attempt_also_where_they_show_late(monkeypatch):
    monkeypatch.setattr(replicas, "_SETTLE_S", 0.1)

    async def test():
        world = World(2)
        await world.replicas.start()
        world.start_takes = 0.2
        for server in world.servers:
            server.is_dead = True
            server.shows.clear()
            asyncio.get_running_loop().call_later(0.02, server.shows.set)
        assert await world.replicas.generate(ask(), 0) in (2, 3)

    run(test)


def test_what_changes_while_one_starts_reaches_it_too():
    async def test():
        world = World(2)
        await world.replicas.start()
        world.servers[0].is_dead = True
        await world.replicas.check()
        async with world.replicas.changing:
            await world.replicas.ask_all("load", 5)
            world.versions.append(5)
        await asyncio.wait_for(world.replicas.places[0].replacement, 5)
        assert world.servers[2].holds == {5}

    run(test)


def test_a_request_that_ends_each_replica_it_meets_is_given_up():
    async def test():
        world = World(3)
        await world.replicas.start()
        with pytest.raises(WorkerDied, match="replica"):
            await world.replicas.generate(SampleRequest(DEADLY, 1, SamplingParams()), 0)
        assert sum(server.is_dead for server in world.servers) == 2
        await world.replicas.close()

    run(test)


@pytest.mark.parametrize("options", [{"replaces": False}, {}], ids=["not replaced", "cannot be started"])
def test_what_no_replacement_mends_is_told_by_the_check(options):
    async def test():
        world = World(1, **options)
        await world.replicas.start()
        world.servers[0].is_dead = world.start_fails = True
        with pytest.raises(EngineError):
            await world.replicas.generate(ask(), 0)
        with pytest.raises(EngineError, match="the sampler"):
            await world.replicas.check()
        with pytest.raises(EngineError):
            await world.replicas.generate(ask(), 0)

    run(test)


def test_one_that_dies_again_and_again_is_given_up():
    async def test():
        world = World(1)
        await world.replicas.start()
        for _ in range(3):
            world.servers[-1].is_dead = True
            assert await world.replicas.generate(ask(), 0) == len(world.servers) - 1
        world.servers[-1].is_dead = True
        with pytest.raises(EngineError, match="died"):
            await world.replicas.check()
        assert len(world.servers) == 4

    run(test)


def test_a_refusal_is_not_a_death():
    async def test():
        world = World(2)
        await world.replicas.start()
        with pytest.raises(UserError, match="no"):
            await world.replicas.ask_all("refuse")
        assert world.replicas.ranks == [0, 1]

    run(test)


def attempt(tokens: list[int], dies: bool, sizes=(2, 1)):
    """References as Ray's generator gives them: parts of the two sequences in turn, and the result or the death."""
    async def value(of):
        if of is None:
            raise ray.exceptions.RayActorError(error_msg="killed")
        return of

    async def parts():
        at = 0
        for size in sizes:
            for index in (0, 1):
                drawn = np.array(tokens[at : at + size]) + 100 * index
                yield value(Drawn(index, drawn, drawn / 10))
            at += size
        one = SampledSequence(np.array(tokens), np.array(tokens) / 10, "stop")
        yield value(None if dies else SampleResult([one, one], 1))

    return parts()


def test_tokens_are_told_once_however_many_attempts_it_takes():
    told = []
    told_of = Told(told.append)

    async def run():
        with pytest.raises(ray.exceptions.RayActorError):
            await told_of.all_of(attempt([1, 2, 3], dies=True))
        return await told_of.all_of(attempt([1, 2, 3, 4, 5], dies=False, sizes=(1, 3)))

    result = asyncio.run(run())
    assert len(result.sequences[0].tokens) == 5
    for index in (0, 1):
        tokens = np.concatenate([part.tokens for part in told if part.index == index]) - 100 * index
        assert tokens.tolist() == [1, 2, 3, 4]
        assert np.allclose(np.concatenate([part.logprobs for part in told if part.index == index]), (tokens + 100 * index) / 10)


@pytest.mark.parametrize(("params", "may"), [({}, False), ({"seed": 3}, True), ({"temperature": 0.0}, True)])
def test_an_attempt_that_would_draw_other_tokens_is_not_made_once_some_were_told(params, may):
    told_of = Told(lambda part: None)
    request = SampleRequest(np.array([1]), 1, SamplingParams(**params))
    assert told_of.again(request)
    with pytest.raises(ray.exceptions.RayActorError):
        asyncio.run(told_of.all_of(attempt([1, 2, 3], dies=True)))
    assert told_of.again(request) == may
