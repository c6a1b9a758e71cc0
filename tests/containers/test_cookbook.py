"""The cookbook's own harbor_rl evaluation, with its sandboxes from ROCK.

Its grader reads no last words, so the repaired repository is worth one half there.
"""

import re
import subprocess

import pytest
from chain import HARBOR, MODEL, OUTER, ROOT, call, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A folder in which the model's hub name is found without a hub."""
    folder = tmp_path_factory.mktemp("names")
    subprocess.run([ROOT / ".client-venv/bin/python", ROOT / "client_examples/offline.py", folder], check=True)
    return folder


@pytest.mark.parametrize(("repaired", "reward"), [(False, 0.0), (True, 0.5)])
def test_an_evaluation_through_our_factory(chain, server, names, tmp_path, repaired, reward):
    task = HARBOR / "examples" / "median"
    lines = [f"FROM {OUTER}", "COPY environment/repo /testbed", "COPY solution /solution",
             *["RUN bash /solution/solve.sh"] * repaired]
    image = f"tinker-harbor-cookbook:{'repaired' if repaired else 'broken'}"
    (tmp_path / "Dockerfile").write_text("\n".join(lines) + "\n")
    docker("build", "--quiet", "--tag", image, "--file", str(tmp_path / "Dockerfile"), str(task))
    output = call(chain.python, "-m", "harbor_env.cookbook", "eval", f"model_name={MODEL}", "renderer_name=qwen3_instruct",
                  f"base_url={server}", "max_turns=2", "max_tokens=60", f"output_path={tmp_path}", cwd=names, timeout=500,
                  env={**chain.variables, "HARBOR_TASK_IMAGE": image, "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-test"})
    (line,) = next(tmp_path.glob("*/asummary.txt")).read_text().splitlines()
    name, got, turns, _, verdict = line.split()
    assert name == "median" and float(got) == reward and int(turns) in (1, 2), output[-3000:]
    assert verdict == ("PASS" if repaired else "FAIL") and not list(tmp_path.glob("*/aerr.txt"))
    assert re.search(r"median", next(tmp_path.glob("*/median.txt")).read_text())
