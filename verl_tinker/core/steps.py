"""The chunks of one forward_backward as one call of the engine, and its result as one result a chunk.

Owns joining and splitting. Does not decide which chunks belong together: `verl_tinker.core.planner` does.
"""

from __future__ import annotations

from typing import Any

from verl_tinker.core.errors import EngineError, TinkerError
from verl_tinker.core.records import RecordRing
from verl_tinker.core.runs import Run
from verl_tinker.core.types import Datum, ForwardBackwardResult
from verl_tinker.core.validate import check_batch, find_model
from verl_tinker.engine.base import Engine

_MOST_DATUMS = 16_384


class Steps:
    """Runs units of chunks; see `verl_tinker.core.training`."""

    def __init__(self, engine: Engine, records: RecordRing):
        self._engine = engine
        self._records = records

    async def run(
        self, run: Run, batches: list[list[Datum]], loss_fn: str, config: dict[str, float | str], backward: bool
    ) -> list[ForwardBackwardResult | TinkerError]:
        """For each batch its result or its own error; a batch that fails adds no gradient, the others do."""
        model = find_model(self._engine.base_models(), run.spec.base_model)
        outcomes: list[Any] = []
        settings: dict[str, float] = {}
        for data in batches:
            try:
                if loss_fn == "stable_reinforce":
                    session_id = run.session.session_id
                    data = [self._records.resolve(session_id, f"data[{i}]", datum) for i, datum in enumerate(data)]
                checked, settings = check_batch(data, loss_fn, config, model)
                outcomes.append(checked)
            except TinkerError as error:
                outcomes.append(error)
        good = [i for i, outcome in enumerate(outcomes) if not isinstance(outcome, TinkerError)]
        for group in _within_limit(good, outcomes):
            results = await self._together(run, [outcomes[i] for i in group], loss_fn, settings, backward)
            for i, result in zip(group, results, strict=True):
                outcomes[i] = result
        return outcomes

    async def _together(
        self, run: Run, batches: list[list[Datum]], loss_fn: str, settings: dict[str, float], backward: bool
    ) -> list[ForwardBackwardResult | TinkerError]:
        joined = [datum for data in batches for datum in data]
        try:
            result = await self._engine.forward_backward(run.run_id, joined, loss_fn, settings, backward)
        except TinkerError as error:
            if len(batches) == 1:
                return [_without_gradient(error)]
            # A failed call added nothing, so each may be tried alone to find the one that is to blame.
            return [(await self._together(run, [data], loss_fn, settings, backward))[0] for data in batches]
        run.has_gradient = run.has_gradient or backward
        return _split(result, batches)


def _within_limit(numbers: list[int], batches: list[list[Datum]]) -> list[list[int]]:
    groups: list[list[int]] = []
    size = 0
    for i in numbers:
        if not groups or size + len(batches[i]) > _MOST_DATUMS:
            groups.append([])
            size = 0
        groups[-1].append(i)
        size += len(batches[i])
    return groups


def _split(result: ForwardBackwardResult, batches: list[list[Datum]]) -> list[ForwardBackwardResult]:
    if len(batches) == 1:
        return [result]
    parts, begin = [], 0
    for data in batches:
        here = slice(begin, begin + len(data))
        losses = result.losses[here]
        parts.append(ForwardBackwardResult(
            result.logprobs[here], losses, {**result.metrics, "loss:sum": float(losses.sum(dtype="float64"))}))
        begin += len(data)
    return parts


def _without_gradient(error: TinkerError) -> TinkerError:
    if isinstance(error, EngineError):
        return EngineError(f"{error} (this command added no gradient)")
    return error
