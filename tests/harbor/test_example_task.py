"""The example task's verifier grades from 0 to 1, in a folder as in a container, and its files are a Harbor task."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import harbor_env

TASK = Path(harbor_env.__file__).parent / "examples" / "median"
GOOD = "The median is the middle value of a sorted list."


def graded(folder, *, solved=False, answer=None, stats=None):
    repository = folder / "repo"
    shutil.copytree(TASK / "environment" / "repo", repository)
    (folder / "logs" / "agent").mkdir(parents=True)
    (folder / "logs" / "verifier").mkdir()
    variables = {**os.environ, "REPOSITORY": str(repository), "LOGS": str(folder / "logs")}
    if solved:
        subprocess.run(["bash", TASK / "solution" / "solve.sh"], env=variables, check=True)
    if stats is not None:
        (repository / "stats.py").write_text(stats)
    if answer is not None:
        (folder / "logs" / "agent" / "answer.txt").write_text(answer)
    script = (TASK / "tests" / "test.sh").read_text().replace("mkdir -p /logs/verifier\n", "")
    (folder / "test.sh").write_text(script)
    shutil.copy(TASK / "tests" / "grade.py", folder / "grade.py")
    subprocess.run(["bash", folder / "test.sh"], env=variables, check=True, capture_output=True)
    left = folder / "logs" / "verifier"
    return float((left / "reward.txt").read_text()), json.loads((left / "report.json").read_text())["median"]


@pytest.mark.parametrize(("solved", "answer", "reward"), [
    (False, None, 0.0), (True, GOOD, 1.0), (True, None, 0.5), (False, GOOD, 0.5), (False, "I do not know", 1 / 6),
    (False, "The median is a number", 0.5 * 4 / 6)])
def test_the_reward(tmp_path, solved, answer, reward):
    given, report = graded(tmp_path, solved=solved, answer=answer)
    assert given == pytest.approx(reward, abs=1e-5) and report["resolved"] == solved
    assert report["tests_status"]["FAIL_TO_PASS"]["success"] == (["even", "unsorted", "two", "mixed"] if solved else [])


def test_half_a_repair_is_half_of_its_share(tmp_path):
    stats = "def median(v):\n    return sorted(v)[len(v) // 2]\n\ndef spread(v):\n    return max(v) - min(v)\n"
    assert graded(tmp_path, stats=stats)[0] == pytest.approx(0.125)


@pytest.mark.parametrize("stats", [
    "", "def median(v):\n    return sorted(v)[0]\n\ndef spread(v):\n    return max(v) - min(v)\n"])
def test_what_breaks_something_else_is_worth_nothing(tmp_path, stats):
    given, report = graded(tmp_path, stats=stats, answer=GOOD)
    assert given == 0.0 and report["tests_status"]["PASS_TO_PASS"]["failure"]


def test_the_files_are_a_tasks():
    described = tomllib.loads((TASK / "task.toml").read_text())
    assert described["task"]["name"] == "tinker-harbor/median" and described["schema_version"] == "1.4"
    for name in ("instruction.md", "environment/Dockerfile", "tests/test.sh", "solution/solve.sh"):
        assert (TASK / name).is_file()
    assert os.access(TASK / "tests" / "test.sh", os.X_OK) and os.access(TASK / "solution" / "solve.sh", os.X_OK)
