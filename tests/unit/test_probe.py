"""The verdict on a transfer, on made-up log-probabilities."""

import numpy as np
import pytest

from verl_tinker.core.errors import SyncError
from verl_tinker.engine.probe import Comparison

RNG = np.random.default_rng(0)
BASE = RNG.normal(-9, 1, 47)


def rounded(values: np.ndarray) -> np.ndarray:
    return values + RNG.normal(0, 0.02, values.shape)


def test_float32_is_compared_number_by_number():
    comparison = Comparison(exact=True)
    one_off = np.eye(47)[3]
    comparison.check(1, "r", BASE, BASE + 4e-5)
    comparison.check(1, "r", BASE, BASE + 3e-4 * one_off)
    with pytest.raises(SyncError, match="version 2: trainer and sampler differ by 6.00e-04"):
        comparison.check(2, "r", BASE, BASE + 6e-4 * one_off)
    with pytest.raises(SyncError, match="on average 6.00e-05"):
        comparison.check(2, "r", BASE, BASE + 6e-5)
    with pytest.raises(SyncError, match="nan"):
        comparison.check(3, "r", BASE, BASE * np.nan)


def test_rounded_weights_must_move_as_the_trainer_did_since_the_last_transfer():
    comparison = Comparison(exact=False)
    comparison.check(0, "", BASE, rounded(BASE))
    first = BASE + RNG.normal(0, 0.3, 47)
    comparison.check(1, "r", first, rounded(first))
    # The move away from the base is much larger than this last step, and would hide that the sampler missed it.
    second = first + 0.09 * RNG.choice([-1, 1], 47)
    with pytest.raises(SyncError, match="version 2: the sampler moved differently"):
        comparison.check(2, "r", second, rounded(first))
    comparison.check(2, "r", second, rounded(second))
    with pytest.raises(SyncError, match="on average"):
        comparison.check(3, "r", second, second + 0.2)


def test_small_moves_add_up_until_they_can_be_told_from_rounding():
    comparison = Comparison(exact=False)
    comparison.check(0, "", BASE, rounded(BASE))
    direction = RNG.normal(0, 1, 47)
    trainer = BASE
    with pytest.raises(SyncError, match="moved differently"):
        for version in range(1, 20):
            trainer = trainer + 0.02 * direction
            comparison.check(version, "r", trainer, rounded(BASE))
    assert 4 < version < 12
