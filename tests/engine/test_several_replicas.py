"""Two samplers in processes of their own behind one name, of which one is killed in the middle."""

from __future__ import annotations

import asyncio
import os

import numerics
import numpy as np
import plain
import psutil
import pytest
from answers import PROMPT, check, check_interleaved, greedy
from live_engine import TWO_SAMPLERS

from verl_tinker.core.types import AdamParams, SampleRequest, SamplingParams

pytestmark = pytest.mark.timeout(300)


@pytest.fixture
def pair_of_samplers(engines):
    return engines.get(*TWO_SAMPLERS)


def samplers() -> list[psutil.Process]:
    return [p for p in psutil.Process().children(recursive=True) if "ray::SamplerServer" in " ".join(p.cmdline()[:1])]


def test_every_version_answers_from_both(pair_of_samplers, tmp_path):
    live = pair_of_samplers
    assert live.engine.sampler.replicas.ranks == [0, 1] and len(samplers()) == 2
    check_interleaved(live, tmp_path)
    # With different words for their sessions, requests are spread.
    prompts = [SampleRequest(PROMPT, 1, SamplingParams(max_tokens=1, stop=[]), affinity=str(n)) for n in range(32)]

    async def ask():
        tasks = [asyncio.create_task(live.engine.sample(live.name, 0, prompt)) for prompt in prompts]
        await asyncio.sleep(0)
        busy = [place.in_flight for place in live.engine.sampler.replicas.places]
        await asyncio.gather(*tasks)
        return busy

    assert min(live.do(ask())) >= 8


def test_one_is_killed_in_the_middle_and_nothing_is_lost(pair_of_samplers, tmp_path):
    """Samples of a version go on while its replica dies; its successor knows all versions and those made meanwhile."""
    live, engine = pair_of_samplers, pair_of_samplers.engine
    live.do(engine.create_model("killed", numerics.spec(engine, True, 8)))
    data = numerics.batch(live.settings.models[0].vocab_size, seed=3)

    async def train(version: int):
        await engine.forward_backward("killed", data, "cross_entropy", {}, True)
        await engine.optim_step("killed", AdamParams(learning_rate=1e-2))
        folder = tmp_path / str(version)
        folder.mkdir()
        await engine.export_sampler("killed", folder)
        await engine.load_version(version, live.name, folder)

    long = [SampleRequest(PROMPT, 1, SamplingParams(max_tokens=200, stop=[], seed=n), affinity=str(n)) for n in range(16)]

    told = [[] for _ in long]

    async def kill_in_the_middle():
        await train(501)
        # Half of them are told of their tokens as they are drawn.
        waiting = [asyncio.create_task(engine.sample(live.name, 501, request, told[i].append if i % 2 else None))
                   for i, request in enumerate(long)]
        await asyncio.sleep(0.2)
        os.kill(samplers()[0].pid, 9)
        await train(502)
        answers = await asyncio.gather(*waiting)
        places = engine.sampler.replicas.places
        await asyncio.gather(*(place.replacement for place in places if place.replacement is not None))
        return answers

    answers = live.do(kill_in_the_middle())
    assert [len(answer.sequences[0].tokens) for answer in answers] == [200] * 16
    assert {answer.version for answer in answers} == {501}
    for answer, parts in list(zip(answers, told))[1::2]:
        seen = np.concatenate([part.tokens for part in parts])
        assert len(seen) >= 190
        # Further on the two attempts may part, where two tokens were equally likely but for rounding.
        np.testing.assert_array_equal(seen[:20], answer.sequences[0].tokens[:20])
    assert sum(len(place.deaths) for place in engine.sampler.replicas.places) == 1
    assert engine.sampler.replicas.ranks == [0, 1]
    models = {0: plain.load_model(live.settings.model_folder)}
    models |= {v: plain.PlainRun(live.settings.model_folder, tmp_path / str(v)).model for v in (501, 502)}
    for rank in (0, 1):
        for version, model in models.items():
            check(live.do(engine.sampler.replicas.ask(rank, "sample", greedy(), version)), version, model)
    again = [live.do(engine.sample(live.name, 501, request)) for request in long[:4]]
    # The seed alone decides what is drawn, not the replica that draws.
    for first, second in zip(answers, again):
        np.testing.assert_array_equal(first.sequences[0].tokens[:20], second.sequences[0].tokens[:20])
    live.do(engine.drop_model("killed"))
    for version in (501, 502):
        live.do(engine.retire_version(version))
