"""The work that both sides of the performance benchmark do.

Owns the model's name, the sizes, the tokens and how a section gets into the page. Does not measure.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
RANK = 32
NEW_TOKENS, CONCURRENCY = 64, (1, 16, 64)
SEQUENCES, LENGTH = 16, 256
# From here on docs/performance.md has sections that programs of their own measure.
LOAD_HEADING = "## Many samples at once"
GROUP, PROMPT_LENGTHS = 8, (1024, 100, 30)


def write_section(text: str) -> None:
    """Put a section into docs/performance.md, in the place of the one with its heading or at the end."""
    page = ROOT / "docs" / "performance.md"
    parts = re.split("(?m)^(?=## )", page.read_text().rstrip() + "\n")
    heading = text.partition("\n")[0]
    at = next((i for i, part in enumerate(parts) if part.partition("\n")[0] == heading), len(parts))
    parts[at : at + 1] = [text]
    page.write_text("\n\n".join(part.strip() for part in parts) + "\n")


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
