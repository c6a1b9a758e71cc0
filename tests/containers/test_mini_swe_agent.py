"""mini-swe-agent itself, from the baked runtime that is mounted into the task's container.

Its own prompts are longer than the small model's context, so the answers are a script's and the server has the tests' engine.
"""

import tempfile
from pathlib import Path

import pytest
from chain import HARBOR, Chain
from fake_server import FakeServer

from verl_tinker.models import resolve_model

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
SCRIPT = HARBOR / "examples" / "scripts" / "median_mini.json"


@pytest.fixture
def folder(chain):
    """A second $TASK folder beside the first, whose ROCK serves it too."""
    other = Chain(Path(tempfile.mkdtemp(prefix="verl-tinker-mini-")), "mini-swe-agent", "tinker-harbor:mini",
                  ("--agent-python", "system"))
    other.prepare("--tokenizer", str(resolve_model("bundled:tiny")), "--input-tokens", "16000", "--output-tokens", "500",
                  "--context-tokens", "20000", "--turns", "4", model="fake/tied")
    yield other
    other.stop()


def test_it_repairs_the_repository(folder, tmp_path):
    server = FakeServer(tmp_path / "server", "--context", "20000", "--vocab", "49152").start()
    try:
        run = folder.run("rollout", "--base-url", server.url, "--scripted", str(SCRIPT))
    finally:
        server.kill()
    assert run.code == 0, run.log[-4000:]
    summary = run.read("summary.json")
    # It leaves no last words, which are half of the grade.
    assert summary["reward"] == 0.5 and summary["turns_used"] == 2
    (report,) = run.results.glob("harbor/rollout/*/verifier/report.json")
    assert '"resolved": true' in report.read_text()
    (trajectory,) = run.results.glob("harbor/rollout/*/agent/mini.traj.json")
    assert "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" in trajectory.read_text()
