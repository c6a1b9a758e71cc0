"""Which commands of one model run together: single ones at once, the chunks of one forward_backward as one call.

Owns the grouping by sequence numbers. Runs nothing and knows no time: whoever holds it calls `expire`.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True)
class Entry(Generic[Item]):
    """A command. Those that may run as one call share a `join` key; None is a command that runs alone."""

    item: Item
    seq: int | None
    join: Hashable | None = None


class Planner(Generic[Item]):
    """Turns arrivals into units of work, in the order in which they may run.

    The client sends the chunks of one call concurrently and the first of them last, so a chunk that leaves a gap
    opens a group, and the one that fills the last gap closes it. The client goes on to its next command only when
    every chunk was accepted or given up, so any other command closes the group as it is. A number that never comes
    leaves a group open until `expire`; it blocks nothing else.
    """

    def __init__(self):
        self._next = 1
        self._open: list[Entry[Item]] = []

    @property
    def waiting(self) -> list[Item]:
        """What is held back for the chunks that are missing."""
        return [entry.item for entry in self._open]

    @property
    def missing(self) -> list[int]:
        """The first few numbers that are missing; clients choose the numbers, so the gap may be as wide as they like."""
        held = {entry.seq for entry in self._open}
        wanted = itertools.islice(range(self._next, max(held, default=0)), len(held) + 8)
        return [n for n in wanted if n not in held][:8]

    def arrive(self, entry: Entry[Item]) -> list[list[Item]]:
        """The units that may run now; an empty list while a group waits for its other chunks."""
        if entry.join is None or entry.seq is None:
            units = self.expire()
            self._next = max(self._next, (entry.seq or 0) + 1)
            return [*units, [entry.item]]
        if entry.seq < self._next or (entry.seq == self._next and not self._open):
            self._next = max(self._next, entry.seq + 1)
            return [[entry.item]]
        self._open.append(entry)
        highest = max(e.seq for e in self._open)
        return self.expire() if len(self._open) == highest - self._next + 1 else []

    def expire(self) -> list[list[Item]]:
        """Close the open group with what is there: one unit for each stretch of one join key, by number."""
        units: list[list[Item]] = []
        last = None
        for entry in sorted(self._open, key=lambda e: e.seq):
            if units and entry.join == last:
                units[-1].append(entry.item)
            else:
                units.append([entry.item])
            last = entry.join
            self._next = entry.seq + 1
        self._open = []
        return units
