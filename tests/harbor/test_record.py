"""Turns become training sequences exactly where one prompt extends the former one with its answer."""

import pytest

from harbor_env.record import Turn, sequences


def turn(index, prompt, sampled):
    return Turn(index, tuple(prompt), tuple(sampled), tuple(-0.1 * t for t in sampled), "stop")


def test_turns_that_extend_one_another_are_one_sequence():
    (only,) = sequences([turn(1, [1, 2], [3, 4]), turn(2, [1, 2, 3, 4, 5], [6])])
    assert only.tokens == [1, 2, 3, 4, 5, 6]
    assert only.sampled == [False, False, True, True, False, True]
    assert only.logprobs == [0.0, 0.0, pytest.approx(-0.3), pytest.approx(-0.4), 0.0, pytest.approx(-0.6)]
    assert only.turns == [1, 2]


@pytest.mark.parametrize("prompt", [[1, 2, 3, 9, 5], [1, 2, 3], [7, 2, 3, 4, 5], [1, 2]])
def test_any_other_prompt_begins_a_new_sequence(prompt):
    first, second = sequences([turn(1, [1, 2], [3, 4]), turn(2, prompt, [6])])
    assert first.tokens == [1, 2, 3, 4] and second.tokens == [*prompt, 6]
    assert second.sampled == [False] * len(prompt) + [True]


def test_the_chain_goes_on_after_a_break():
    rows = sequences([turn(1, [1], [2]), turn(2, [8], [9]), turn(3, [8, 9, 1], [4])])
    assert [row.turns for row in rows] == [[1], [2, 3]]


def test_a_turn_without_tokens_is_left_out():
    assert [row.turns for row in sequences([turn(1, [1], []), turn(2, [1, 5], [2])])] == [[2]]


def test_tokens_without_their_log_probabilities_are_refused():
    with pytest.raises(ValueError, match="turn 3: 2 sampled tokens and 1 log-prob"):
        Turn(3, (1,), (2, 3), (0.0,), "stop")
