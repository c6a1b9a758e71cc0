"""From episodes to training data: returns, advantages, the KL penalty, and the datums of the Tinker API.

Owns the arithmetic, as functions of their arguments. Does not call a server: `harbor_env.learner` does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Rows
from dataclasses import dataclass

import tinker

from harbor_env.record import Sequence, Turn, sequences

# Sampler and reference differ by rounding. AdamW would make full steps of what is below it.
NEGLIGIBLE = 1e-5


@dataclass(frozen=True)
class Example:
    """A sequence and the advantage of each of its tokens, 0.0 where the policy drew none."""

    sequence: Sequence
    advantages: tuple[float, ...]


def examples(turns: Rows[Turn], advantage: float, max_transitions: int | None = None) -> list[Example]:
    """The first `max_transitions` turns (all, if None) as sequences, each sampled token with the episode's advantage."""
    chosen = [turn for turn in sorted(turns, key=lambda t: t.index) if turn.sampled][:max_transitions]
    return [Example(s, tuple(advantage if drawn else 0.0 for drawn in s.sampled)) for s in sequences(chosen)]


def group_advantages(returns: Rows[float], divide_by_deviation: bool = False) -> list[float]:
    """Each return less the mean of its group; on demand divided by the group's standard deviation."""
    mean = math.fsum(returns) / len(returns)
    centred = [value - mean for value in returns]
    if not divide_by_deviation:
        return centred
    deviation = math.sqrt(math.fsum(c * c for c in centred) / len(centred))
    return [c / deviation if deviation else 0.0 for c in centred]


def with_kl_penalty(rows: Rows[Example], reference: Rows[Rows[float | None]], beta: float) -> tuple[list[Example], float]:
    """Adds beta * (mean d - d) to the advantage of each sampled token, where d is its log-probability less the reference's.

    `reference[i]`: nats of each token of sequence i under the reference; unscored ones are None. Returns the mean d too.
    """
    gaps = [[q - r if drawn else 0.0
             for q, r, drawn in zip(row.sequence.logprobs, scores, row.sequence.sampled, strict=True)]
            for row, scores in zip(rows, reference, strict=True)]
    count = sum(sum(row.sequence.sampled) for row in rows)
    mean = math.fsum(gap for line in gaps for gap in line) / count if count else 0.0
    result = []
    for row, line in zip(rows, gaps, strict=True):
        added = (a + beta * (mean - gap) if drawn else 0.0
                 for a, gap, drawn in zip(row.advantages, line, row.sequence.sampled, strict=True))
        result.append(Example(row.sequence, tuple(added)))
    return result, mean


def is_nothing(rows: Rows[Example]) -> bool:
    """Would a step on these change nothing but by rounding?"""
    return all(abs(advantage) < NEGLIGIBLE for row in rows for advantage in row.advantages)


def datum(row: Example) -> tinker.Datum:
    """Position i of the input predicts token i + 1; the inputs beside it are shifted alike (float32[N - 1])."""
    tokens, n = row.sequence.tokens, len(row.sequence.tokens) - 1
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={
            "target_tokens": tinker.TensorData(data=tokens[1:], dtype="int64", shape=[n]),
            "logprobs": tinker.TensorData(data=row.sequence.logprobs[1:], dtype="float32", shape=[n]),
            "advantages": tinker.TensorData(data=list(row.advantages[1:]), dtype="float32", shape=[n]),
        })


def logprob_gap(rows: Rows[Example], trained: Rows[Rows[float]]) -> dict[str, float]:
    """How far the trainer's log-probabilities are from the sampler's on sampled tokens, in nats.

    `trained[i]`: the trainer's, of tokens 1 to N of sequence i.
    """
    gaps = [abs(p - q) for row, scores in zip(rows, trained, strict=True)
            for p, q, drawn in zip(scores, row.sequence.logprobs[1:], row.sequence.sampled[1:], strict=True) if drawn]
    return {"logprob_gap_mean": math.fsum(gaps) / len(gaps), "logprob_gap_max": max(gaps)} if gaps else {}
