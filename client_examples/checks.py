"""What a workload must have shown: numbers read from the metrics that its recipes wrote.

Owns the checks; each returns a sentence with its numbers, or raises NotShown with the one that is wrong. Starts nothing.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

TRAINED = "weights_version"
LEAST_FALL = 1e-3


class NotShown(Exception):
    """A number that is missing, not finite or not what it should be; the text names it."""


@dataclass(frozen=True)
class Metrics:
    """The records that a recipe wrote, one a step, and the paths of its last checkpoint."""

    stage: str
    rows: list[dict]
    final: dict

    @classmethod
    def read(cls, stage: str, logs: Path) -> Metrics:
        rows = [json.loads(line) for line in _lines(logs / "metrics.jsonl")]
        final = [record for record in map(json.loads, _lines(logs / "checkpoints.jsonl")) if record["name"] == "final"]
        if not rows or not final or not final[-1].get("state_path"):
            raise NotShown(f"{stage}: no metrics or no final checkpoint in {logs}")
        return cls(stage, rows, final[-1])

    def series(self, key: str) -> list[float]:
        """The values of a metric in the order of the steps that have it; at least one, all of them finite."""
        values = [float(row[key]) for row in self.rows if key in row]
        if not values:
            raise NotShown(f"{self.stage}: there is no {key} among {', '.join(sorted(self.rows[-1]))}")
        if not all(map(math.isfinite, values)):
            raise NotShown(f"{self.stage}: {key} is not finite: {_short(values)}")
        return values


Check = Callable[[Mapping[str, Metrics]], str]


def falls(stage: str, key: str) -> Check:
    """The mean of the last third is below that of the first, by more than the rounding of equal weights."""
    def check(found: Mapping[str, Metrics]) -> str:
        values = found[stage].series(key)
        part = max(1, len(values) // 3)
        first, last = sum(values[:part]) / part, sum(values[-part:]) / part
        if len(values) < 2 or not first - last > LEAST_FALL * abs(first):
            raise NotShown(f"{stage}: {key} does not fall: {_short(values)}")
        return f"{key} fell from {first:.4g} to {last:.4g}"
    return check


def begins(stage: str, key: str, *, at: float, within: float) -> Check:
    """The first value of a metric."""
    def check(found: Mapping[str, Metrics]) -> str:
        value = found[stage].series(key)[0]
        if abs(value - at) > within:
            raise NotShown(f"{stage}: {key} begins with {value:.6g} where {at:g} is due, within {within:g}")
        return f"{key} began with {value:.3g}"
    return check


def begins_above(stage: str, key: str, low: float) -> Check:
    """The first value of a metric."""
    def check(found: Mapping[str, Metrics]) -> str:
        value = found[stage].series(key)[0]
        if not value > low:
            raise NotShown(f"{stage}: {key} begins with {value:.6g}, which is not above {low:g}")
        return f"{key} began with {value:.3g}"
    return check


def between(stage: str, key: str, low: float, high: float = math.inf) -> Check:
    """All values of a metric; the bounds themselves are outside."""
    def check(found: Mapping[str, Metrics]) -> str:
        values = found[stage].series(key)
        if not all(low < value < high for value in values):
            raise NotShown(f"{stage}: {key} leaves the range from {low:g} to {high:g}: {_short(values)}")
        return f"{key} was {_short(values)}"
    return check


def finite(stage: str, key: str) -> Check:
    return between(stage, key, -math.inf)


def trained(stage: str) -> Check:
    """The run's weights changed from each step to the next."""
    def check(found: Mapping[str, Metrics]) -> str:
        versions = found[stage].series(TRAINED)
        if any(after <= before for before, after in zip(versions, versions[1:])):
            raise NotShown(f"{stage}: {TRAINED} stands still: {_short(versions)}")
        return f"{len(versions)} steps"
    return check


def absent(stage: str, key: str) -> Check:
    def check(found: Mapping[str, Metrics]) -> str:
        if any(key in row for row in found[stage].rows):
            raise NotShown(f"{stage}: {key} is there, and nothing should have been sampled")
        return f"no {key}"
    return check


def _lines(file: Path) -> list[str]:
    return file.read_text().splitlines() if file.exists() else []


def _short(values: list[float]) -> str:
    shown = [f"{value:.4g}" for value in values]
    return ", ".join(shown if len(shown) <= 6 else [*shown[:3], "...", *shown[-2:]])
