"""Runs the tests that need the cookbook or ROCK's SDK, in the environment that a run of harbor_env has.

Each file of `client/` is one pytest process there; its output is the message when it fails.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from environments import ROOT

FILES = sorted((Path(__file__).parent / "client").glob("client_*.py"))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_control_environment(control_environment, file):
    python, variables = control_environment
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", file], cwd=ROOT, env={**os.environ, **variables},
        capture_output=True, text=True, timeout=1750)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 0 and "skipped" not in done.stdout


def test_no_file_is_forgotten():
    """Files of the folder are either tests by name, or helpers that a test imports."""
    others = {file.name for file in (Path(__file__).parent / "client").glob("*.py")} - {file.name for file in FILES}
    assert FILES and all(name == "conftest.py" or name.startswith("support_") for name in others)
