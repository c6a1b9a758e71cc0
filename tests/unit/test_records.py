import time

import numpy as np
import pytest

from verl_tinker.core import records
from verl_tinker.core.errors import UserError
from verl_tinker.core.records import RecordRing
from verl_tinker.core.types import Datum, SampledSequence, SampleResult, Span

pytestmark = pytest.mark.timeout(120)


def sampled(*runs, length=3):
    """A result with one sequence for each start: tokens start, start + 1 .., log-probabilities -0.01 times the token."""
    tokens = [np.arange(start, start + length, dtype=np.int32) for start in runs]
    return SampleResult([SampledSequence(t, (-0.01 * t).astype(np.float32), "length") for t in tokens], 1)


def datum(targets, spans, advantages=None):
    targets = np.asarray(targets)
    advantages = np.ones(len(targets), np.float32) if advantages is None else np.float32(advantages)
    inputs = {"target_tokens": targets, "advantages": advantages, "logprobs": np.full(len(targets), -9, np.float32)}
    return Datum(np.zeros(len(targets), np.int32), inputs, tuple(spans))


@pytest.fixture
def ring(tmp_path):
    ring = RecordRing(tmp_path)
    ring.add("s", ["x", "y"], sampled(10, 20))
    return ring


def test_recorded_logprobs_take_the_place_of_the_clients(ring):
    spans = [Span("x", 1, 2, False), Span("x", 0, 3, True), Span("y", 1, 2, False), Span("y", 1, 2, True)]
    resolved = ring.resolve("s", "data[0]", datum([7, 7, 10, 11, 12, 7, 7, 21, 22], spans, [5, 5, 1, 2, 3, 5, 5, 4, 0]))
    np.testing.assert_allclose(resolved.inputs["logprobs"], [0, 0, -0.1, -0.11, -0.12, 0, 0, -0.21, -0.22], rtol=1e-6)
    # What a prompt held is not what the policy chose.
    assert resolved.inputs["advantages"].tolist() == [0, 0, 1, 2, 3, 0, 0, 4, 0]


@pytest.mark.parametrize("spans, text", [
    ([], r"data\[0\].loss_fn_input_spans is missing; stable_reinforce"),
    ([Span("x", 0, 2, True)], "covers 2 positions; it must tile the 3 of target_tokens"),
    ([Span("x", 1, 3, True)], r"spans\[0\] names tokens 1 to 3 of x, which has 3"),
    ([Span("y", 0, 3, True)], "target token 10 is not token 20, which y sampled at its position 0"),
    ([Span("z", 0, 3, True)], "sequence_id 'z' is not recorded for this session"),
    ([Span("x", 2**40, 3, True)], "which has 3"),
    ([Span("x", 0, -1, True), Span("x", 0, 4, True)], "must tile"),
])
def test_what_cannot_be_trained_on_is_refused_by_name(ring, spans, text):
    with pytest.raises(UserError, match=text):
        ring.resolve("s", "data[0]", datum([10, 11, 12], spans))


def test_another_session_is_refused(ring):
    with pytest.raises(UserError, match="'x' is not recorded for this session.*another session"):
        ring.resolve("t", "data[0]", datum([10, 11, 12], [Span("x", 0, 3, True)]))


def test_a_record_lives_a_day_from_its_last_use(ring, monkeypatch):
    wanted, now = datum([10, 11, 12], [Span("x", 0, 3, True)]), time.monotonic()
    for hours in (20, 40, 60):
        monkeypatch.setattr(records.time, "monotonic", lambda h=hours: now + h * 3600)
        ring.resolve("s", "data[0]", wanted)
    monkeypatch.setattr(records.time, "monotonic", lambda: now + 85 * 3600)
    with pytest.raises(UserError, match="more than a day ago"):
        ring.resolve("s", "data[0]", wanted)


def test_the_oldest_lie_on_disk_and_then_go(tmp_path):
    ring = RecordRing(tmp_path, memory_bytes=80_000, disk_bytes=150_000)
    for n in range(60):
        ring.add("s", [f"q{n}"], sampled(n, length=500))
    assert ring._size <= 80_000 and 0 < sum(file.stat().st_size for file in tmp_path.iterdir()) <= 150_000

    def resolves(n):
        ring.resolve("s", "data[0]", datum(np.arange(n, n + 500), [Span(f"q{n}", 0, 500, True)]))

    for n in (59, 58, 35):
        resolves(n)
    spilled = [n for n in range(60) if f"q{n}" in ring._spilled]
    assert len(spilled) > 10
    for n in spilled:
        resolves(n)
    with pytest.raises(UserError, match="so many sequences ago"):
        resolves(0)
