"""What a gradient, a step and a loss are: sums, in order, exactly once."""

import numpy as np
import pytest
from programs import NOTHING_CARRIED, batch, datum, now, prompt_of, rows, scored, step, tensor, train, weights_of
from tinker import types


def accumulated(run, *batches, **adam):
    """The model after a step on the gradients of some batches."""
    pending = [run.forward_backward(data, "cross_entropy") for data in batches]
    for future in [*pending, step(run, **adam)]:
        now(future)
    return weights_of(run)


def test_gradients_of_parts_add_up_to_that_of_the_whole(target, new_run):
    """The parts are unequal, so neither a mean over datums nor one over tokens would pass."""
    data = batch(1, 4)
    whole, parts, missing = new_run(), new_run(), new_run()
    before = weights_of(whole)
    after = accumulated(whole, data)
    assert target.differ(before, after)
    assert target.same(accumulated(parts, data[:1], data[1:]), after)
    assert target.differ(accumulated(missing, data[1:]), after)


def test_forward_leaves_no_gradient(target, new_run):
    with_forward, without = new_run(), new_run()
    now(with_forward.forward([datum(2, weight=-5.0)], "cross_entropy"))
    assert target.same(accumulated(with_forward, batch(1, 2)), accumulated(without, batch(1, 2)))


def test_gradients_may_cancel(target, new_run):
    """Weights are signed numbers, which custom losses rely on: not clamped, and no mask."""
    cancelled, plain = new_run(), new_run()
    now(cancelled.forward_backward([datum(3, weight=2.0)], "cross_entropy"))
    now(cancelled.forward_backward([datum(3, weight=-2.0)], "cross_entropy"))
    assert target.same(accumulated(cancelled, batch(1, 2)), accumulated(plain, batch(1, 2)))


def test_a_step_uses_the_gradient_up(target, new_run):
    """A step of size 0, after which nothing of its gradient is left: no moment is carried either."""
    emptied, plain = new_run(), new_run()
    train(emptied, [datum(3, weight=-4.0)], learning_rate=0.0, **NOTHING_CARRIED)
    one = accumulated(emptied, batch(1, 2), **NOTHING_CARRIED)
    assert target.same(one, accumulated(plain, batch(1, 2), **NOTHING_CARRIED))


def test_commands_run_in_the_order_of_the_program(target, new_run):
    pipelined, awaited = new_run(), new_run()
    batches = [batch(10, 1), batch(20, 2), [datum(30, weight=-2.0)]]
    pending = []
    for data in batches:
        pending += [pipelined.forward_backward(data, "cross_entropy"), step(pipelined)]
    for future in pending:
        now(future)
    for data in batches:
        train(awaited, data)
    assert target.same(weights_of(pipelined), weights_of(awaited))


def test_runs_do_not_touch_each_other(target, new_run):
    alone, one, two = new_run(), new_run(), new_run()
    expected = accumulated(alone, batch(1, 2))
    now(one.forward_backward(batch(1, 2), "cross_entropy"))
    now(two.forward_backward([datum(40, weight=-3.0)], "cross_entropy"))
    now(step(two))
    now(step(one))
    assert target.same(weights_of(one), expected)
    assert target.differ(weights_of(two), expected)


def test_chunks_may_come_in_any_order(target, wire, new_run):
    """As SDKs send them: the first last. Each answer is its own chunk's, and the gradient is that of the whole."""
    data, plain = batch(1, 3), new_run()
    requests = {seq: wire.send_batch(seq, [data[seq - 1]]) for seq in (3, 2, 1)}
    now(plain.forward_backward(data, "cross_entropy"))
    expected = now(plain.forward(data, "cross_entropy"))
    for seq, request in requests.items():
        output = wire.result(request)
        assert target.same(rows(output), np.asarray(expected.loss_fn_outputs[seq - 1]["logprobs"].data))
        assert output.metrics["loss:sum"] == pytest.approx(-rows(output).sum(), rel=1e-3)
    assert "error" not in wire.result(wire.step(4))
    now(step(plain))
    assert target.same(wire.weights(5), weights_of(plain))


def test_a_number_that_never_comes_blocks_nothing(target, wire, new_run):
    requests = [wire.send_batch(7, batch(1, 2)), wire.step(9)]
    for request in requests:
        wire.result(request)
    assert target.same(wire.weights(12), accumulated(new_run(), batch(1, 2)))


