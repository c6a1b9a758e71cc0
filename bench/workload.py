"""The work that both sides of the performance benchmark do.

Owns the model's name, the sizes and the tokens. Does not measure.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 32
NEW_TOKENS, CONCURRENCY = 64, (1, 16, 64)
SEQUENCES, LENGTH = 16, 256
# The last section of docs/performance.md, which a program of its own measures.
LOAD_HEADING = "## Many samples at once"


def prompts(count: int) -> list[list[int]]:
    """`count` prompts of 32 tokens."""
    rng = np.random.default_rng(0)
    return [rng.integers(100, 40000, 32).tolist() for _ in range(count)]


def train_rows() -> np.ndarray:
    """int64[SEQUENCES, LENGTH + 1]: inputs and, one later, targets."""
    return np.random.default_rng(1).integers(100, 40000, (SEQUENCES, LENGTH + 1))


def tiny_rows() -> np.ndarray:
    """int64[2, 9], so small that the call's own cost shows."""
    return train_rows()[:2, :9]
