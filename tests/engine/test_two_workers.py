"""The trainer on two ranks gives what it gives on one."""

from __future__ import annotations

import numerics
import pytest

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_training_on_two_ranks_equals_plain_torch(pair, tmp_path, lora):
    assert pair.do(numerics.gradient_gap(pair.engine, lora, tmp_path, f"g{lora}")) < 1e-5
    gaps = pair.do(numerics.training_gaps(pair.engine, lora, tmp_path, f"t{lora}"))
    assert gaps["weights after 3 AdamW steps"] < 1e-4, gaps


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resuming_on_two_ranks_is_exact(pair, tmp_path, lora):
    assert pair.do(numerics.resume_gap(pair.engine, lora, True, tmp_path)) == 0.0