def test_every_metric_names_its_reduction(new_run):
    output = now(new_run().forward_backward(batch(1, 2), "cross_entropy"))
    assert "loss:sum" in output.metrics and all(key.count(":") == 1 for key in output.metrics)
    assert [len(out["logprobs"].data) for out in output.loss_fn_outputs] == [3, 5]


ADVANTAGES = np.array([1.0, -2.0, 0.0, 3.0])
LOSSES = {
    "importance_sampling": ({}, lambda lp, q, a: np.exp(lp - q) * a),
    "ppo": (
        {"clip_low_threshold": 0.7, "clip_high_threshold": 1.4},
        lambda lp, q, a: np.minimum(np.exp(lp - q) * a, np.clip(np.exp(lp - q), 0.7, 1.4) * a),
    ),
    "cispo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.3},
        lambda lp, q, a: np.clip(np.exp(lp - q), 0.5, 1.3) * lp * a,
    ),
    "dro": ({"beta": 0.1}, lambda lp, q, a: lp * a - 0.05 * (lp - q) ** 2),
}


def own_logprobs(run, seed):
    return rows(now(run.forward([datum(seed, len(ADVANTAGES))], "cross_entropy")))


@pytest.mark.parametrize("loss_fn", LOSSES)
def test_losses_are_sums_of_their_formula(loss_fn, new_run):
    run = new_run()
    config, formula = LOSSES[loss_fn]
    sampled = own_logprobs(run, 50) + np.array([0.5, -0.5, 0.1, -0.3])
    output = now(run.forward_backward([scored(50, ADVANTAGES, sampled)] * 2, loss_fn, config))
    expected = -2 * formula(own_logprobs(run, 50), sampled, ADVANTAGES).sum()
    assert output.metrics["loss:sum"] == pytest.approx(expected, rel=1e-2, abs=1e-2)


def test_importance_sampling_on_policy_has_the_gradient_of_weighted_likelihood(target, new_run):
    sampled_from, weighted = new_run(), new_run()
    now(sampled_from.forward_backward([scored(60, ADVANTAGES, own_logprobs(sampled_from, 60))], "importance_sampling"))
    weights = tensor(ADVANTAGES, np.float32)
    now(weighted.forward_backward([datum(60, len(ADVANTAGES), weights=weights)], "cross_entropy"))
    for run in (sampled_from, weighted):
        now(step(run))
    assert target.same(weights_of(sampled_from), weights_of(weighted))


def wide(targets, weights) -> types.Datum:
    model_input = types.ModelInput.from_ints(prompt_of(70, targets.shape[0]))
    return types.Datum(model_input=model_input, loss_fn_inputs={"target_tokens": targets, "weights": weights})


def test_several_targets_a_position_dense_and_sparse(target, new_run):
    run, rng = new_run(), np.random.default_rng(7)
    targets = rng.integers(10, 900, (5, 4)) * rng.integers(0, 2, (5, 4))
    weights = rng.normal(size=(5, 4)).astype(np.float32) * rng.integers(0, 2, (5, 4), np.int32).astype(np.float32)
    columns = [wide(tensor(targets[:, k], np.int64), tensor(weights[:, k], np.float32)) for k in range(4)]
    single = np.stack([rows(now(run.forward([column], "cross_entropy"))) for column in columns], axis=1)
    for pack in (lambda array: tensor(array, array.dtype), sparse):
        output = now(run.forward([wide(pack(targets), pack(weights))], "cross_entropy"))
        together = np.asarray(output.loss_fn_outputs[0]["logprobs"].data).reshape(5, 4)
        assert target.same(together, single)
        assert output.metrics["loss:sum"] == pytest.approx(-(weights * single).sum(), rel=1e-2, abs=1e-2)


def sparse(dense: np.ndarray) -> types.TensorData:
    """The cells that are not 0, row by row."""
    at, columns = np.nonzero(dense)
    crow = np.concatenate([[0], np.cumsum(np.bincount(at, minlength=len(dense)))])
    return types.TensorData(
        data=dense[at, columns], dtype="int64" if dense.dtype == np.int64 else "float32", shape=list(dense.shape),
        sparse_crow_indices=crow.tolist(), sparse_col_indices=columns.tolist())


def test_equal_runs_begin_equal(target, new_run):
    one, two = weights_of(new_run()), weights_of(new_run())
    assert len(one) == 15 and target.same(one, two)
