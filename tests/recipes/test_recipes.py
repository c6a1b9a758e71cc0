"""Unmodified cookbook recipes on the real server, judged by their numbers; short forms, and full ones marked so."""

from __future__ import annotations

import math

import pytest

full = pytest.mark.full


def sft(recipes, *flags, timeout):
    return recipes.run("chat_sl", *flags, timeout=timeout)


# The recipe's own default, and the loss that needs no record of what was sampled.
RL_LOSSES = ("stable_reinforce", "importance_sampling")


@pytest.mark.timeout(600)
def test_sft_then_rl_from_its_checkpoint_short(recipes):
    trained = sft(recipes, "max_steps=6", "batch_size=16", "save_every=3", timeout=240)
    losses = trained.series("train_mean_nll")
    assert len(losses) == 6 and losses[0] > 1.2 and min(losses[-2:]) < 0.75 * losses[0], losses
    assert {"000003", "final"} <= set(trained.checkpoints)
    check_rl(recipes.run(
        "math_rl", "max_steps=2", "groups_per_batch=4", "group_size=4", "save_every=0",
        f"load_checkpoint_path={trained.checkpoints['final']['state_path']}", timeout=240))


def check_rl(result, smallest_reward: float | None = None):
    gaps = result.series("optim/kl_sample_train_v1")
    assert gaps and max(map(abs, gaps[:1])) < 1e-3, gaps
    rewards = result.series("env/all/reward/total")
    assert len(rewards) >= len(gaps) and all(math.isfinite(r) for r in rewards)
    if smallest_reward is not None:
        assert sum(rewards[-5:]) / 5 > smallest_reward, rewards


@pytest.mark.timeout(400)
def test_shorter_short(recipes):
    result = recipes.run("shorter", "max_steps=2", "batch_size=2", "max_tokens=32", timeout=350)
    gaps = result.series("optim/kl_sample_train_v1")
    assert abs(gaps[0]) < 1e-3, gaps
    tokens = result.series("env/all/ac_tokens_per_turn")
    assert len(tokens) >= 2 and 0 < tokens[0] <= 32
    # The second step samples from weights that the first one changed: trainer and sampler must still agree.
    assert abs(gaps[1]) < 1e-3 and abs(result.series("kl_pre_post_v1")[0]) > 1e-6


@pytest.mark.timeout(400)
def test_dpo_short(recipes):
    losses = recipes.run("dpo", "max_steps=2", "batch_size=4", "max_length=256", timeout=350).series("dpo_loss")
    assert losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[1] < losses[0], losses


@full
@pytest.mark.timeout(4000)
def test_sft_then_rl_from_its_checkpoint(recipes):
    trained = recipes.run("chat_sl", timeout=1200, label="chat_sl_full")
    losses = trained.series("train_mean_nll")
    assert len(losses) == 30 and losses[0] > 1.2 and max(losses[-5:]) < 0.5, losses
    assert {"000010", "000020", "final"} <= set(trained.checkpoints)
    for loss in RL_LOSSES:
        check_rl(recipes.run(
            "math_rl", f"load_checkpoint_path={trained.checkpoints['final']['state_path']}", f"loss_fn={loss}",
            timeout=1200, label=f"math_rl_full_{loss}"), smallest_reward=0.3)


@full
@pytest.mark.timeout(1500)
def test_shorter(recipes):
    result = recipes.run("shorter", timeout=1400, label="shorter_full")
    tokens = result.series("env/all/ac_tokens_per_turn")
    assert min(tokens[:9]) <= tokens[0] / 2, tokens
    assert abs(result.series("optim/kl_sample_train_v1")[0]) < 1e-3


@full
@pytest.mark.timeout(900)
def test_dpo(recipes):
    losses = recipes.run("dpo", timeout=800, label="dpo_full").series("dpo_loss")
    assert len(losses) == 4 and losses[0] == pytest.approx(math.log(2), abs=1e-3) and losses[-1] < losses[0], losses
