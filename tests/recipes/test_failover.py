"""An RL recipe on two trainer workers and two samplers, one of which is killed in the middle."""

from __future__ import annotations

import time

import httpx
import psutil
import pytest
import run as launcher
from real_server import start_server, stop_server
from recipe import Recipes, Result
from reference import NATS, Reference

from verl_tinker.models import resolve_model

pytestmark = pytest.mark.timeout(400)
SHAPE = ["server.model_path=bundled:tiny", "trainer.n_gpus_per_node=2", "actor_rollout_ref.rollout.nnodes=1",
         "actor_rollout_ref.rollout.n_gpus_per_node=2", "cpu.threads=1"]
STEPS = 6


@pytest.fixture
def served(tmp_path):
    process, url = start_server(tmp_path, *SHAPE)
    weights = resolve_model("bundled:tiny")
    launcher.prepare_folder(tmp_path / "work", weights)
    try:
        yield process, Recipes(url, tmp_path, Reference(weights, tmp_path / "checkpoints"))
    finally:
        code = stop_server(process)
    assert code == 0, (tmp_path / "server.log").read_text()[-3000:]


def workers(process, name: str) -> list[psutil.Process]:
    return [p for p in psutil.Process(process.pid).children(recursive=True) if name in (p.cmdline() or [""])[0]]


@pytest.mark.full
def test_a_recipe_does_not_notice_the_death_of_a_sampler(served):
    process, recipes = served
    assert len(workers(process, "TinkerWorker")) == 2 and len(workers(process, "ray::SamplerServer")) == 2
    running = recipes.start("shorter", f"max_steps={STEPS}", "batch_size=4", "group_size=4", "max_tokens=24")
    while running.steps() < 2 and running.process.poll() is None:
        time.sleep(0.05)
    workers(process, "ray::SamplerServer")[0].kill()
    result = Result.read(running.finish(300))
    assert httpx.get(f"{recipes.url}/api/v1/healthz").json() == {"status": "ok", "phase": "ready"}
    assert result.series("weights_version") == list(range(2, STEPS + 2))
    gaps = result.series("optim/kl_sample_train_v1")
    assert len(gaps) == STEPS and max(map(abs, gaps)) < NATS, gaps
    # Every group of every step was sampled in full.
    assert result.series("env/all/total_episodes") == [16] * STEPS, result.metrics[0]
    assert max(map(abs, result.series("kl_pre_post_v1"))) > 1e-7
    log = recipes.folder / "server.log"
    deadline = time.monotonic() + 120
    while "answers again" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert log.read_text().count("it is started again") == log.read_text().count("answers again") == 1
    assert len(workers(process, "ray::SamplerServer")) == 2
