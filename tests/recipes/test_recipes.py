"""Unmodified cookbook recipes that teach SmolLM2 something, judged by their numbers; short forms, and full ones marked so."""

from __future__ import annotations

import math
import time

import numpy as np
import plain
import pytest
import torch
from recipe import Result
from reference import NATS, check_soft_targets
from wiretap import Wiretap

full = pytest.mark.full
# Small enough for a minute on two cores; the launcher's own sizes are the full form.
SMALL_RL = ["groups_per_batch=4", "group_size=4"]


@pytest.fixture(scope="module")
def trained(recipes):
    """A short run of chat_sl on additions."""
    return recipes.run("chat_sl", "max_steps=6", "batch_size=16", "save_every=3", timeout=240)


@pytest.fixture(scope="module")
def well_trained(recipes):
    return recipes.run("chat_sl", timeout=1200, label="chat_sl_full")


@pytest.mark.timeout(600)
def test_sft_then_rl_from_its_checkpoint_short(recipes, trained):
    losses = trained.series("train_mean_nll")
    assert len(losses) == 6 and losses[0] > 1.2 and min(losses[-2:]) < 0.75 * losses[0], losses
    assert {"000003", "final"} <= set(trained.checkpoints)
    check_rl(recipes.run("math_rl", "max_steps=2", *SMALL_RL, "save_every=0",
                         f"load_checkpoint_path={trained.state()}", timeout=240))


def check_rl(result, smallest_reward: float | None = None):
    gaps = result.series("optim/kl_sample_train_v1")
    assert gaps and max(map(abs, gaps[:1])) < 1e-3, gaps
    rewards = result.series("env/all/reward/total")
    assert len(rewards) >= len(gaps) and all(math.isfinite(r) for r in rewards)
    assert updates(result) == [1] * (len(gaps) - 1)
    if smallest_reward is not None:
        assert sum(rewards[-5:]) / 5 > smallest_reward, rewards


def updates(result) -> list[float]:
    """How often the weights changed from each step to the next."""
    return np.diff(result.series("weights_version")).tolist()


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
def test_sft_then_rl_from_its_checkpoint(recipes, well_trained):
    losses = well_trained.series("train_mean_nll")
    assert len(losses) == 30 and losses[0] > 1.2 and max(losses[-5:]) < 0.5, losses
    assert {"000010", "000020", "final"} <= set(well_trained.checkpoints)
    # The recipe's own default, and the loss that needs no record of what was sampled.
    for loss in ([], ["loss_fn=importance_sampling"]):
        check_rl(recipes.run("math_rl", f"load_checkpoint_path={well_trained.state()}", *loss, timeout=1200,
                             label="_".join(["math_rl_full", *loss])), smallest_reward=0.3)


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


def check_async(recipes, trained, *flags, steps: int, label: str):
    """Runs 3, ahead of its training: every sample is by the weights that were the newest when its rollout began."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("math_rl", "max_steps_off_policy=2", f"max_steps={steps}", "save_every=1", *flags,
                             f"load_checkpoint_path={trained.state()}", timeout=1200, label=label, url=tap.url)
    assert result.series("async/staleness_mean") == [min(step, 2) for step in range(steps)]
    assert updates(result) == [1] * (steps - 1)
    assert abs(result.series("optim/kl_sample_train_v1")[0]) < 1e-3
    # What is trained two versions later is not what it was when it was drawn.
    assert min(result.series("optim/kl_sample_train_v2")[2:]) > 1e-7
    samplers = [result.sampler(f"{step:06d}") for step in range(steps - 2)]
    for sampler in samplers:
        drawn = tap.samples_of(sampler)
        assert drawn
        recipes.reference.assert_drew(sampler, drawn[:3])
    with pytest.raises(AssertionError):
        recipes.reference.assert_drew(samplers[0], tap.samples_of(samplers[-1]))


@pytest.mark.timeout(400)
def test_async_rl_short(recipes, trained):
    check_async(recipes, trained, *SMALL_RL, steps=4, label="async_short")


@full
@pytest.mark.timeout(1500)
def test_async_rl(recipes, well_trained):
    check_async(recipes, well_trained, steps=6, label="async_full")


def check_substeps(recipes, trained, *flags, steps: int, label: str):
    """Run 3 with two updates a batch and its weights scored afterwards."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("math_rl", "loss_fn=ppo", "num_substeps=2", "compute_post_kl=True", f"max_steps={steps}",
                             "save_every=1", *flags, f"load_checkpoint_path={trained.state()}", timeout=1200, label=label,
                             url=tap.url)
    assert updates(result) == [2] * (steps - 1)
    calls = tap.to("forward_backward")
    assert [call.request.loss_fn for call in calls] == ["ppo"] * 2 * steps
    # The second half of a batch meets the weights that the first one has moved, once there was anything to learn.
    advantages = [max(float(np.abs(datum["advantages"]).max()) for datum in call.data) for call in calls]
    moved = [any(advantages[: number + 1]) for number in range(0, len(calls), 2)]
    assert moved[-1]
    assert all(change(call) < NATS for call in calls[::2])
    assert [change(call) > NATS for call in calls[1::2]] == moved
    for call in calls:
        wanted = sum(plain.loss("ppo", torch.as_tensor(lp), inputs_of(datum), {}).item()
                     for lp, datum in zip(call.logprobs, call.data, strict=True))
        assert call.result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert max(result.series("kl_pre_post_v2")) > 1e-7
    for step in range(1, steps + 1):
        sampler = result.sampler(f"{step:06d}")
        scored = [call for call in tap.samples_of(sampler) if call.request.get("prompt_logprobs")]
        assert len(scored) == sum(len(call.data) for call in calls[2 * step - 2 : 2 * step])
        recipes.reference.assert_scored(sampler, scored[:3])


