"""The check after every weight transfer: do trainer and sampler give the same log-probabilities?

Owns the fixed probe tokens, the tolerance and the verdict. Does not run either side.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from verl_tinker.core.errors import SyncError

FILE = "probe.json"
_LENGTH = 48
_FLOAT32_LIMIT = 1e-4
_BF16_MEAN_LIMIT = 0.1
_BF16_MIN_CORRELATION = 0.9


def probe_tokens(vocab_size: int) -> np.ndarray:
    """int32[48], spread over the whole vocabulary by a fixed generator."""
    return np.random.default_rng(20).integers(0, vocab_size, _LENGTH).astype(np.int32)


def write(folder: Path, tokens: np.ndarray, logprobs: np.ndarray, base: np.ndarray) -> None:
    """`logprobs`: float32[47], the trainer's log-probabilities of tokens[1:]; `base`: the base model's."""
    (folder / FILE).write_text(json.dumps({
        "tokens": tokens.tolist(),
        "logprobs": [float(x) for x in logprobs],
        "base_logprobs": [float(x) for x in base],
    }))


def read(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    file = folder / FILE
    if not file.exists():
        return None
    saved = json.loads(file.read_text())
    return (np.asarray(saved["tokens"], np.int32), np.asarray(saved["logprobs"], np.float32),
            np.asarray(saved["base_logprobs"], np.float32))


def compare(version: int, trainer: np.ndarray, sampler: np.ndarray, base: np.ndarray, exact: bool) -> float:
    """The largest difference in nats; raises SyncError beyond the limit.

    In float32 (`exact`) each log-probability must agree within 1e-4. In bf16 rounding hides small steps, so
    the mean gap is bounded and the change against the base model must correlate with the trainer's change.
    """
    gap = np.abs(trainer - sampler)
    worst = float(gap.max())
    if exact and not worst <= _FLOAT32_LIMIT:
        raise SyncError(f"version {version}: trainer and sampler differ by {worst:.2e} nats on the probe "
                        f"(limit {_FLOAT32_LIMIT:.0e}); the version is not served")
    if not exact:
        _compare_rounded(version, trainer, sampler, base, float(gap.mean()))
    return worst


def _compare_rounded(version: int, trainer, sampler, base, mean_gap: float) -> None:
    if not mean_gap <= _BF16_MEAN_LIMIT:
        raise SyncError(f"version {version}: trainer and sampler differ by {mean_gap:.3f} nats on average "
                        f"(limit {_BF16_MEAN_LIMIT}); the version is not served")
    moved = trainer - base
    if np.abs(moved).mean() > _BF16_MEAN_LIMIT:
        correlation = float(np.corrcoef(moved, sampler - base)[0, 1])
        if not correlation > _BF16_MIN_CORRELATION:
            raise SyncError(f"version {version}: the sampler moved differently from the trainer "
                            f"(correlation {correlation:.2f}); the version is not served")
