"""run_single_test.py as its user starts it.

Owns the process. Does not judge what it says: tests do.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import run as launcher
from recipe import Recipes

SCRIPT = launcher.ROOT / "client_examples" / "run_single_test.py"


def run_workload(recipes: Recipes, tokenizer: Path, name: str, *flags: str, label: str = "", timeout: float) -> tuple[int, str]:
    """The exit code and the output of a workload's small form; `flags` are the cookbook's own."""
    command = [sys.executable, str(SCRIPT), "--lite", "--test-name", name, "--base-url", recipes.url, "--api-key", "tml-test",
               "--tokenizer-name-or-path", str(tokenizer), "--folder", str(recipes.folder / "work"),
               "--log-path", str(recipes.folder / "logs" / (name + label)), "--", *flags]
    ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=timeout)
    return ended.returncode, ended.stdout
