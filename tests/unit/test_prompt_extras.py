"""Targets and draws picked from scores: in chunks as at once, packed and unpacked, and with the right frequencies."""

import numpy as np
import pytest
import torch

from verl_tinker.core.types import Matrix, SampleRequest, SamplingParams
from verl_tinker.engine.prompt_extras import Collected, Extras, draw

pytestmark = pytest.mark.timeout(120)

ROWS, VOCAB, OTHERS = 23, 50, 3


def scores(seed=0):
    return torch.log_softmax(torch.randn(ROWS, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3, 1)


def request(targets=None, k=0, **params):
    return SampleRequest(np.arange(ROWS + 1, dtype=np.int32), 1, SamplingParams(**params), target_prompt=targets,
                         prompt_alt_k=k)


def sparse():
    """One row with most of the ids, one with two of which one asks for nothing."""
    ids = np.array([*range(40), 7, -1])
    crow = np.zeros(ROWS + 1, np.int64)
    crow[3:], crow[22:] = 40, 42
    return Matrix(ids, (ROWS, 1000), crow, np.array([*range(40), 5, 999]))


def through(extras, table, cuts):
    """What comes back when the rows of `table` are added in the parts between the cuts."""
    collected = Collected(extras, ROWS)
    for begin, end in cuts:
        collected.add(table[begin:end], begin)
    width = OTHERS + extras.columns(ROWS)
    ids, logprobs = torch.full((ROWS, width), 9, dtype=torch.int32), torch.full((ROWS, width), -9.0)
    collected.fill(ids, logprobs)
    assert (ids[:, :OTHERS] == 9).all() and (logprobs[:, :OTHERS] == -9).all()
    return extras.unpack(ids.numpy()[:, OTHERS:], logprobs.numpy()[:, OTHERS:])


@pytest.mark.parametrize("cuts", [[(0, 23)], [(0, 1), (1, 20), (20, 23)], [(0, 20), (0, 3), (3, 23)]],
                         ids=["whole", "chunks", "begun anew"])
def test_chunks_change_nothing(cuts):
    extras = Extras.read(Extras.of(request(sparse(), 4, seed=-3, temperature=0.7)).argument())
    targets, draws = through(extras, scores(), cuts)
    wanted = [*scores()[2, :40].tolist(), scores()[21, 7].item()]
    np.testing.assert_array_equal(targets, np.float32(wanted))
    whole = through(extras, scores(), [(0, ROWS)])[1]
    assert draws.ids.tolist() == whole.ids.tolist() and draws.ids.shape == (ROWS, 4)
    np.testing.assert_array_equal(draws.logprobs, scores().gather(1, torch.as_tensor(draws.ids).long()).numpy())


def test_few_targets_take_few_columns():
    assert Extras.of(request(sparse())).columns(ROWS) == 2
    one = Matrix(np.array([4]), (ROWS, 1000), np.array([0] * ROWS + [1]), np.array([3]))
    assert Extras.of(request(one, 5)).columns(ROWS) == 6
    assert Extras.of(request()) is None


def test_a_seed_decides_the_draws_and_none_leaves_them_to_chance():
    def drawn(seed):
        return through(Extras.of(request(k=8, seed=seed)), scores(), [(0, ROWS)])[1].ids.tolist()

    assert drawn(5) == drawn(5) != drawn(6)
    assert drawn(None) != drawn(None)
    assert len({tuple(row) for row in through(Extras.of(request(k=8, seed=1)), scores()[:1].repeat(ROWS, 1),
                                              [(0, ROWS)])[1].ids.tolist()}) > ROWS / 2, "positions have their own draws"


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_have_the_frequencies_of_the_tempered_distribution(temperature):
    n = 200_000
    row = scores()[:1]
    ids = draw(row, np.random.default_rng(0).random((1, n)), temperature)
    wanted = torch.softmax(row.double() / temperature, 1)[0]
    counts = torch.bincount(ids[0], minlength=VOCAB)
    keep = wanted * n > 10
    chi = (((counts - wanted * n) ** 2) / (wanted * n))[keep].sum()
    assert keep.sum() > 8 and chi < keep.sum() + 5 * (2 * keep.sum()) ** 0.5
    assert (counts[~keep] < 60).all()


def test_temperature_zero_and_next_to_it_give_the_likeliest():
    best = scores().argmax(1, keepdim=True).expand(-1, 3)
    uniform = np.tile([0.0, 0.5, 1 - 2**-53], (ROWS, 1))
    for temperature in (0.0, 1e-300, 1e-9):
        assert draw(scores(), uniform, temperature).tolist() == best.tolist()


def test_what_cannot_be_is_never_drawn():
    table = scores()
    table[:, [0, VOCAB - 1]] = -torch.inf
    uniform = np.tile([0.0, 2**-60, 1 - 2**-53], (ROWS, 1))
    drawn = draw(table, uniform, 1.0)
    assert torch.isfinite(table.gather(1, drawn)).all()
