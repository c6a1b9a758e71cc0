"""Losses, failures and optimizer settings on the real trainer."""

from __future__ import annotations

import numerics
import numpy as np
import plain
import pytest
import torch

from verl_tinker.core.errors import EngineError, UserError
from verl_tinker.core.validate import LOSSES
from verl_tinker.core.types import AdamParams, Datum, LoraSpec, ModelSpec

pytestmark = pytest.mark.timeout(300)


def policy_batch(vocabulary: int) -> list[Datum]:
    """Rollout-like datums: a prompt with q = 0 and A = 0, then actions whose q is near the base model's."""
    rng = np.random.default_rng(3)
    data = []
    for n in (12, 20):
        tokens = rng.integers(0, vocabulary, n + 1)
        advantages = rng.standard_normal(n).astype(np.float32)
        logprobs = (-11 + rng.standard_normal(n)).astype(np.float32)
        advantages[:4] = logprobs[:4] = 0
        data.append(Datum(tokens[:-1].astype(np.int32), {
            "target_tokens": tokens[1:], "advantages": advantages, "logprobs": logprobs,
            "sequence_ratio_mask": (np.arange(n) >= 4).astype(np.float32)}))
    return data


@pytest.mark.parametrize("name, config", [
    ("importance_sampling", {}),
    ("ppo", {}),
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("dro", {"beta": 0.3}),
    ("gspo", {}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    ("stable_reinforce", {"kl_coeff": 0.2}),
])
def test_policy_losses_and_their_gradients_equal_the_published_formulas(live, run_name, tmp_path, name, config):
    vocabulary = live.settings.models[0].vocab_size
    twin = live.do(numerics.start_run(live.engine, True, tmp_path, run_name))
    live.do(live.engine.load_state(run_name, tmp_path / f"{run_name}-start", False))
    data = policy_batch(vocabulary)
    config = {**LOSSES[name].config, **config}
    result = live.do(live.engine.forward_backward(run_name, data, name, config, True))
    assert result.metrics["loss:sum"] == pytest.approx(twin.forward_backward(data, name, config), rel=1e-4)
    largest = max(float(p.grad.abs().max()) for p in twin.parameters.values())
    live.do(live.engine.optim_step(run_name, numerics.GRADIENT))
    twin.step(numerics.GRADIENT)
    gap = live.do(numerics.weights_gap(live.engine, twin, tmp_path, run_name, "after"))
    assert gap < 1e-4 * max(1.0, largest)


def test_the_loss_of_the_preset_is_verls_mean_over_tokens_of_the_whole_call(live, run_name):
    data = policy_batch(live.settings.models[0].vocab_size)
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True)))
    for datum in data:
        datum.inputs["weights"] = np.zeros(len(datum.tokens), np.float32)
    lp = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False)).logprobs
    for datum, now in zip(data, lp):
        # Near enough for the ratio to stay where verl's dual clip does not act.
        datum.inputs["logprobs"] = now + np.linspace(-0.5, 0.5, len(now), dtype=np.float32)
    norms, sums = [], []
    for name, config in (("ppo", LOSSES["ppo"].config), ("custom_from_config", {})):
        sums.append(live.do(live.engine.forward_backward(run_name, data, name, config, True)).metrics["loss:sum"])
        norms.append(live.do(live.engine.optim_step(run_name, AdamParams(learning_rate=0.0)))["grad_norm"])
    tokens = sum(np.count_nonzero(d.inputs["advantages"]) for d in data)
    assert sums[0] / sums[1] == pytest.approx(tokens, rel=1e-4)
    assert norms[0] / norms[1] == pytest.approx(tokens, rel=1e-4)


def test_top_k_targets_of_different_widths_in_one_batch(live, run_name):
    vocabulary = live.settings.models[0].vocab_size
    rng = np.random.default_rng(5)
    data = []
    for n, k in ((7, 3), (5, None), (9, 20)):
        shape = (n,) if k is None else (n, k)
        data.append(Datum(rng.integers(0, vocabulary, n).astype(np.int32), {
            "target_tokens": rng.integers(0, vocabulary, shape),
            "weights": rng.standard_normal(shape).astype(np.float32)}))
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True)))
    result = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, True))
    model = plain.load_model(live.settings.model_folder)
    total = 0.0
    for datum, logprobs in zip(data, result.logprobs):
        wanted = plain.logprobs(model, datum.tokens, datum.inputs["target_tokens"]).detach().numpy()
        assert logprobs.shape == wanted.shape
        np.testing.assert_allclose(logprobs, wanted, atol=1e-4)
        total -= float((wanted.astype(np.float64) * datum.inputs["weights"]).sum())
    assert result.metrics["loss:sum"] == pytest.approx(total, rel=1e-5)


