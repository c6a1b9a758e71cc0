"""The nine workloads by run_single_test.py with their own settings for a machine without a GPU, on SmolLM2."""

from __future__ import annotations

import pytest
from workload import run_workload
from workloads import WORKLOADS

from verl_tinker.models import resolve_model

pytestmark = pytest.mark.full
PRESET, MODEL = "configs/distill/cpu.yaml", "bundled:smollm2"
# Full fine-tuning first: it wants the workers to itself, and distillation leaves its session open when it exits.
NAMES = sorted(WORKLOADS, key=lambda name: not name.startswith(("sft_tulu3", "sft_norobot")))


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("name", NAMES)
def test_workload(recipes, name):
    code, output = run_workload(recipes, resolve_model(MODEL), name, timeout=1400)
    assert code == 0 and output.rstrip().rpartition("\n")[2].startswith(f"{name}: OK: "), output[-3000:]
