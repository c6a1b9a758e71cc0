"""The workloads of client_examples: what their checks let through, and that the cookbook understands every command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "client_examples"))
import checks  # noqa: E402
import run  # noqa: E402
import run_single_test  # noqa: E402
from workloads import WORKLOADS  # noqa: E402

NAMES = {"sft_tulu3", "sft_norobot", "sft_norobot_no_rollout", "topk_distillation", "sdft_single_task", "rl_gsm8k",
         "sft_rl_gsm8k", "opd_deepmath", "opd_multi_teacher"}


def found(**series: list[float]) -> dict[str, checks.Metrics]:
    steps = max(map(len, series.values()))
    rows = [{key: values[step] for key, values in series.items() if step < len(values)} for step in range(steps)]
    return {"s": checks.Metrics("s", rows, {"state_path": "tinker://a/weights/final"})}


@pytest.mark.parametrize("check, good, bad", [
    (checks.falls("s", "x"), [3, 9, 2, 5, 1, 1], [1, 1, 1, 2]),
    (checks.falls("s", "x"), [2, 1], [1.0, 0.9999999]),
    (checks.begins("s", "x", at=0, within=0.1), [-0.09, 7], [0.11, 0]),
    (checks.begins_above("s", "x", 1), [1.1, 0], [1.0, 5]),
    (checks.between("s", "x", 0, 1), [0.1, 0.9], [0.1, 1.0]),
    (checks.finite("s", "x"), [-1e9], [0.0, float("nan")]),
    (checks.finite("s", "x"), [1.0], [float("inf")]),
])
def test_a_check_names_the_series_that_does_not_hold(check, good, bad):
    assert "x" in check(found(x=good))
    with pytest.raises(checks.NotShown, match="^s: x "):
        check(found(x=bad))


def test_a_metric_that_is_missing_is_named_with_those_that_are_there():
    with pytest.raises(checks.NotShown, match="there is no x among y"):
        checks.finite("s", "x")(found(y=[1.0]))


def test_weights_that_stand_still_fail_a_workload():
    assert checks.trained("s")(found(weights_version=[2, 3, 4])) == "3 steps"
    with pytest.raises(checks.NotShown, match="stands still"):
        checks.trained("s")(found(weights_version=[2, 2]))


def test_a_recipe_that_sampled_where_it_should_not_is_found():
    assert checks.absent("s", "test/nll")(found(y=[1.0])) == "no test/nll"
    with pytest.raises(checks.NotShown):
        checks.absent("s", "test/nll")(found(y=[1.0, 2.0], **{"test/nll": [1.0]}))


def test_a_recipe_without_a_final_checkpoint_fails(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(checks.NotShown, match="no final checkpoint"):
        checks.Metrics.read("s", tmp_path)
    (tmp_path / "checkpoints.jsonl").write_text('{"name": "final", "state_path": "tinker://a/weights/final"}\n')
    assert checks.Metrics.read("s", tmp_path).series("x") == [1.0]


def test_the_originals_names_are_all_there_and_each_has_a_number_to_show():
    assert set(WORKLOADS) == NAMES
    assert all(workload.checks and workload.lite_checks for workload in WORKLOADS.values())


@pytest.mark.timeout(120)
def test_the_cookbook_understands_every_command_line(tmp_path):
    """Flags that no machine at hand can run with are read by the recipes' own configuration classes all the same."""
    names = {"model": "M", "renderer": "qwen3", "sft": "tinker://a/weights/final", "warmup": "tinker://b/weights/final"}
    lines = [run.command(stage.recipe, tmp_path, stage.lite if lite else [], names)[1:]
             for workload in WORKLOADS.values() for stage in workload.stages for lite in (False, True)]
    lines += [run.command(recipe, tmp_path)[1:] for name, recipe in run.RECIPES.items()
              if name not in ("rlhf", "sl_loop", "rl_loop")]
    answer = subprocess.run([str(run.CLIENT_PYTHON), str(ROOT / "tests" / "support" / "read_flags.py")], text=True,
                            input="".join(json.dumps(line) + "\n" for line in lines), capture_output=True)
    assert answer.returncode == 0, answer.stderr[-2000:]
    read = [json.loads(line) for line in answer.stdout.splitlines()]
    assert len(read) == len(lines)
    for line, config in zip(lines, read, strict=True):
        flags = dict(flag.split("=", 1) for flag in line[2:])
        assert config["model_name"] == flags.get("model_name", config["model_name"])
        assert "{" not in "".join(value for name, value in config.items() if name != "loss_fn_config"), config


@pytest.mark.timeout(60)
def test_without_a_server_the_runner_says_so(tmp_path):
    command = [sys.executable, run_single_test.__file__, "--lite", "--test-name", "rl_gsm8k", "--base-url", "http://127.0.0.1:9",
               "--log-path", str(tmp_path / "logs")]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 1 and "no server answers at http://127.0.0.1:9" in answer.stderr


@pytest.mark.timeout(60)
def test_records_of_an_earlier_run_are_not_gone_on_with(tmp_path):
    command = [sys.executable, run_single_test.__file__, "--lite", "--test-name", "rl_gsm8k", "--log-path", str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 1 and f"--log-path {tmp_path} is there already" in answer.stderr


def test_the_models_of_the_original_are_the_defaults():
    full = run_single_test.parse(["--test-name", "opd_deepmath"])
    assert (full.model_name, full.tokenizer_name_or_path) == ("Qwen/Qwen3-1.7B", "Qwen/Qwen3-1.7B")
    lite = run_single_test.parse(["--test-name", "opd_deepmath", "--lite"])
    assert lite.model_name == run.MODEL and lite.folder != full.folder


@pytest.mark.timeout(60)
def test_renderers_are_known_or_asked_of_the_cookbook():
    assert run_single_test.renderer_of(run.MODEL) == "qwen3_instruct"
    assert run_single_test.renderer_of("Qwen/Qwen3-8B") == "qwen3"
    with pytest.raises(run_single_test.Unable, match="--renderer-name"):
        run_single_test.renderer_of("nobody/knows-me")


def test_a_tokenizer_is_linked_by_the_models_name_and_nothing_real_is_replaced(tmp_path):
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        run_single_test.lay_out(tmp_path / "work", "org/model", str(tmp_path / folder), lite=False)
        assert (tmp_path / "work/org/model").resolve() == tmp_path / folder
    (tmp_path / "work/org/real").mkdir()
    with pytest.raises(run_single_test.Unable, match="another --folder"):
        run_single_test.lay_out(tmp_path / "work", "org/real", str(tmp_path / "one"), lite=False)
