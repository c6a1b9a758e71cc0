"""The record of an episode: what each turn was sampled from and what was sampled, and the training sequences that follow.

Owns tokens and log-probabilities as the server gave them. Does not render, tokenise or score anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Turn:
    """One sampled answer. `prompt` and `sampled` are token ids, `logprobs` nats of each sampled token under the sampler.

    `stop_reason` is "stop", or "length" where the answer reached its limit; `request` and `answer` are the chat bodies.
    """

    index: int
    prompt: tuple[int, ...]
    sampled: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    request: dict = field(default_factory=dict, compare=False, repr=False)
    answer: dict = field(default_factory=dict, compare=False, repr=False)

    def __post_init__(self):
        if len(self.sampled) != len(self.logprobs):
            raise ValueError(
                f"turn {self.index}: {len(self.sampled)} sampled tokens and {len(self.logprobs)} log-probabilities")


@dataclass
class Sequence:
    """Turns that extend one another, as one run of tokens.

    `sampled[i]` tells whether the policy drew `tokens[i]`; `logprobs[i]` is 0.0 where it did not. All have one length.
    """

    tokens: list[int]
    sampled: list[bool]
    logprobs: list[float]
    turns: list[int]

    @classmethod
    def empty(cls) -> Sequence:
        return cls([], [], [], [])

    def extended_by(self, turn: Turn) -> bool:
        """Does the turn's prompt begin with all of this sequence? Only then is training on both at once the same."""
        return turn.prompt[: len(self.tokens)] == tuple(self.tokens)

    def append(self, turn: Turn) -> None:
        new = turn.prompt[len(self.tokens) :]
        self.tokens += [*new, *turn.sampled]
        self.sampled += [False] * len(new) + [True] * len(turn.sampled)
        self.logprobs += [0.0] * len(new) + list(turn.logprobs)
        self.turns.append(turn.index)


def sequences(turns: Iterable[Turn]) -> list[Sequence]:
    """One sequence for each unbroken chain of turns, in order. A turn without sampled tokens adds nothing to train on."""
    found: list[Sequence] = []
    for turn in turns:
        if not turn.sampled:
            continue
        if not found or not found[-1].extended_by(turn):
            found.append(Sequence.empty())
        found[-1].append(turn)
    return found
