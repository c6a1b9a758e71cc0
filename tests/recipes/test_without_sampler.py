"""The workload for a server that trains and does not sample."""

from __future__ import annotations

import pytest
from workload import run_workload

from verl_tinker.models import resolve_model

MODEL = "bundled:tiny"
SETTINGS = ("actor_rollout_ref.rollout.name=null",)


@pytest.mark.timeout(400)
def test_sft_norobot_no_rollout(recipes):
    flags = ["learning_rate=3e-3", "max_steps=12"]
    code, output = run_workload(recipes, resolve_model(MODEL), "sft_norobot_no_rollout", *flags, timeout=300)
    assert code == 0 and "sft_norobot_no_rollout: OK: train_mean_nll fell " in output, output[-3000:]


@pytest.mark.timeout(400)
def test_a_recipe_that_samples_is_told_that_the_server_trains_only(recipes):
    code, output = run_workload(recipes, resolve_model(MODEL), "rl_gsm8k", "max_steps=1", timeout=300)
    assert code == 1 and "is served for training only, by this server's preset" in output, output[-3000:]
