"""Distillation recipes, unmodified, with the frozen teachers of configs/distill/cpu.yaml: one that is what the student is
before it learns, and a random one. Their numbers are compared with plain transformers on the teachers' own folders.
"""

from __future__ import annotations

import numpy as np
import pytest
from reference import NATS, Reference, check_soft_targets
from run import MODEL as STUDENT
from run import TEACHER, TINY_TEACHER
from wiretap import Call, Wiretap

from verl_tinker.models import resolve_model

PRESET, MODEL = "configs/distill/cpu.yaml", "bundled:smollm2"
# Three samplers, the trainer and the tests' own models share the machine.
SETTINGS = tuple(f"{rollout}.max_num_batched_tokens=1024" for rollout in (
    "actor_rollout_ref.rollout", "distillation.teacher_models.smollm2.inference", "distillation.teacher_models.tiny.inference"))


@pytest.fixture(scope="module")
def teachers(recipes) -> dict[str, Reference]:
    tiny = Reference(resolve_model("bundled:tiny"), recipes.folder / "checkpoints")
    return {TEACHER: recipes.reference, TINY_TEACHER: tiny}


def divergence(teacher: Reference, data: list[dict[str, np.ndarray]]) -> float:
    """The mean over all sampled tokens of how much likelier the student found them than the teacher does, in nats."""
    drawn = [datum["logprobs"] != 0 for datum in data]
    gaps = [(datum["logprobs"] - teacher.trained(None, datum))[at] for datum, at in zip(data, drawn, strict=True)]
    return float(np.concatenate(gaps).mean())


def scored_by(tap: Wiretap, name: str, call: Call) -> list[dict[str, np.ndarray]]:
    """Those datums of a training call whose whole sequence a teacher was asked about."""
    asked = {tuple(sample.prompt.tolist()) for sample in tap.samples_of(None, name)}
    return [datum for datum in call.data if (*datum["tokens"].tolist(), int(datum["target_tokens"][-1])) in asked]


@pytest.mark.timeout(400)
def test_a_teacher_that_is_the_student_teaches_nothing(recipes, teachers):
    with Wiretap(recipes.url) as tap:
        result = recipes.run("distillation", f"teacher_model={TEACHER}", timeout=350, label="same", url=tap.url)
    assert abs(result.series("teacher_kl")[0]) < NATS and len(result.series("teacher_kl")) == 2
    assert result.series("env/all/total_ac_tokens")[0] > 32 and result.series("optim/entropy")[0] > 0.3
    scored = tap.samples_of(None, TEACHER)
    # All samples of no saved weights went to the teacher: the trained model's own base was not asked.
    assert len(scored) == 16 and not tap.samples_of(None, STUDENT)
    teachers[TEACHER].assert_scored(None, scored[:3])


@pytest.mark.full
@pytest.mark.timeout(400)
def test_another_teacher_says_by_how_much_it_differs(recipes, teachers):
    with Wiretap(recipes.url) as tap:
        result = recipes.run("distillation", f"teacher_model={TINY_TEACHER}", "max_steps=1", timeout=350, label="other",
                             url=tap.url)
    teachers[TINY_TEACHER].assert_scored(None, tap.samples_of(None, TINY_TEACHER))
    call = tap.to("forward_backward")[0]
    wanted = divergence(teachers[TINY_TEACHER], call.data)
    assert wanted > 1 and result.series("teacher_kl")[0] == pytest.approx(wanted, abs=NATS)
    # On-policy the ratio is 1 and the advantage of a token is minus its part of the divergence.
    tokens = result.series("env/all/total_ac_tokens")[0]
    assert call.result.metrics["loss:sum"] == pytest.approx(wanted * tokens, rel=1e-3)


@pytest.mark.timeout(400)
def test_each_data_set_has_its_own_teacher(recipes, teachers):
    with Wiretap(recipes.url) as tap:
        result = recipes.run("multi_teacher", timeout=350, url=tap.url)
    calls = tap.to("forward_backward")
    assert len(calls) == 2 and abs(result.series("teacher_kl/dataset_0")[0]) < NATS
    for number, (name, teacher) in enumerate(teachers.items()):
        teacher.assert_scored(None, tap.samples_of(None, name)[:3])
        found = result.series(f"teacher_kl/dataset_{number}")
        assert len(found) == 2
        for call, value in zip(calls, found, strict=True):
            data = scored_by(tap, name, call)
            assert len(data) == 4 and value == pytest.approx(divergence(teacher, data), abs=NATS)
    assert min(result.series("teacher_kl/dataset_1")) > 1


@pytest.mark.full
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [TEACHER, TINY_TEACHER])
def test_soft_targets_of_a_teacher(recipes, teachers, name):
    """The loss of the first step from transformers alone: teacher's distribution over 20 tokens, student's logarithms."""
    with Wiretap(recipes.url) as tap:
        result = recipes.run("off_policy_topk", f"dataset_configs.0.teacher_config.base_model={name}", timeout=350,
                             label=name.replace("/", "_"), url=tap.url)
    losses, calls = result.series("train/loss:sum"), tap.to("forward_backward")
    teachers[name].assert_ranked(None, tap.samples_of(None, name))
    assert len(losses) == len(calls) == 2
    for call, loss in zip(calls, losses, strict=True):
        assert loss == pytest.approx(check_soft_targets(call), rel=1e-4)
    assert losses[0] == pytest.approx(sum(soft_loss(recipes, teachers[name], datum) for datum in calls[0].data), rel=1e-4)


def soft_loss(recipes, teacher: Reference, datum: dict[str, np.ndarray]) -> float:
    likely = np.exp(teacher.trained(None, datum).astype(np.float64))
    trained = datum["weights"].sum(1, keepdims=True) > 0
    return -float((likely / likely.sum(1, keepdims=True) * recipes.reference.trained(None, datum) * trained).sum())