def test_a_failed_batch_contributes_nothing_and_earlier_ones_stay(live, tmp_path):
    data = numerics.batch(live.settings.models[0].vocab_size, seed=61)
    broken = Datum(data[0].tokens, {**data[0].inputs, "target_tokens": np.full(9, 10**9)})
    n = len(data[0].tokens)
    overflowing = Datum(data[0].tokens, {"target_tokens": data[0].inputs["target_tokens"].reshape(n, -1)[:, 0],
                                         "logprobs": np.full(n, -200, np.float32), "advantages": np.ones(n, np.float32)})
    saved = []
    for name, parts in (("clean", [data[:2], data[2:]]), ("failing", [data[:2], [data[2], broken], data[2:]])):
        live.do(live.engine.create_model(name, numerics.spec(live.engine, True)))
        for part in parts:
            if any(d is broken for d in part):
                with pytest.raises(EngineError):
                    live.do(live.engine.forward_backward(name, part, "cross_entropy", {}, True))
            else:
                live.do(live.engine.forward_backward(name, part, "cross_entropy", {}, True))
        if name == "failing":
            with pytest.raises(UserError, match="not finite"):
                live.do(live.engine.forward_backward(name, [overflowing], "importance_sampling", {}, True))
        live.do(live.engine.optim_step(name, AdamParams(learning_rate=1e-3)))
        folder = tmp_path / name
        folder.mkdir()
        live.do(live.engine.save_state(name, folder))
        live.do(live.engine.drop_model(name))
        from safetensors.torch import load_file

        saved.append(load_file(folder / "adapter_model.safetensors"))
    assert all(torch.equal(saved[0][k], saved[1][k]) for k in saved[0])


def test_forward_only_leaves_no_gradient(live, run_name):
    data = numerics.batch(live.settings.models[0].vocab_size, seed=62)
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True)))
    forward = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False))
    backward = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, True))
    assert forward.metrics["loss:sum"] == pytest.approx(backward.metrics["loss:sum"], rel=1e-6)
    live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False))
    norm = live.do(live.engine.optim_step(run_name, AdamParams()))["grad_norm"]
    live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False))
    assert live.do(live.engine.optim_step(run_name, AdamParams()))["grad_norm"] == 0.0 < norm


@pytest.mark.parametrize("lora, word", [
    (LoraSpec(rank=0), "rank"), (LoraSpec(rank=129), "max_lora_rank"),
    (LoraSpec(train_attn=False, train_mlp=False, train_unembed=False), "train_attn"),
])
def test_an_adapter_that_cannot_be_made_is_refused_with_the_field(live, lora, word):
    with pytest.raises(UserError, match=word):
        live.do(live.engine.create_model("refused", ModelSpec(live.name, lora)))


def test_a_checkpoint_of_another_rank_is_refused_and_changes_nothing(live, run_name, tmp_path):
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True, rank=8)))
    live.do(live.engine.save_state(run_name, tmp_path))
    live.do(live.engine.drop_model(run_name))
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True, rank=16)))
    with pytest.raises(UserError, match="rank"):
        live.do(live.engine.load_state(run_name, tmp_path, True))


def test_a_damaged_optimizer_file_is_refused_and_changes_nothing(live, run_name, tmp_path):
    data = numerics.batch(live.settings.models[0].vocab_size, seed=63)
    live.do(live.engine.create_model(run_name, numerics.spec(live.engine, True)))
    live.do(live.engine.save_state(run_name, tmp_path))
    live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, True))
    live.do(live.engine.optim_step(run_name, AdamParams(learning_rate=1e-2)))
    trained = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False)).metrics["loss:sum"]
    file = tmp_path / "optimizer.safetensors"
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.raises(EngineError):
        live.do(live.engine.load_state(run_name, tmp_path, True))
    after = live.do(live.engine.forward_backward(run_name, data, "cross_entropy", {}, False)).metrics["loss:sum"]
    assert after == pytest.approx(trained, rel=1e-6)
