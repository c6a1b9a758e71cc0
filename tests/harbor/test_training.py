"""Returns, advantages, KL penalty and datums, against numbers worked out by hand."""

import math

import numpy as np
import pytest

from harbor_env.record import Turn
from harbor_env.training import (
    datum,
    examples,
    group_advantages,
    is_nothing,
    logprob_gap,
    with_kl_penalty,
)

ONE = Turn(1, (1, 2), (3, 4), (-0.5, -1.5), "stop")
TWO = Turn(2, (1, 2, 3, 4, 5), (6,), (-0.25,), "stop")
APART = Turn(3, (9,), (8, 7), (-1.0, -2.0), "stop")


def test_every_sampled_token_has_the_episodes_advantage():
    merged, apart = examples([ONE, TWO, APART], 0.5)
    assert merged.advantages == (0.0, 0.0, 0.5, 0.5, 0.0, 0.5)
    assert apart.advantages == (0.0, 0.5, 0.5)


def test_turns_are_taken_in_the_order_of_their_requests():
    assert examples([TWO, ONE], 1.0) == examples([ONE, TWO], 1.0)


def test_only_the_first_transitions_are_trained_on_when_told_so():
    (only,) = examples([ONE, TWO, APART], 1.0, max_transitions=1)
    assert only.sequence.tokens == [1, 2, 3, 4] and only.sequence.turns == [1]


@pytest.mark.parametrize(("returns", "expected"), [
    ([1.0, 0.0], [0.5, -0.5]),
    ([1.0, 1.0, 1.0], [0.0, 0.0, 0.0]),
    ([0.25, 0.5, 0.75, 0.5], [-0.25, 0.0, 0.25, 0.0]),
])
def test_group_advantages_are_centred(returns, expected):
    assert group_advantages(returns) == pytest.approx(expected)


def test_group_advantages_over_the_deviation():
    assert group_advantages([1.0, 0.0], divide_by_deviation=True) == pytest.approx([1.0, -1.0])
    assert group_advantages([0.5, 0.5], divide_by_deviation=True) == [0.0, 0.0]


def test_the_kl_penalty_pulls_each_token_towards_the_reference():
    rows = examples([ONE], 1.0)
    penalised, mean = with_kl_penalty(rows, [[None, -3.0, -0.7, -1.1]], beta=0.1)
    # d is -0.5 + 0.7 = 0.2 and -1.5 + 1.1 = -0.4, their mean -0.1.
    assert mean == pytest.approx(-0.1)
    assert penalised[0].advantages == pytest.approx((0.0, 0.0, 1.0 + 0.1 * (-0.1 - 0.2), 1.0 + 0.1 * (-0.1 + 0.4)))


def test_the_mean_of_the_penalty_is_over_all_sequences():
    rows = examples([ONE, APART], 0.0)
    penalised, mean = with_kl_penalty(rows, [[None, 0.0, -0.5, -1.5], [None, -1.0, -2.6]], beta=1.0)
    assert mean == pytest.approx(0.6 / 4)
    assert math.fsum(a for row in penalised for a in row.advantages) == pytest.approx(0.0)


def test_a_reference_of_another_length_is_an_error():
    with pytest.raises(ValueError):
        with_kl_penalty(examples([ONE], 1.0), [[None, -1.0]], beta=0.1)


def test_a_step_that_would_change_nothing_is_known():
    assert is_nothing(examples([ONE], 0.0)) and is_nothing([]) and is_nothing(examples([ONE], 1e-7))
    assert not is_nothing(examples([ONE], -0.5))


def test_a_datum_is_shifted_by_one():
    (row,) = examples([ONE, TWO], 0.5)
    made = datum(row)
    assert made.model_input.to_ints() == [1, 2, 3, 4, 5]
    values = {name: tensor.to_numpy() for name, tensor in made.loss_fn_inputs.items()}
    np.testing.assert_array_equal(values["target_tokens"], [2, 3, 4, 5, 6])
    np.testing.assert_allclose(values["logprobs"], [0.0, -0.5, -1.5, 0.0, -0.25])
    np.testing.assert_allclose(values["advantages"], [0.0, 0.5, 0.5, 0.0, 0.5])


def test_the_gap_counts_sampled_tokens_only():
    rows = examples([ONE, APART], 1.0)
    gap = logprob_gap(rows, [[-9.0, -0.5, -1.4], [-1.0, -2.3]])
    assert gap == {"logprob_gap_mean": pytest.approx(0.1), "logprob_gap_max": pytest.approx(0.3)}
    assert logprob_gap([], []) == {}
