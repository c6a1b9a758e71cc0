"""Runs the tests that need the cookbook or ROCK's SDK, in the environment that a run of harbor_env has.

Each file of `client/` is one pytest process there; its output is the message when it fails.
"""

import os
import re
import subprocess
from pathlib import Path

import pytest
from environments import ROOT
from real_server import start_server, stop_server

HERE = Path(__file__).parent / "client"
FILES = sorted(HERE.glob("client_*.py"))


def run_there(control_environment, file, *options, **more):
    python, variables = control_environment
    done = subprocess.run(
        [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--color=no", *options, file], cwd=ROOT,
        env={**os.environ, **variables, **more}, capture_output=True, text=True, timeout=1750)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert int(re.search(r"(\d+) passed", done.stdout).group(1)) > 0 and "skipped" not in done.stdout


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_in_the_control_environment(control_environment, file):
    run_there(control_environment, file)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_long_forms_in_the_control_environment(control_environment):
    run_there(control_environment, HERE / "client_run.py", "-m", "full")


@pytest.mark.full
@pytest.mark.engine
@pytest.mark.timeout(1800)
def test_with_real_weights(control_environment, tmp_path):
    process, url = start_server(tmp_path, "server.model_path=bundled:tiny")
    try:
        run_there(control_environment, HERE / "engine_modes.py", HARBOR_TEST_SERVER_URL=url)
    finally:
        stop_server(process)


def test_no_file_is_forgotten():
    """Files of the folder are either tests by name, or helpers that a test imports."""
    others = {file.name for file in HERE.glob("*.py")} - {file.name for file in FILES}
    assert FILES and all(name.startswith("support_") for name in others - {"conftest.py", "engine_modes.py"})
