#!/bin/bash
# For the oracle agent, and for tests: the repaired function.
cat > "${REPOSITORY:-/testbed}/stats.py" <<'PY'
"""Small statistics."""


def median(values):
    """The middle of the values; of two middle ones their mean."""
    ordered, half = sorted(values), len(values) // 2
    return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2


def spread(values):
    """The largest less the smallest."""
    return max(values) - min(values)
PY