def change(call) -> float:
    """The largest distance of what the trainer says about sampled tokens from what the sampler said, in nats."""
    pairs = zip(call.logprobs, call.data, strict=True)
    return max(float(np.abs((lp - d["logprobs"])[d["logprobs"] != 0]).max()) for lp, d in pairs)


def inputs_of(datum) -> dict:
    return {name: array for name, array in datum.items() if name != "tokens"}


@pytest.mark.timeout(400)
def test_ppo_substeps_short(recipes, trained):
    check_substeps(recipes, trained, "groups_per_batch=8", "group_size=4", steps=2, label="substeps_short")


@full
@pytest.mark.timeout(1500)
def test_ppo_substeps(recipes, well_trained):
    check_substeps(recipes, well_trained, steps=3, label="substeps_full")


@pytest.mark.timeout(400)
def test_on_policy_distillation(recipes, trained):
    """A teacher that is the student itself teaches nothing; one that the student has left says by how much."""
    with Wiretap(recipes.url) as tap:
        same = recipes.run("distillation", timeout=200, url=tap.url)
    assert abs(same.series("teacher_kl")[0]) < NATS and same.series("env/all/total_ac_tokens")[0] > 32
    assert same.series("optim/entropy")[0] > 0.3
    teacher = tap.samples_of(None)
    assert len(teacher) == 16
    recipes.reference.assert_scored(None, teacher[:3])

    with Wiretap(recipes.url) as tap:
        moved = recipes.run("distillation", "max_steps=1", f"load_checkpoint_path={trained.state()}", timeout=200,
                            label="distillation_moved", url=tap.url)
    assert moved.series("teacher_kl")[0] > 0.05
    # On-policy the ratio is 1 and the advantage of a token is minus its part of the divergence.
    loss = tap.to("forward_backward")[0].result.metrics["loss:sum"]
    total = moved.series("teacher_kl")[0] * moved.series("env/all/total_ac_tokens")[0]
    assert loss == pytest.approx(total, rel=1e-3)


@pytest.mark.timeout(400)
def test_self_distillation(recipes):
    """Top-K targets of a teacher that has read the answer."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("sdft", timeout=350, url=tap.url)
    teacher, calls = tap.samples_of(None), tap.to("forward_backward")
    assert len(teacher) == 4 and len(calls) == 2 and updates(result) == [1]
    recipes.reference.assert_ranked(None, teacher)
    for call, entropy, tokens in zip(calls, result.series("sdft/mean_teacher_entropy"),
                                     result.series("sdft/total_completion_tokens"), strict=True):
        loss = check_soft_targets(call)
        assert call.result.metrics["loss:sum"] == pytest.approx(loss, rel=1e-4)
        weights = np.concatenate([datum["weights"].ravel() for datum in call.data]).astype(np.float64)
        weights = weights[weights > 0]
        assert -(weights * np.log(weights)).sum() == pytest.approx(entropy * tokens, rel=1e-4)
    check_student(recipes, calls[0], None)


@pytest.mark.full
@pytest.mark.timeout(400)
def test_reverse_self_distillation(recipes):
    """The same by a custom loss, and with a teacher that becomes the student of the last step."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("sdft", "reverse=True", "teacher_sync_every=1", timeout=350, label="sdft_reverse", url=tap.url)
    assert updates(result) == [1]
    assert result.series("sdft/reverse_kl_positions") == result.series("sdft/total_completion_positions")
    assert 0 < min(result.series("sdft/reverse_kl_mean"))
    assert max(result.series("sdft/student_entropy_mean")) < math.log(20)

    synced = next(call.result["path"] for call in tap.to("save_weights_for_sampler")
                  if call.request.get("path") == "teacher_sync_1")
    teachers = {None: tap.samples_of(None), synced: tap.samples_of(synced)}
    forwards = [call for call in tap.to("forward_backward") if call.request.forward_only]
    backwards = [call for call in tap.to("forward_backward") if not call.request.forward_only]
    assert len(forwards) == len(backwards) == 2
    for weights, forward in zip(teachers, forwards, strict=True):
        assert len(teachers[weights]) == 2
        recipes.reference.assert_ranked(weights, teachers[weights])
        check_soft_targets(forward)
        check_student(recipes, forward, weights)
    with pytest.raises(AssertionError):
        recipes.reference.assert_ranked(None, teachers[synced])
    for forward, backward, surrogate in zip(forwards, backwards, result.series("surrogate_loss:sum"), strict=True):
        gradient = [datum["weights"] for datum in backward.data]
        wanted = -sum(float((w * lp).sum()) for w, lp in zip(gradient, forward.logprobs, strict=True))
        assert backward.result.metrics["loss:sum"] == surrogate == pytest.approx(wanted, abs=1e-4, rel=1e-4)


