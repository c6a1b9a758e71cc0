"""Frozen models beside the trained one: each answers with its own weights, and one that dies comes back."""

from __future__ import annotations

import asyncio

import numpy as np
import plain
import psutil
import pytest
from answers import PROMPT, check, greedy
from live_engine import Live

from verl_tinker.core.types import SampleRequest, SamplingParams
from verl_tinker.models import resolve_model

pytestmark = pytest.mark.timeout(300)
TINY = ["server.model_path=bundled:tiny", "distillation.teacher_models.smollm2.model_path=bundled:tiny-tied", "cpu.threads=1",
        "distillation.teacher_models.tiny.inference.engine_kwargs.vllm.max_logprobs=20"]
TIED, UNTIED = "teachers/SmolLM2-135M-Instruct", "teachers/tiny"


@pytest.fixture(scope="module")
def taught(engines, tmp_path_factory):
    engines.close()
    live = Live(TINY, tmp_path_factory.mktemp("taught"), preset="configs/distill/cpu.yaml")
    live.start()
    yield live
    live.close()


def test_each_answers_with_its_own_weights_beside_the_trained_model(taught):
    models = {TIED: plain.load_model(resolve_model("bundled:tiny-tied")), UNTIED: plain.load_model(resolve_model("bundled:tiny"))}
    models |= {taught.name: models[UNTIED], "bundled:tiny-tied": models[TIED]}
    names = [*models] * 3

    async def ask():
        return await asyncio.gather(*(taught.engine.sample(name, 0, greedy()) for name in names))

    answers = taught.do(ask())
    for name, answer in zip(names, answers):
        check(answer, 0, models[name])
    assert not np.allclose(answers[0].prompt_logprobs[1:], answers[1].prompt_logprobs[1:], atol=0.1)


def test_they_are_listed_as_models_that_cannot_be_trained(taught):
    infos = {info.name: info for info in taught.engine.base_models()}
    assert infos[taught.name].trainable and infos[taught.name].max_topk == 128
    for name in (TIED, UNTIED):
        assert infos[name].sampleable and not infos[name].trainable
    assert infos[UNTIED].max_topk == 20
    assert infos[UNTIED].max_topk_key == "distillation.teacher_models.tiny.inference.engine_kwargs.vllm.max_logprobs"
    most = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=1), prompt_logprobs=True, topk_prompt_logprobs=20)
    assert taught.do(taught.engine.sample(UNTIED, 0, most)).topk_prompt.ids.shape == (len(PROMPT), 20)


def test_one_that_is_killed_comes_back_and_no_request_is_lost(taught):
    group = taught.engine.teachers.replicas[UNTIED]
    victim = psutil.Process(taught.do(group.ask(0, "ping")))
    long = SampleRequest(PROMPT, 1, SamplingParams(max_tokens=400, stop=[]))

    async def kill():
        waiting = [asyncio.create_task(taught.engine.sample(UNTIED, 0, long)) for _ in range(4)]
        beside = asyncio.create_task(taught.engine.sample(TIED, 0, long))
        await asyncio.sleep(0.2)
        victim.kill()
        return await asyncio.gather(beside, *waiting)

    assert [len(answer.sequences[0].tokens) for answer in taught.do(kill())] == [400] * 5
    taught.do(taught.engine.check())
    check(taught.do(taught.engine.sample(UNTIED, 0, greedy())), 0, plain.load_model(resolve_model("bundled:tiny")))
