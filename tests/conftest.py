"""What all tests share: the repository and the support folder on the path, and a key of the form that the SDK demands."""

import os
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent / "support"), str(Path(__file__).parents[1])]
os.environ.setdefault("TINKER_API_KEY", "tml-test")
