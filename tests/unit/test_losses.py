"""Each loss and its gradient against its formula in float64 numpy, and what must hold for all of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.workers.config import ActorConfig, PolicyLossConfig

from verl_tinker.core.errors import UserError
from verl_tinker.core.types import Datum
from verl_tinker.core.validate import LOSSES
from verl_tinker.engine import losses, preset_loss

pytestmark = pytest.mark.timeout(60)
OURS = [name for name in LOSSES if name != "custom_from_config"]
POLICY = [name for name in OURS if name != "cross_entropy"]


def oracle(name: str, lp: np.ndarray, d: dict[str, np.ndarray], c: dict[str, float], frozen: np.ndarray) -> float:
    """The loss of one datum. `frozen`: the log-probabilities where the formula stops the gradient."""
    if name == "cross_entropy":
        return -(d["weights"] * lp).sum()
    a, q = d["advantages"], d["logprobs"]
    on = a != 0
    low = d.get("clip_low_threshold", np.full(len(lp), c.get("clip_low_threshold", 0.0)))
    high = d.get("clip_high_threshold", np.full(len(lp), c.get("clip_high_threshold", 0.0)))
    r, r0 = np.where(on, np.exp(lp - q), 1.0), np.where(on, np.exp(frozen - q), 1.0)
    if name == "importance_sampling":
        return -(r * a).sum()
    if name == "ppo":
        return -np.minimum(r * a, np.clip(r, low, high) * a).sum()
    if name == "cispo":
        return -(np.clip(r0, low, high) * lp * a).sum()
    if name == "dro":
        return -(lp * a - on * 0.5 * c["beta"] * (lp - q) ** 2).sum()
    if name == "gspo":
        mask = d["sequence_ratio_mask"]
        s = np.exp((mask * (frozen - q)).sum() / mask.sum()) * np.exp(lp - frozen)
        return -np.minimum(s * a, np.clip(s, low, high) * a).sum()
    assert name == "stable_reinforce"
    return (on * 0.5 * c["kl_coeff"] * (lp - q) ** 2 - np.minimum(r0, 2.0) * lp * a).sum()


def computed(name: str, data: list[tuple[np.ndarray, dict]], config: dict) -> tuple[float, list[np.ndarray]]:
    """The engine's loss of several datums in one call, and its gradient by each datum's log-probabilities."""
    lp = torch.tensor(np.concatenate([lp for lp, _ in data]), dtype=torch.float64, requires_grad=True)
    names = {key for _, d in data for key in d}
    fields = {key: torch.tensor(np.concatenate([d[key] for _, d in data])) for key in names}
    fields["rows"] = torch.tensor(np.repeat(np.arange(len(data)), [len(lp) for lp, _ in data]))
    loss = losses.LOSSES[name](lp, fields, {**LOSSES[name].config, **config}).sum()
    loss.backward()
    return loss.item(), np.split(lp.grad.numpy(), np.cumsum([len(lp) for lp, _ in data])[:-1])


def make(name: str, seed: int, count: int = 3, on_policy: bool = False, per_token: bool = False):
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(count):
        n = int(rng.integers(4, 9))
        lp = -rng.random(n) * 3
        d = {"advantages": rng.standard_normal(n), "logprobs": lp if on_policy else lp + rng.standard_normal(n) * 0.4}
        d["advantages"][:2] = d["logprobs"][0] = 0
        if name == "cross_entropy":
            d = {"weights": rng.standard_normal(n)}
        if name == "gspo":
            d["sequence_ratio_mask"] = (np.arange(n) >= 2).astype(float)
        if per_token:
            d["clip_low_threshold"], d["clip_high_threshold"] = rng.uniform(0.5, 0.95, n), rng.uniform(1.05, 1.5, n)
        data.append((lp, d))
    return data


CASES = [(name, {}) for name in OURS] + [
    ("ppo", {"clip_low_threshold": 0.5, "clip_high_threshold": 3.0}),
    ("cispo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
    ("gspo", {"clip_low_threshold": 0.99, "clip_high_threshold": 1.01}),
    ("dro", {"beta": 0.5}),
    ("stable_reinforce", {"kl_coeff": 0.3}),
]


@pytest.mark.parametrize("name, config", CASES)
@pytest.mark.parametrize("seed", range(4))
def test_value_and_gradient_are_the_formulas(name, config, seed):
    per_token = "clip_low_threshold" in LOSSES[name].config and seed % 2 == 1
    data, full = make(name, seed, per_token=per_token), {**LOSSES[name].config, **config}
    loss, gradients = computed(name, data, config)
    assert loss == pytest.approx(sum(oracle(name, lp, d, full, lp) for lp, d in data), rel=1e-9)
    for (lp, d), gradient in zip(data, gradients, strict=True):
        for i in range(len(lp)):
            step = np.zeros(len(lp))
            step[i] = 1e-6
            slope = (oracle(name, lp + step, d, full, lp) - oracle(name, lp - step, d, full, lp)) / 2e-6
            assert gradient[i] == pytest.approx(slope, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(OURS), st.integers(0, 10**6), st.integers(1, 4))
def test_a_batch_is_the_sum_of_its_parts_in_any_order(name, seed, cut):
    data = make(name, seed, count=5)
    whole, gradients = computed(name, data, {})
    parts = [computed(name, part, {}) for part in (data[:cut], data[cut:])]
    assert whole == pytest.approx(sum(loss for loss, _ in parts), rel=1e-12, abs=1e-12)
    for ours, theirs in zip(gradients, [g for _, part in parts for g in part], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12)
    assert computed(name, data[::-1], {})[0] == pytest.approx(whole, rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("name", OURS)
def test_a_datum_of_no_weight_counts_for_nothing(name):
    data = make(name, 7)
    nothing = {key: np.zeros_like(value) for key, value in data[0][1].items()}
    if name == "gspo":
        nothing["sequence_ratio_mask"] = np.ones_like(nothing["sequence_ratio_mask"])
    loss, gradients = computed(name, [*data, (data[0][0], nothing)], {})
    assert loss == pytest.approx(computed(name, data, {})[0], rel=1e-12)
    assert not gradients[-1].any()


@pytest.mark.parametrize("name", POLICY)
def test_on_policy_each_is_reinforce(name):
    data = make(name, 11, on_policy=True)
    for (lp, d), gradient in zip(data, computed(name, data, {})[1], strict=True):
        np.testing.assert_allclose(gradient, -d["advantages"], atol=1e-9)


@pytest.mark.parametrize("name", POLICY)
def test_positions_without_advantage_may_hold_any_q(name):
    data = make(name, 13)
    for _, d in data:
        d["logprobs"][:2] = 5000.0 if name != "gspo" else d["logprobs"][:2]
    loss, gradients = computed(name, data, {})
    assert np.isfinite(loss) and all(np.isfinite(g).all() and not g[:2].any() for g in gradients)


ACTOR = {"strategy": "fsdp2", "rollout_n": 1, "ppo_micro_batch_size_per_gpu": 1, "use_dynamic_bsz": True}


def of_preset(data, actor, together: bool = True) -> tuple[float, list[np.ndarray]]:
    """verl's loss of several datums, in one micro-batch or each in its own, and its gradient."""
    batch = [Datum(np.zeros(len(lp), np.int32), d) for lp, d in data]
    counts = preset_loss.call_counts(batch)
    rows = [torch.tensor(lp, requires_grad=True) for lp, _ in data]
    total = 0.0
    for group in [range(len(data))] if together else [[i] for i in range(len(data))]:
        fields = {k: torch.tensor(np.concatenate([data[i][1][k] for i in group])) for k in ("logprobs", "advantages")}
        lengths = torch.tensor([len(rows[i]) for i in group])
        loss = preset_loss.preset_loss(torch.cat([rows[i] for i in group]), fields, lengths, actor, counts, 1)
        loss.backward()
        total += loss.item()
    return total, [row.grad.numpy() for row in rows]