def check_student(recipes, call, sampler: str | None):
    for datum, logprobs in zip(call.data, call.logprobs, strict=True):
        np.testing.assert_allclose(logprobs, recipes.reference.trained(sampler, datum), atol=NATS, rtol=0)


@pytest.mark.timeout(400)
def test_reasoning_traces_by_supervised_training(recipes):
    with Wiretap(recipes.url) as tap:
        result = recipes.run("off_policy_reasoning", timeout=350, url=tap.url)
    call, nll = tap.to("forward_backward")[0], result.series("train_mean_nll")
    assert len(call.data) == 4 and len(nll) == 4 and nll[-1] < nll[0]
    lost = 0.0
    for datum, logprobs in zip(call.data, call.logprobs, strict=True):
        known = recipes.reference.trained(None, datum)
        np.testing.assert_allclose(logprobs, known, atol=NATS, rtol=0)
        lost -= float(datum["weights"] @ known)
        # The recipe's loss is a mean over the tokens of each trace.
        assert datum["weights"].sum() == pytest.approx(1, abs=1e-5) and (datum["weights"] > 0).sum() > 50
    assert nll[0] == pytest.approx(lost / 4, abs=NATS)
    assert call.result.metrics["loss:sum"] == pytest.approx(lost, rel=1e-4)


@full
@pytest.mark.timeout(900)
def test_rl_loop(recipes):
    """Sums small enough that the example's own answer is right now and then: rewards differ, so there is something to learn."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("rl_loop", "max_steps=3", timeout=850, url=tap.url)
    rewards, calls = result.series("reward/total"), tap.to("forward_backward")
    assert len(rewards) == 3 and any(0 < reward < 1 for reward in rewards) and calls
    for call in calls:
        assert call.request.loss_fn == "stable_reinforce"
        wanted = sum(plain.loss("stable_reinforce", torch.as_tensor(lp), inputs_of(datum), {"kl_coeff": 0.0}).item()
                     for lp, datum in zip(call.logprobs, call.data, strict=True))
        assert call.result.metrics["loss:sum"] == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert change(calls[0]) < NATS


PAIR = {
    "narrow": ["dataset=arith_sft.jsonl", "batch_size=8", "max_length=128"],
    "wide": ["dataset=chats.jsonl", "batch_size=6", "max_length=256"],
}


def start_again(recipes, name: str, state: str, label: str):
    return recipes.start("chat_sl", *PAIR[name], "max_steps=4", "save_every=0", f"load_checkpoint_path={state}",
                         label=f"{name}_{label}")


@full
@pytest.mark.timeout(900)
def test_two_recipes_at_once_are_each_as_if_alone(recipes):
    """Two ranks, two data sets. They start from states, because the recipe has no flag for the seed of an adapter."""
    begun = {name: recipes.start("chat_sl", *PAIR[name], "max_steps=1", "save_every=0", f"lora_rank={rank}",
                                 label=f"{name}_begun")
             for name, rank in (("narrow", 8), ("wide", 32))}
    states = {name: Result.read(run.finish(200)).state() for name, run in begun.items()}
    alone = {name: Result.read(start_again(recipes, name, states[name], "alone").finish(200)) for name in PAIR}

    runs = {name: start_again(recipes, name, states[name], "beside") for name in PAIR}
    spans = watch(runs, steps=4)
    beside = {name: Result.read(run.finish(200)) for name, run in runs.items()}
    assert max(first for first, _ in spans.values()) < min(last for _, last in spans.values()), spans
    for name in PAIR:
        curve = alone[name].series("train_mean_nll")
        assert len(curve) == 4 and max(curve) - min(curve) > 0.05
        np.testing.assert_allclose(beside[name].series("train_mean_nll"), curve, atol=NATS, rtol=0)


def watch(runs: dict, steps: int) -> dict[str, tuple[float, float]]:
    """When each run had its first and its last step."""
    seen: dict[str, dict[int, float]] = {name: {} for name in runs}
    while any(run.process.poll() is None and steps not in seen[name] for name, run in runs.items()):
        for name, run in runs.items():
            seen[name].setdefault(run.steps(), time.monotonic())
        time.sleep(0.1)
    return {name: (min(t for n, t in times.items() if n), max(times.values())) for name, times in seen.items()}
