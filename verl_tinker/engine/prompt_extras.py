"""Targets and draws of a prompt: what is asked of its scores beside vLLM's own top k.

Owns their way through vLLM: to the process that holds the model in a request's `extra_args`, and back in columns of the
prompt's table of log-probabilities. Does not hook vLLM: `prompt_logprobs` does.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verl_tinker.core.types import NO_TARGET, Draws, SampleRequest

EXTRA_ARG = "prompt_extras"
# The probabilities of this many tokens at once are held in float64.
_BLOCK = 1 << 22


@dataclass(frozen=True)
class Extras:
    """What one request asks for. `rows` and `ids`, int64[C]: its targets, row by row; row i is prompt position i + 1.

    vLLM bounds the temperature from below, so the draws have their own.
    """

    rows: np.ndarray
    ids: np.ndarray
    k: int
    temperature: float
    seed: int

    @classmethod
    def of(cls, request: SampleRequest) -> Extras | None:
        """None when nothing is asked for. A request without a seed gets a random one."""
        targets, k = request.target_prompt, request.prompt_alt_k
        if targets is None and not k:
            return None
        rows = ids = np.zeros(0, np.int64)
        if targets is not None:
            asked = targets.values != NO_TARGET
            rows, ids = targets.rows()[asked], targets.values[asked]
        seed = secrets.randbits(63) if request.params.seed is None else request.params.seed % 2**64
        return cls(rows, ids, k, request.params.temperature, seed)

    def argument(self) -> dict[str, Any]:
        """Plain values, which vLLM can send to another process."""
        return {"rows": self.rows.astype(np.int64).tobytes(), "ids": self.ids.astype(np.int64).tobytes(),
                "k": self.k, "temperature": self.temperature, "seed": self.seed}

    @classmethod
    def read(cls, argument: dict[str, Any]) -> Extras:
        # The copies are writable, which torch wants of an array that it shares.
        arrays = {name: np.frombuffer(bytearray(argument[name]), np.int64) for name in ("rows", "ids")}
        return cls(**{**argument, **arrays})

    def target_columns(self, rows: int) -> int:
        """So many columns of a table hold all targets, one cell each."""
        return -(-len(self.ids) // rows) if len(self.ids) else 0

    def columns(self, rows: int) -> int:
        """How many columns a table of so many rows needs for targets and draws."""
        return self.target_columns(rows) + self.k

    def unpack(self, ids: np.ndarray, logprobs: np.ndarray) -> tuple[np.ndarray, Draws]:
        """The targets' log-probabilities, float32[C], and the draws, from the columns that `Collected.fill` filled."""
        at = self.target_columns(len(ids))
        return logprobs[:, :at].ravel()[: len(self.ids)], Draws(ids[:, at:].copy(), logprobs[:, at:].copy())


class Collected:
    """The extras of one request while its prompt goes through the model, in one chunk or several."""

    def __init__(self, extras: Extras, rows: int):
        self.extras = extras
        self.targets = np.zeros(len(extras.ids), np.float32)
        self.ids = np.zeros((rows, extras.k), np.int32)
        self.logprobs = np.zeros((rows, extras.k), np.float32)

    def add(self, scores: torch.Tensor, first: int) -> None:
        """scores: float32[n, V], log-probabilities of rows `first` and later; the same rows may come again."""
        extras, end = self.extras, first + len(scores)
        low, high = np.searchsorted(extras.rows, (first, end))
        rows = torch.as_tensor(extras.rows[low:high] - first, device=scores.device)
        self.targets[low:high] = scores[rows, torch.as_tensor(extras.ids[low:high], device=scores.device)].cpu().numpy()
        if extras.k:
            # Each row has its own stream, so that chunks and other requests change nothing.
            streams = (np.random.default_rng([extras.seed, row]) for row in range(first, end))
            ids = draw(scores, np.stack([stream.random(extras.k) for stream in streams]), extras.temperature)
            self.ids[first:end] = ids.cpu().numpy()
            self.logprobs[first:end] = scores.gather(1, ids).cpu().numpy()

    def fill(self, ids: torch.Tensor, logprobs: torch.Tensor) -> None:
        """Put everything into the last columns of a table, int32 and float32 [rows, any + columns]."""
        rows, width = ids.shape
        at, end = width - self.extras.columns(rows), width - self.extras.k
        # A row's targets may be many and another's none, so they fill the columns one after the other.
        cells = np.zeros(rows * (end - at), np.float32)
        cells[: len(self.targets)] = self.targets
        logprobs[:, at:end] = torch.from_numpy(cells.reshape(rows, end - at))
        ids[:, end:] = torch.from_numpy(self.ids)
        logprobs[:, end:] = torch.from_numpy(self.logprobs)


def draw(scores: torch.Tensor, uniform: np.ndarray, temperature: float) -> torch.Tensor:
    """int64[n, k]: for each row of log-probabilities [n, V] the tokens at the quantiles `uniform`, float64[n, k].

    Temperature 0 gives the likeliest token.
    """
    if temperature == 0:
        return scores.argmax(1, keepdim=True).repeat(1, uniform.shape[1])
    size, drawn = max(1, _BLOCK // scores.shape[1]), []
    for part, quantiles in zip(scores.split(size), torch.as_tensor(uniform, device=scores.device).split(size)):
        gaps = (part - part.amax(1, keepdim=True)).double()
        ladder = torch.softmax(gaps / temperature, 1).cumsum(1)
        drawn.append(torch.searchsorted(ladder, quantiles * ladder[:, -1:], right=True))
    return torch.cat(drawn).clamp(max=scores.shape[1] - 1)
