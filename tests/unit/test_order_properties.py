"""Whatever reaches the queue, in whatever order and how often: each command acts once, in order, and ends.

The reference is a model in plain Python that takes each accepted command once, in the order of arrival.
"""

import asyncio
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_tinker.core.errors import EngineError, UserError
from verl_tinker.core.futures import FutureStore
from verl_tinker.core.journal import Journal
from verl_tinker.core.queue import Chunk, CommandQueue

pytestmark = pytest.mark.timeout(300)


@dataclass(frozen=True)
class Call:
    """One POST that reaches the server. `value` is a chunk's gradient; `fails` makes it end in an error."""

    model: str
    seq: int
    kind: str
    value: int = 0
    fails: bool = False


@st.composite
def programs(draw, model):
    """The POSTs of one client: calls of some chunks, the first of them last, steps and saves; lost ones, repeated ones."""
    posts, seq = [], 1
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(["forward_backward", "forward_backward", "optim_step", "save"]))
        count = draw(st.integers(1, 4)) if kind == "forward_backward" else 1
        call = [Call(model, seq + n, kind, draw(st.integers(1, 9)), draw(st.booleans()) and draw(st.booleans()))
                for n in range(count)]
        others = draw(st.permutations(call[1:]))
        posts += [post for post in [*others, call[0]] if draw(st.integers(0, 7))]
        seq += count
    again = draw(st.lists(st.sampled_from(posts), max_size=4)) if posts else []
    for post in again:
        # A repeat comes after the first; it may come much later.
        posts.insert(draw(st.integers(posts.index(post) + 1, len(posts))), post)
    return posts


@st.composite
def traffic(draw):
    """The POSTs of two clients, interleaved, with pauses (None) in which missing chunks are given up."""
    lines = [draw(programs("a")), draw(programs("b"))]
    mixed = []
    while any(lines):
        line = draw(st.sampled_from([line for line in lines if line]))
        mixed.append(line.pop(0))
        if not draw(st.integers(0, 9)):
            mixed.append(None)
    return mixed


class Reference:
    """Each accepted command once, in the order of arrival; a step gives the sum of the gradients since the last."""

    def __init__(self):
        self.outcomes: dict[tuple[str, int], object] = {}
        self.gradient: dict[str, int] = {}

    def take(self, call: Call) -> None:
        if (call.model, call.seq) in self.outcomes:
            return
        total = self.gradient.get(call.model, 0)
        if call.fails:
            outcome = "error"
        elif call.kind == "forward_backward":
            self.gradient[call.model] = total + call.value
            outcome = call.value
        elif call.kind == "optim_step":
            self.gradient[call.model] = 0
            outcome = total
        else:
            outcome = ("saved", total)
        self.outcomes[call.model, call.seq] = outcome


class Engine:
    """What the commands act on. Refuses to run two things at once."""

    def __init__(self):
        self.gradient: dict[str, int] = {}
        self.acted: list[tuple[str, int]] = []
        self.busy = False

    async def act(self, calls: list[Call]) -> list[object]:
        assert not self.busy
        self.busy = True
        await asyncio.sleep(0)
        self.busy = False
        return [self._one(call) for call in calls]

    def _one(self, call: Call) -> object:
        self.acted.append((call.model, call.seq))
        if call.fails:
            return UserError("bad") if call.value % 2 else EngineError("broken")
        total = self.gradient.get(call.model, 0)
        if call.kind == "forward_backward":
            self.gradient[call.model] = total + call.value
            return call.value
        if call.kind == "optim_step":
            self.gradient[call.model] = 0
            return total
        return ("saved", total)

    def work(self, call: Call):
        if call.kind == "forward_backward":
            return Chunk("loss", call, self.act, tokens=call.value)

        async def alone():
            outcome = (await self.act([call]))[0]
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        return alone


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_each_accepted_command_acts_once_and_in_order(examples):
    settings(max_examples=examples, deadline=None)(given(traffic(), st.sampled_from([0, 12]))(acts_once_and_in_order))()


def acts_once_and_in_order(posts, pack_tokens):
    async def run():
        engine, reference, futures = Engine(), Reference(), {}
        queue = CommandQueue(FutureStore(), Journal(None), gap_seconds=0.002, pack_tokens=pack_tokens)
        for post in posts:
            if post is None:
                await asyncio.sleep(0.004)
                continue
            future = queue.submit(post.model, post.seq, post.kind, engine.work(post), owner=post.model)
            assert futures.setdefault((post.model, post.seq), future) is future
            reference.take(post)
        for key, future in futures.items():
            assert await future.wait(5), f"{key} never ended"
        await queue.close()
        assert sorted(engine.acted) == sorted(futures)
        seen = {key: "error" if f.error else f.result for key, f in futures.items()}
        assert seen == reference.outcomes
        assert {m: g for m, g in engine.gradient.items() if g} == {m: g for m, g in reference.gradient.items() if g}

    asyncio.run(run())


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=pytest.mark.full)])
def test_a_queue_that_stops_anywhere_answers_for_all_and_repeats_nothing(examples):
    """The journal of a stopped server: what it says was done was done, and what it accepted it knows."""
    settings(max_examples=examples, deadline=None)(given(traffic(), st.integers(0, 30))(answers_for_all))()


def answers_for_all(posts, stop_after):
    async def run():
        engine, store, journal = Engine(), FutureStore(), Journal(None)
        queue = CommandQueue(store, journal, gap_seconds=0.002)
        futures = {}
        for n, post in enumerate(posts):
            if n == stop_after:
                break
            if post is None:
                await asyncio.sleep(0.004)
            else:
                futures[post.model, post.seq] = queue.submit(post.model, post.seq, post.kind, engine.work(post))
        await asyncio.sleep(0)
        store.fail_pending(EngineError("stopped"))
        await queue.close()
        assert all(future.done for future in futures.values())
        assert len(engine.acted) == len(set(engine.acted))
        for (model, seq), future in futures.items():
            record = journal.command(model, seq)
            assert record.request_id == future.request_id
            if record.outcome is not None and record.outcome.error is None:
                assert (model, seq) in engine.acted

    asyncio.run(run())
