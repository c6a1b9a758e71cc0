"""Chunks of one call are found by their numbers, whatever the order of their arrival."""

import itertools

import pytest

from verl_tinker.core.planner import Entry, Planner


def chunk(seq, key="k"):
    return Entry(seq, seq, key)


def command(seq):
    return Entry(seq, seq)


def arrivals(*entries):
    planner = Planner()
    return planner, [planner.arrive(entry) for entry in entries]


@pytest.mark.parametrize("order", list(itertools.permutations([2, 3, 4])))
def test_chunks_whose_first_comes_last_are_one_unit_in_order(order):
    _, units = arrivals(*map(chunk, order), chunk(1), command(5))
    assert units == [[], [], [], [[1, 2, 3, 4]], [[5]]]


def test_what_comes_in_order_runs_at_once_and_alone():
    _, units = arrivals(chunk(1), chunk(2), command(3), chunk(4))
    assert units == [[[1]], [[2]], [[3]], [[4]]]


def test_another_command_closes_an_unfinished_group_before_it():
    _, units = arrivals(chunk(2), chunk(4), command(5), chunk(6))
    assert units == [[], [], [[2, 4], [5]], [[6]]]


def test_a_gap_that_expires_lets_go_and_its_late_chunk_runs_alone():
    planner, units = arrivals(chunk(3), chunk(2))
    assert units == [[], []] and planner.missing == [1] and planner.waiting == [3, 2]
    assert planner.expire() == [[2, 3]] and planner.missing == [] and planner.expire() == []
    assert planner.arrive(chunk(1)) == [[1]]
    assert planner.arrive(chunk(4)) == [[4]]


def test_different_calls_are_different_units():
    _, units = arrivals(chunk(2, "a"), chunk(3, "b"), chunk(4, "b"), chunk(1, "a"))
    assert units == [[], [], [], [[1, 2], [3, 4]]]


def test_commands_without_a_number_run_at_once():
    _, units = arrivals(command(None), chunk(2), command(None), chunk(1))
    assert units == [[[None]], [], [[2], [None]], [[1]]]


def test_a_gap_may_be_as_wide_as_a_client_likes():
    planner, _ = arrivals(chunk(2**40), chunk(3), chunk(2**62))
    assert planner.missing == [1, 2, 4, 5, 6, 7, 8, 9]
    assert planner.expire() == [[3, 2**40, 2**62]]
