"""The trainer on two ranks gives what it gives on one."""

from __future__ import annotations

from pathlib import Path

import numerics
import numpy as np
import pytest

from verl_tinker.core.errors import EngineError
from verl_tinker.engine import trainer

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_training_on_two_ranks_equals_plain_torch(pair, tmp_path, lora):
    assert pair.do(numerics.gradient_gap(pair.engine, lora, tmp_path, f"g{lora}")) < 1e-5
    gaps = pair.do(numerics.training_gaps(pair.engine, lora, tmp_path, f"t{lora}"))
    assert gaps["weights after 3 AdamW steps"] < 1e-4 and gaps["update norm, relative"] < 1e-4, gaps


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_resuming_on_two_ranks_is_exact(pair, tmp_path, lora):
    assert pair.do(numerics.resume_gap(pair.engine, lora, True, tmp_path)) == 0.0


def test_a_failure_of_one_rank_alone_is_reported_and_asks_for_a_new_start(pair, monkeypatch):
    data = numerics.batch(pair.settings.models[0].vocab_size, lengths=(9, 9), seed=3)
    data[1].inputs["target_tokens"] = np.full(9, 10**9)
    pair.do(pair.engine.create_model("half", numerics.spec(pair.engine, True)))
    monkeypatch.setattr(trainer, "_REGROUP_SECONDS", 10.0)
    with pytest.raises(EngineError, match="the trainer failed in _run_batch"):
        pair.do(pair.engine.forward_backward("half", data, "cross_entropy", {}, True))
    with pytest.raises(EngineError, match="the trainer did not answer ping within 10 s"):
        pair.do(pair.engine.check())
    pair.do(pair.engine.close())
    pair.do(pair.engine.start(lambda phase: None))
    assert pair.do(numerics.gradient_gap(pair.engine, True, Path(pair.settings.work_folder), "after")) < 1e-5
