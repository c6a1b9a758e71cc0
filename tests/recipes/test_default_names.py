"""Recipes under the model names that they have in their code, on a tiny random model behind those names.

They show the wiring: stages, sessions, turns, paths. A random model earns no reward, so the RL here has no advantage to
train on.
"""

from __future__ import annotations

import numpy as np
import pytest
from recipe import Result
from reference import NATS
from safetensors.numpy import load_file
from wiretap import Wiretap

MODEL = "bundled:tiny"
RL_RATE, SFT_RATE = 1e-5, 2e-4


def adapter(recipes, sampler: str) -> dict[str, np.ndarray]:
    return load_file(recipes.reference.folder(sampler) / "adapter_model.safetensors")


def largest(tensors: dict[str, np.ndarray], part: str = "lora_B") -> float:
    return max(float(np.abs(tensor).max()) for name, tensor in tensors.items() if part in name)


def difference(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> float:
    assert one.keys() == other.keys()
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def check_first_loss(recipes, tap, result) -> None:
    """The first NLL that a recipe logs is that of the base model on what it sent."""
    data = tap.to("forward_backward")[0].data
    weights = [datum["weights"] for datum in data]
    logprobs = [recipes.reference.trained(None, datum) for datum in data]
    nll = -sum(float(w @ lp) for w, lp in zip(weights, logprobs, strict=True)) / sum(w.sum() for w in weights)
    assert result.series("train_mean_nll")[0] == pytest.approx(nll, abs=NATS)


@pytest.mark.timeout(400)
def test_rlhf_pipeline(recipes):
    """Three stages in one process: the last one trains the first one's state by the second one's judgement."""
    with Wiretap(recipes.url) as tap:
        logs = recipes.start("rlhf", url=tap.url).finish(350) / "rlhf-t"
    sft, reward, rl = (Result.read(logs / stage) for stage in ("sft", "rm", "rl"))
    check_first_loss(recipes, tap, sft)

    loads = [call.request["path"] for call in tap.to("load_weights")]
    assert loads == [sft.state()]
    judged = tap.samples_of(reward.sampler())
    # Four groups of two answers, each pair judged both ways around.
    assert len(judged) == 8 and all(len(call.result.sequences[0].tokens) == 1 for call in judged)
    opened = next(c for c in tap.to("create_sampling_session") if c.request.get("model_path") == reward.sampler())
    sessions = [stage.state().removeprefix("tinker://").partition(":")[0] for stage in (sft, reward, rl)]
    assert len(set(sessions)) == 3 and opened.request["session_id"] != sessions[1]

    begun, ended = adapter(recipes, sft.sampler()), adapter(recipes, rl.sampler())
    assert largest(begun) > SFT_RATE / 2
    # One step of Adam moves no weight by more than the learning rate, so what it began with was the SFT's state.
    assert difference(begun, ended) <= 1.01 * RL_RATE
    assert abs(rl.series("optim/kl_sample_train_v1")[0]) < NATS and rl.series("env/all/total_ac_tokens")[0] > 8


@pytest.mark.timeout(300)
def test_sl_loop(recipes):
    with Wiretap(recipes.url) as tap:
        result = recipes.run("sl_loop", timeout=250, url=tap.url)
    check_first_loss(recipes, tap, result)
    assert result.series("weights_version") == [2, 3, 4] and len(result.series("train_mean_nll")) == 3


@pytest.mark.timeout(300)
def test_rl_loop_without_a_reward(recipes):
    """Equal rewards have the recipe skip its training, so this shows the sampling and the saving alone; the full form of
    test_recipes.py trains.
    """
    with Wiretap(recipes.url) as tap:
        result = recipes.run("rl_loop", "max_tokens=16", timeout=250, url=tap.url)
    assert result.series("reward/total") == [0, 0] and not tap.to("forward_backward")
    drawn = tap.to("asample")
    assert len(drawn) == 8 and all(len(call.result.sequences) == 8 for call in drawn)
    assert all(call.request["record_stability_info"] for call in drawn)
    # Nothing was trained, so the samplers are the base model.
    recipes.reference.assert_drew(None, drawn[::4])
    assert largest(adapter(recipes, result.sampler())) == 0


@pytest.mark.timeout(300)
def test_guess_number(recipes):
    """Ten turns of one growing conversation: the trainer must read it as the sampler wrote it."""
    result = recipes.run("guess_number", timeout=250)
    assert result.series("env/all/turns_per_episode") == [10, 10] and result.series("env/all/reward/total") == [-10, -10]
    assert max(result.series("optim/kl_sample_train_v2")) < NATS**2
    # Equal rewards are no advantage at all: nothing may have moved.
    assert largest(adapter(recipes, result.sampler())) == 0


@pytest.mark.timeout(300)
def test_twenty_questions(recipes):
    """The base model answers the questions of the run that is trained."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("twenty_questions", "max_steps=1", timeout=250, url=tap.url)
    assert result.series("env/all/turns_per_episode") == [20]
    answers = tap.samples_of(None)
    assert len(answers) == sum(result.series("env/all/total_turns"))
    recipes.reference.assert_drew(None, answers[:3])
    assert max(result.series("optim/kl_sample_train_v2")) < NATS**2
