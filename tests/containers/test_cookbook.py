"""The cookbook's own harbor_rl, evaluation and training, with its sandboxes from ROCK.

Its grader reads no last words, so the repaired repository is worth one half there.
"""

import json
import re
import subprocess
from pathlib import Path

import pytest
from chain import HARBOR, MODEL, OUTER, ROOT, call, docker

pytestmark = [pytest.mark.containers, pytest.mark.timeout(600)]
TASK = HARBOR / "examples" / "median"


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """A folder in which the model's hub name is found without a hub."""
    folder = tmp_path_factory.mktemp("names")
    subprocess.run([ROOT / ".client-venv/bin/python", ROOT / "client_examples/offline.py", folder], check=True)
    return folder


def image(folder, repaired: bool) -> str:
    lines = [f"FROM {OUTER}", "COPY environment/repo /testbed", "COPY solution /solution",
             *["RUN bash /solution/solve.sh"] * repaired]
    name = f"tinker-harbor-cookbook:{'repaired' if repaired else 'broken'}"
    (folder / "Dockerfile").write_text("\n".join(lines) + "\n")
    docker("build", "--quiet", "--tag", name, "--file", str(folder / "Dockerfile"), str(TASK))
    return name


def cookbook(chain, names, image: str, *arguments: str) -> str:
    """What the command said, which knows the model by its hub name."""
    return call(chain.python, *arguments, cwd=names, timeout=500, env={
        **chain.variables, "HARBOR_TASK_IMAGE": image, "HF_HUB_OFFLINE": "1", "TINKER_API_KEY": "tml-test"})


@pytest.mark.parametrize(("repaired", "reward"), [(False, 0.0), (True, 0.5)])
def test_an_evaluation_through_our_factory(chain, server, names, tmp_path, repaired, reward):
    output = cookbook(chain, names, image(tmp_path, repaired), "-m", "harbor_env.cookbook", "eval", f"model_name={MODEL}",
                      "renderer_name=qwen3_instruct", f"base_url={server}", "max_turns=2", "max_tokens=60",
                      f"output_path={tmp_path}")
    (line,) = next(tmp_path.glob("*/asummary.txt")).read_text().splitlines()
    name, got, turns, _, verdict = line.split()
    assert name == "median" and float(got) == reward and int(turns) in (1, 2), output[-3000:]
    assert verdict == ("PASS" if repaired else "FAIL") and not list(tmp_path.glob("*/aerr.txt"))
    assert re.search(r"median", next(tmp_path.glob("*/median.txt")).read_text())


def test_training_through_our_factory_makes_the_call_that_repairs_likelier(chain, server, names, tmp_path):
    """The policy was taught two tool calls; ROCK runs what it says, the verifier tells them apart, one step follows."""
    broken = image(tmp_path, repaired=False)

    def two_calls(what: str, *more: str):
        script = Path(__file__).with_name("two_calls.py")
        return json.loads(cookbook(chain, names, broken, script, what, server, MODEL, TASK, *more).splitlines()[-1])

    taught = two_calls("teach")
    for attempt in range(3):
        run = tmp_path / f"run{attempt}"
        output = cookbook(
            chain, names, broken, "-m", "harbor_env.cookbook", "train", f"model_name={MODEL}", "renderer_name=qwen3_instruct",
            f"base_url={server}", f"load_checkpoint_path={taught['state']}", "lora_rank=8", "max_turns=1", "max_tokens=60",
            "group_size=6", "groups_per_batch=1", "learning_rate=3e-4", "max_steps=1", "eval_every=0", f"log_path={run}")
        metrics = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
        # Six equal answers in a row teach nothing; they are drawn anew.
        if metrics["env/all/by_group/frac_mixed"]:
            break
    assert 0 < metrics["env/all/reward/total"] < 0.5 and metrics["env/all/total_episodes"] == 6, output[-3000:]
    assert metrics["env/all/turns_per_episode"] == 1 and abs(metrics["optim/kl_sample_train_v1"]) < 1e-3
    trained = json.loads((run / "checkpoints.jsonl").read_text().splitlines()[-1])["sampler_path"]
    before, after = two_calls("weigh", taught["sampler"], trained)
    assert after > before + 0.05
