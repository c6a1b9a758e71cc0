"""What all tests share: the support folder on the path, and a key of the form that the SDK demands."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
os.environ.setdefault("TINKER_API_KEY", "tml-test")
