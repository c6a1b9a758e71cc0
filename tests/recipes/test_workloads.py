"""The nine workloads by run_single_test.py, on tiny models behind the names of configs/distill/cpu.yaml.

The teacher of the first name has the student's weights here as well, and that of the second one others.
"""

from __future__ import annotations

import pytest
from workload import run_workload

from verl_tinker.models import resolve_model

PRESET, MODEL = "configs/distill/cpu.yaml", "bundled:tiny"
SETTINGS = ("distillation.teacher_models.smollm2.model_path=bundled:tiny",
            "distillation.teacher_models.tiny.model_path=bundled:tiny-tied")
# What random weights need to show by a number what trained ones show with the workload's own settings.
FLAGS = {
    "sft_tulu3": ["learning_rate=3e-3", "max_steps=12"],
    "sft_norobot": ["learning_rate=3e-3", "max_steps=12"],
    "sft_norobot_no_rollout": ["learning_rate=3e-3", "max_steps=12"],
}
# Full fine-tuning first: it wants the workers to itself, and distillation leaves its session open when it exits.
NAMES = ["sft_tulu3", "sft_norobot", "sft_norobot_no_rollout", "rl_gsm8k", "sft_rl_gsm8k", "sdft_single_task",
         "topk_distillation", "opd_deepmath", "opd_multi_teacher"]
SHORT = {"rl_gsm8k", "opd_multi_teacher"}


@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else pytest.mark.full) for n in NAMES])
def test_workload(recipes, name):
    code, output = run_workload(recipes, resolve_model(MODEL), name, *FLAGS.get(name, []), timeout=300)
    verdict = output.rstrip().rpartition("\n")[2]
    assert code == 0 and verdict.startswith(f"{name}: OK: "), output[-3000:]


@pytest.mark.timeout(400)
def test_a_number_that_does_not_hold_fails_the_workload(recipes):
    """The other teacher is not the student, so its divergence is not 0."""
    code, output = run_workload(recipes, resolve_model(MODEL), "opd_deepmath", "teacher_model=teachers/tiny", "max_steps=1",
                                label="_wrong", timeout=300)
    assert code == 1 and "opd_deepmath: FAILED: opd: teacher_kl begins with " in output, output[-3000:]


@pytest.mark.timeout(400)
def test_a_recipe_that_fails_fails_the_workload(recipes):
    code, output = run_workload(recipes, resolve_model(MODEL), "opd_deepmath", "teacher_model=teachers/none", "max_steps=1",
                                label="_unknown", timeout=300)
    assert code == 1 and "opd_deepmath: FAILED: opd ended with status " in output, output[-3000:]
