"""The trainer on two ranks gives what it gives on one, whether they share the datums or each sequence."""

from __future__ import annotations

from pathlib import Path

import numerics
import numpy as np
import plain
import pytest
import torch

from verl_tinker.core.errors import EngineError
from verl_tinker.core.types import Datum
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


@pytest.mark.full
def test_ranks_that_each_hold_all_weights_count_once(engines, tmp_path):
    copies = engines.get("trainer.n_gpus_per_node=2", "cpu.threads=1", "actor_rollout_ref.actor.fsdp_config.fsdp_size=1",
                         rollout=False)
    gaps = copies.do(numerics.training_gaps(copies.engine, False, tmp_path, "copies"))
    assert gaps["weights after 3 AdamW steps"] < 1e-4 and gaps["update norm, relative"] < 1e-4, gaps


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_ranks_that_share_each_sequence_equal_plain_torch(sharing, tmp_path, lora):
    assert sharing.do(numerics.gradient_gap(sharing.engine, lora, tmp_path, f"g{lora}")) < 1e-5
    gaps = sharing.do(numerics.training_gaps(sharing.engine, lora, tmp_path, f"t{lora}"))
    assert gaps["weights after 3 AdamW steps"] < 1e-4 and gaps["update norm, relative"] < 1e-4, gaps
    assert sharing.engine.trainer.group.world_size == 2 and sharing.engine.trainer.dp_size == 1


@pytest.mark.parametrize("length", [1, 2, 3, 8, 21])
def test_a_single_sequence_of_any_length_is_shared(sharing, length):
    """Also one that leaves a rank with padding alone; its positions have targets of different widths."""
    rng = np.random.default_rng(length)
    vocabulary = sharing.settings.models[0].vocab_size
    shape = (length, 3) if length % 2 else (length,)
    datum = Datum(rng.integers(0, vocabulary, length).astype(np.int32), {
        "target_tokens": rng.integers(0, vocabulary, shape), "weights": rng.standard_normal(shape).astype(np.float32)})
    sharing.do(sharing.engine.create_model("shared", numerics.spec(sharing.engine, True)))
    found = sharing.do(sharing.engine.forward_backward("shared", [datum], "cross_entropy", {}, False)).logprobs[0]
    sharing.do(sharing.engine.drop_model("shared"))
    logits = plain.load_model(sharing.settings.model_folder)(torch.as_tensor(datum.tokens[None].astype(np.int64))).logits[0]
    targets = torch.as_tensor(datum.inputs["target_tokens"].reshape(length, -1))
    expected = torch.log_softmax(logits, -1).gather(1, targets).reshape(shape).detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_a_run_that_shared_sequences_resumes_exactly(sharing, tmp_path):
    assert sharing.do(numerics.resume_gap(sharing.engine, True, True, tmp_path)) == 0.0
