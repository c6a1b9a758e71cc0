"""verl's own replica (AsyncLLM, worker processes) as on GPUs, on logical ones: versions, turns, what is left."""

from __future__ import annotations

import asyncio
import os

import numerics
import numpy as np
import plain
import psutil
import pytest
import torch
from answers import PROMPT, check, check_interleaved, greedy
from live_engine import STOCK, STOCK_APART
from ray.util import placement_group_table

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import AdamParams, SampleRequest, SamplingParams
from verl_tinker.models import resolve_model

pytestmark = [pytest.mark.timeout(400), pytest.mark.full]


def test_versions_of_every_kind_in_one_batch_answer_with_their_own_weights(stock, tmp_path):
    check_interleaved(stock, tmp_path)


def test_several_samples_seeds_and_top_k(stock):
    ask = SampleRequest(PROMPT, 4, SamplingParams(max_tokens=8, temperature=1.0, seed=5, stop=[]), True, 5, 3)
    first, again = (stock.do(stock.engine.sample(stock.name, 0, ask)) for _ in range(2))
    assert [s.tokens.tolist() for s in first.sequences] == [s.tokens.tolist() for s in again.sequences]
    assert len({tuple(s.tokens) for s in first.sequences}) == 4
    logits = plain.load_model(stock.settings.model_folder)(torch.as_tensor(PROMPT[None].astype(np.int64))).logits[0]
    values, ids = torch.log_softmax(logits, -1)[:-1].topk(5)
    assert first.topk_prompt.ids[1:].tolist() == ids.tolist()
    np.testing.assert_allclose(first.topk_prompt.logprobs[1:], values.detach().numpy(), atol=1e-4)
    assert first.sequences[0].topk.ids.shape == (8, 3)


def test_a_refused_request_is_the_users_and_harms_no_other(stock):
    outside = SampleRequest(np.asarray([10**7], np.int32), 1, SamplingParams(max_tokens=2))
    with pytest.raises(UserError):
        stock.do(stock.engine.sample(stock.name, 0, outside))
    check(stock.do(stock.engine.sample(stock.name, 0, greedy())), 0, plain.load_model(stock.settings.model_folder))


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_training_and_sampling_take_turns_and_each_version_keeps_its_weights(stock, tmp_path, lora):
    """Both sides at once: every sample is of its version although the trainer has the memory in between."""
    engine, name = stock.engine, f"turns-{lora}"
    switches = []
    give = engine.turns._switch

    async def count(side):
        switches.append(side)
        await give(side)

    engine.turns._switch = count
    stock.do(engine.create_model(name, numerics.spec(engine, lora)))
    versions = [21, 22] if lora else [31, 32]
    data = numerics.batch(stock.settings.models[0].vocab_size, seed=7)

    async def train():
        for version in versions:
            await engine.forward_backward(name, data, "cross_entropy", {}, True)
            await engine.optim_step(name, AdamParams(learning_rate=1e-2))
            folder = tmp_path / str(version)
            folder.mkdir()
            await engine.export_sampler(name, folder)
            await engine.load_version(version, stock.name, folder)

    async def sample():
        return [await engine.sample(stock.name, 0, greedy()) for _ in range(6)]

    async def both():
        return (await asyncio.gather(sample(), train()))[0]

    answers = stock.do(both())
    base = plain.load_model(stock.settings.model_folder)
    for answer in answers:
        check(answer, 0, base)
    for version in (*versions, *reversed(versions)):
        folder = tmp_path / str(version)
        model = plain.PlainRun(stock.settings.model_folder, folder).model if lora else plain.load_model(folder)
        check(stock.do(engine.sample(stock.name, version, greedy())), version, model)
    assert "training" in switches and "sampling" in switches
    engine.turns._switch = give
    stock.do(engine.drop_model(name))
    for version in versions:
        stock.do(engine.retire_version(version))


def test_closing_leaves_no_process_and_no_shared_memory(engines, stock):
    members = set(psutil.Process().children(recursive=True)) - engines.others
    names = " ".join(" ".join(p.cmdline()) for p in members)
    assert "VersionServer" in names and "EngineCore" in names
    engines.close()
    _, alive = psutil.wait_procs(members, timeout=30)
    assert not alive, [p.cmdline()[:3] for p in alive]
    assert set(os.listdir("/dev/shm")) <= engines.memory


@pytest.mark.parametrize("shards, replicas", [(1, 2), (2, 1)], ids=["two replicas", "one replica on two workers"])
def test_two_workers_serve_as_two_replicas_or_as_one(engines, tmp_path, shards, replicas):
    live = engines.get(
        *STOCK, "trainer.n_gpus_per_node=2", "cpu.threads=1",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={shards}", replica="stock", takes_turns=True)
    assert len(live.engine.sampler.replicas.ranks) == replicas
    check_interleaved(live, tmp_path)


def test_a_sampler_and_a_teacher_have_gpus_of_their_own_and_outlive_the_death_of_vllm(engines, tmp_path):
    live = engines.get(*STOCK_APART, replica="stock")
    check_interleaved(live, tmp_path)
    taught = plain.load_model(resolve_model("bundled:tiny-tied"))
    check(live.do(live.engine.sample("teachers/t", 0, greedy())), 0, taught)
    cores = [p for p in psutil.Process().children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]
    assert len(cores) == 3
    # Trainer, sampler, and both replicas of the teacher in one, which keeps them on one node.
    placed = {len(place["bundles"]): place["strategy"] for place in placement_group_table().values() if place["state"] == "CREATED"}
    assert placed.keys() == {1, 2} and placed[2] == "STRICT_PACK"

    async def watch():
        # As the server does: a request that vLLM took in while it died is answered by nobody else.
        while True:
            await live.engine.check()
            await asyncio.sleep(1)

    async def kill():
        for core in cores:
            core.kill()
        watching = asyncio.create_task(watch())
        try:
            return await asyncio.gather(*(live.engine.sample(name, 0, greedy()) for name in (live.name, *["teachers/t"] * 4)))
        finally:
            watching.cancel()

    ours, *theirs = live.do(kill())
    check(ours, 0, plain.load_model(live.settings.model_folder))
    for answer in theirs:
        check(answer, 0, taught)
    engines.close()
    assert set(os.listdir("/dev/shm")) <= engines.memory
