"""The check after every weight transfer: do trainer and sampler give the same log-probabilities?

Owns the fixed probe tokens, the tolerance, what both sides said before, and the verdict. Does not run either side.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_tinker.core.errors import SyncError

FILE = "probe.json"
_LENGTH = 48
# Rounding, measured with SmolLM2-135M against float64: 1e-5 on average and 3e-5 at most with AVX-512, 9e-5 at one position
# where vLLM's kernels have AVX2 alone.
_FLOAT32_MEAN_LIMIT = 5e-5
_FLOAT32_LIMIT = 5e-4
_BF16_MEAN_LIMIT = 0.1
_BF16_MIN_CORRELATION = 0.9
_BF16_LEAST_MOVE = 0.08


def probe_tokens(vocab_size: int) -> np.ndarray:
    """int32[48], spread over the whole vocabulary by a fixed generator."""
    return np.random.default_rng(20).integers(0, vocab_size, _LENGTH).astype(np.int32)


def write(folder: Path, run_id: str, tokens: np.ndarray, logprobs: np.ndarray) -> None:
    """`logprobs`: float32[47], the trainer's log-probabilities of tokens[1:]."""
    (folder / FILE).write_text(json.dumps({
        "run": run_id, "tokens": tokens.tolist(), "logprobs": [float(x) for x in logprobs]}))


def read(folder: Path) -> tuple[str, np.ndarray] | None:
    """The run that was exported into a folder, and the trainer's log-probabilities; None when there are none."""
    file = folder / FILE
    if not file.exists():
        return None
    saved = json.loads(file.read_text())
    return saved["run"], np.asarray(saved["logprobs"], np.float32)


class Comparison:
    """Judges each transfer. In float32 (`exact`) they must agree within 5e-5 nats on average and 5e-4 everywhere.

    In bf16 rounding hides small steps, so the mean gap is bounded, and the sampler must have moved as the trainer has
    since the run's last transfer. Moves too small to be told from rounding add up until they can be.
    """

    def __init__(self, exact: bool):
        self.exact = exact
        self._last: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def check(self, version: int, run_id: str, trainer: np.ndarray, sampler: np.ndarray) -> None:
        """Raise SyncError beyond the limits. `run_id` "" is the base model, from which every run starts."""
        gap = np.abs(trainer - sampler)
        if self.exact:
            if not (gap.max() <= _FLOAT32_LIMIT and gap.mean() <= _FLOAT32_MEAN_LIMIT):
                raise SyncError(f"version {version}: trainer and sampler differ by {gap.max():.2e} nats on the probe (limit "
                                f"{_FLOAT32_LIMIT:.0e}; on average {gap.mean():.2e}, limit {_FLOAT32_MEAN_LIMIT:.0e}); the "
                                "version is not served")
            return
        if not gap.mean() <= _BF16_MEAN_LIMIT:
            raise SyncError(f"version {version}: trainer and sampler differ by {gap.mean():.3f} nats on average "
                            f"(limit {_BF16_MEAN_LIMIT}); the version is not served")
        last = self._last.get(run_id) or self._last.get("")
        if last is None or self._moved_alike(version, trainer - last[0], sampler - last[1]):
            self._last[run_id] = (trainer, sampler)

    @staticmethod
    def _moved_alike(version: int, trainer: np.ndarray, sampler: np.ndarray) -> bool:
        """Whether the move was large enough to tell; SyncError when it was and the sides differ."""
        if np.abs(trainer).mean() <= _BF16_LEAST_MOVE:
            return False
        correlation = float(np.corrcoef(trainer, sampler)[0, 1])
        if not correlation > _BF16_MIN_CORRELATION:
            raise SyncError(f"version {version}: the sampler moved differently from the trainer "
                            f"(correlation {correlation:.2f}); the version is not served")
        return True