@pytest.mark.parametrize("together", [True, False], ids=["one micro-batch", "three"])
@pytest.mark.parametrize("mode, divisor", [("token-sum", 1), ("token-mean", "tokens"), ("seq-mean-token-sum", 3)])
def test_the_preset_loss_is_verls_dual_clip_ppo_aggregated_as_the_preset_says(mode, divisor, together):
    actor = ActorConfig(**ACTOR, loss_agg_mode=mode, clip_ratio_low=0.1, clip_ratio_high=0.3, clip_ratio_c=3.0)
    data = make("ppo", 5)
    a, q, lp = (np.concatenate(part) for part in zip(*[(d["advantages"], d["logprobs"], lp) for lp, d in data]))
    r = np.where(a != 0, np.exp(lp - q), 1.0)
    clipped = np.maximum(-r * a, -np.clip(r, 0.9, 1.3) * a)
    expected = np.where(a < 0, np.minimum(-3.0 * a, clipped), clipped).sum()
    expected /= np.count_nonzero(a) if divisor == "tokens" else divisor
    loss, gradients = of_preset(data, actor, together)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert all(not g[:2].any() and g.any() for g in gradients)


def test_the_preset_chooses_the_formula():
    data = make("dro", 6)
    actor = ActorConfig(**ACTOR, loss_agg_mode="token-sum", policy_loss=PolicyLossConfig(loss_mode="dro", dro_beta=0.3))
    assert of_preset(data, actor)[0] != pytest.approx(of_preset(data, ActorConfig(**ACTOR, loss_agg_mode="token-sum"))[0])


def test_what_the_preset_loss_would_leave_out_is_refused():
    with pytest.raises(UserError, match="entropy_coeff 0.1 and use_kl_loss False"):
        preset_loss.check_actor(ActorConfig(**ACTOR, entropy_coeff=0.1))
