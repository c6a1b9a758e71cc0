"""A Ray cluster that was there before, of two nodes, one of which is lost; and clusters that lack something."""

from __future__ import annotations

import asyncio
import time

import numerics
import numpy as np
import plain
import pytest
import ray
from answers import PROMPT, check, greedy
from live_engine import TWO_SAMPLERS, Live
from ray_nodes import Nodes

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import AdamParams, SampleRequest, SamplingParams
from verl_tinker.engine import nodes

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def there(engines):
    """A cluster of one node with three processors."""
    # A process can be in one Ray cluster only.
    engines.close()
    cluster = Nodes(cpus=3)
    yield cluster
    cluster.close()


def where(live) -> list[str]:
    """The node of each sampler, by rank."""
    handles = [place.replica.server_handle for place in live.engine.sampler.replicas.places]
    return ray.get([handle.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for handle in handles])


def alive() -> list[dict]:
    return [node for node in ray.nodes() if node["Alive"]]


@pytest.mark.full
def test_a_node_with_a_sampler_is_lost_and_no_request(there, tmp_path):
    second = there.add(cpus=1)
    live = Live([*TWO_SAMPLERS, f"server.ray_address={there.address}"], tmp_path)
    phases = []
    try:
        live.do(live.engine.start(phases.append))
        assert len(alive()) == 2 and len(set(where(live))) == 2
        long = [SampleRequest(PROMPT, 1, SamplingParams(max_tokens=1000, stop=[], seed=n), affinity=str(n)) for n in range(12)]

        async def lose():
            waiting = [asyncio.create_task(live.engine.sample(live.name, 0, request)) for request in long]
            await asyncio.sleep(0.2)
            await asyncio.to_thread(there.kill, second)
            answers = await asyncio.gather(*waiting)
            # Those that were fast enough had their answer before the sampler on the lost node died.
            while len(alive()) == 2 or not any(p.replacement for p in live.engine.sampler.replicas.places):
                await live.engine.check()
                await asyncio.sleep(0.2)
            await asyncio.gather(*(p.replacement for p in live.engine.sampler.replicas.places if p.replacement))
            return answers

        answers = live.do(lose())
        assert [len(answer.sequences[0].tokens) for answer in answers] == [1000] * 12
        assert len(set(where(live))) == 1
        model = plain.load_model(live.settings.model_folder)
        for rank in (0, 1):
            check(live.do(live.engine.sampler.replicas.ask(rank, "sample", greedy(), 0)), 0, model)
        live.do(live.engine.create_model("r", numerics.spec(live.engine, True, 8)))
        data = numerics.batch(live.settings.models[0].vocab_size, seed=3)
        losses = live.do(live.engine.forward_backward("r", data, "cross_entropy", {}, True)).losses
        assert np.isfinite(losses).all()
    finally:
        live.close()
    # What was here before stays: the cluster, with all that it had.
    ray.init(address=there.address, log_to_driver=False, configure_logging=False)
    try:
        deadline = time.monotonic() + 60
        while ray.available_resources().get("CPU") != 3 and time.monotonic() < deadline:
            time.sleep(0.2)
        assert ray.available_resources()["CPU"] == 3 and not ray.util.placement_group_table() or all(
            group["state"] == "REMOVED" for group in ray.util.placement_group_table().values())
    finally:
        ray.shutdown()


async def start_late(live, there, words: str) -> None:
    """Start the engine, which waits in these words until there is one more node."""
    phases: list[str] = []
    starting = asyncio.create_task(live.engine.start(phases.append))
    while not any(words in phase for phase in phases):
        assert not starting.done(), (phases, await starting)
        await asyncio.sleep(0.1)
    there.add(cpus=1)
    await starting


@pytest.mark.full
def test_a_cluster_that_lacks_a_node_is_waited_for(there, tmp_path):
    live = Live([*TWO_SAMPLERS, f"server.ray_address={there.address}", "trainer.n_gpus_per_node=2"], tmp_path)
    try:
        live.do(start_late(live, there, "trainer (2), sampler (2) are 4 GPUs, and 1 node of 3 have 3"))
        check(live.do(live.engine.sample(live.name, 0, greedy())), 0, plain.load_model(live.settings.model_folder))
    finally:
        live.close()


@pytest.mark.full
def test_a_rank_on_a_lost_node_ends_what_waits_and_comes_back_with_the_node(engines, tmp_path):
    engines.close()
    there = Nodes(cpus=1)
    second = there.add(cpus=1)
    live = Live([f"server.ray_address={there.address}", "trainer.nnodes=2", "cpu.threads=1",
                 "actor_rollout_ref.rollout.name=null"], tmp_path, rollout=False)
    data = numerics.batch(live.settings.models[0].vocab_size, seed=3)
    saved = tmp_path / "saved"
    saved.mkdir()

    async def train(run: str):
        return (await live.engine.forward_backward(run, data, "cross_entropy", {}, True)).losses

    async def before():
        await live.engine.create_model("r", numerics.spec(live.engine, True, 8))
        await train("r")
        await live.engine.optim_step("r", AdamParams(learning_rate=1e-2))
        await live.engine.save_state("r", saved)
        return await train("r")

    async def lose():
        waiting = asyncio.create_task(live.engine.forward_backward("r", data * 64, "cross_entropy", {}, True))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(there.kill, second)
        with pytest.raises(EngineError, match="died|did not answer"):
            await waiting
        with pytest.raises(EngineError):
            for _ in range(20):
                await live.engine.check()
                await asyncio.sleep(0.5)

    async def after():
        await live.engine.create_model("again", numerics.spec(live.engine, True, 8))
        await live.engine.load_state("again", saved, optimizer=True)
        return await train("again")

    try:
        live.start()
        wanted = live.do(before())
        live.do(lose())
        live.do(live.engine.close())
        live.do(start_late(live, there, "trainer (2) are 2 GPUs, and 1 node of 1 have 1"))
        np.testing.assert_array_equal(live.do(after()), wanted)
    finally:
        live.close()
        there.close()


def test_a_node_with_other_packages_is_named(there, monkeypatch):
    ray.init(address=there.address, log_to_driver=False, configure_logging=False)
    try:
        nodes.check_packages()
        here = nodes.installed()
        # The task that asks the node is pickled by reference, so only this side sees the change.
        monkeypatch.setattr(nodes, "version", lambda name: "0.0.1" if name == "verl" else here[name])
        with pytest.raises(EngineError, match=rf"has verl {here['verl']}, this machine 0.0.1; run install_verl.sh"):
            nodes.check_packages()
    finally:
        ray.shutdown()
