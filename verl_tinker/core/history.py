"""What happened lately: the curves of each run, tokens by second, and errors with their causes; a bounded memory of it.

Owns these and their bounds. Does not survive the server, and does not decide who sees what: `overview` does.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from verl_tinker.core.futures import Future
from verl_tinker.core.types import Datum, ForwardBackwardResult
from verl_tinker.core.watch import Watcher

_RUNS, _POINTS, _ERRORS, _SECONDS = 256, 2000, 200, 300


@dataclass(frozen=True)
class Point:
    """One optimizer step of a run: `values` by name, at `time` in seconds since 1970."""

    step: int
    time: float
    values: dict[str, float]


@dataclass(frozen=True)
class Failure:
    """An operation that ended with an error; `text` is what its client was told."""

    time: float
    kind: str
    owner: str
    model_id: str | None
    category: str
    text: str


@dataclass
class _Batch:
    """What the next step has seen so far."""

    loss: float = 0.0
    weight: float = 0.0
    tokens: int = 0
    drift: float = 0.0
    drift_weight: float = 0.0


@dataclass
class _Curve:
    points: deque[Point] = field(default_factory=lambda: deque(maxlen=_POINTS))
    batch: _Batch = field(default_factory=_Batch)
    steps: int = 0


class History(Watcher):
    """Fed by the engine's calls and by what settles."""

    def __init__(self):
        self.errors: deque[Failure] = deque(maxlen=_ERRORS)
        self._curves: OrderedDict[str, _Curve] = OrderedDict()
        self._rates: dict[str, deque[tuple[int, int]]] = {kind: deque(maxlen=_SECONDS) for kind in ("trained", "sampled")}

    def points(self, run_id: str, after: int = 0) -> list[Point]:
        """The steps of a run that are remembered, from the one after `after` on."""
        curve = self._curves.get(run_id)
        return [point for point in curve.points if point.step > after] if curve else []

    def last(self, run_id: str) -> Point | None:
        curve = self._curves.get(run_id)
        return curve.points[-1] if curve and curve.points else None

    def rates(self, seconds: int) -> dict[str, float]:
        """Tokens each second, over the last `seconds`."""
        since = time.time() - seconds
        return {kind: sum(count for at, count in counts if at >= since) / seconds for kind, counts in self._rates.items()}

    def settled(self, future: Future) -> None:
        error = future.error
        if error is not None:
            self.errors.append(Failure(
                time.time(), future.kind, future.owner, future.model_id, error.category, error.told))

    def engine_returned(self, name: str, arguments: tuple, result: Any) -> None:
        if name == "sample":
            self._count("sampled", sum(len(sequence.tokens) for sequence in result.sequences))
        elif name == "forward_backward":
            run_id, data, loss_fn, _, backward = arguments
            self._count("trained", sum(len(datum.tokens) for datum in data))
            if backward:
                _add(self._curve(run_id).batch, data, loss_fn, result)
        elif name == "optim_step":
            self._step(arguments[0], result)

    def _step(self, run_id: str, metrics: dict[str, float]) -> None:
        curve = self._curve(run_id)
        batch, curve.batch = curve.batch, _Batch()
        curve.steps += 1
        values = {"loss": batch.loss / batch.weight if batch.weight else math.nan, "tokens": float(batch.tokens)}
        if batch.drift_weight:
            values["sampler_kl"] = batch.drift / batch.drift_weight
        values |= {name.partition(":")[0]: float(value) for name, value in metrics.items()}
        curve.points.append(Point(curve.steps, time.time(), {k: v for k, v in values.items() if math.isfinite(v)}))

    def _curve(self, run_id: str) -> _Curve:
        curve = self._curves.setdefault(run_id, _Curve())
        self._curves.move_to_end(run_id)
        if len(self._curves) > _RUNS:
            self._curves.popitem(last=False)
        return curve

    def _count(self, kind: str, tokens: int) -> None:
        second, counts = int(time.time()), self._rates[kind]
        if counts and counts[-1][0] == second:
            tokens += counts.pop()[1]
        counts.append((second, tokens))


def _add(batch: _Batch, data: Sequence[Datum], loss_fn: str, result: ForwardBackwardResult) -> None:
    """The loss for each token that has one, and how far the trainer is from the sampler there: mean of log q/p, in nats."""
    batch.loss += float(result.losses.sum(dtype="float64"))
    batch.tokens += sum(len(datum.tokens) for datum in data)
    for datum, logprobs in zip(data, result.logprobs, strict=True):
        weights = datum.inputs.get("weights" if loss_fn == "cross_entropy" else "advantages")
        if weights is None:
            batch.weight += logprobs.size
            continue
        batch.weight += float(weights.sum()) if loss_fn == "cross_entropy" else float(np.count_nonzero(weights))
        sampled = datum.inputs.get("logprobs")
        if sampled is not None and sampled.shape == logprobs.shape:
            counted = weights != 0
            batch.drift += float((sampled - logprobs)[counted].sum(dtype="float64"))
            batch.drift_weight += float(np.count_nonzero(counted))
