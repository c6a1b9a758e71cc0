"""The reader agrees with Harbor's own verdict on trees that Harbor made (`recorded/record.py`), and distrusts others."""

import json
import shutil
from pathlib import Path

import pytest

from harbor_env.errors import JobFailed, NoReward
from harbor_env.results import GRADED_ERRORS, read_job, read_trial

JOBS = Path(__file__).parent / "recorded" / "jobs"
VERDICTS = json.loads((JOBS / "verdicts.json").read_text())


def trial(name):
    (only,) = read_job(JOBS / name)
    return only


@pytest.mark.parametrize("name", VERDICTS["trials"])
def test_a_reward_counts_exactly_where_harbor_says_so(name):
    verdict, seen = VERDICTS["trials"][name], trial(name)
    assert (seen.reward is not None) == (seen.error is None) == verdict["reward_valid"]
    assert seen.rewards == (verdict["rewards"] or {}) and seen.task == f"recorded/{name}"
    if verdict["reward_valid"]:
        assert seen.checked_reward() == verdict["rewards"]["reward"]
    else:
        with pytest.raises(type(seen.error)):
            seen.checked_reward()


def test_the_rule_knows_every_error_that_harbor_has_a_policy_for():
    assert {name for name, valid in VERDICTS["errors"].items() if valid} == GRADED_ERRORS


@pytest.mark.parametrize(("name", "cause", "named"), [
    ("no-reward", "no_reward", "RewardFileNotFoundError"),
    ("empty-reward", "no_reward", "RewardFileEmptyError"),
    ("text-reward", "no_reward", "VerifierOutputParseError"),
    ("nan-reward", "no_reward", "Non-finite reward"),
    ("slow-verifier", "no_reward", "VerifierTimeoutError"),
    ("agent-crashed", "agent_failed", "sweagent exited with status 1"),
    ("context-exceeded", "agent_failed", "ContextWindowExceededError"),
    ("environment-failed", "agent_failed", "no such image"),
])
def test_an_episode_without_a_reward_says_why(name, cause, named):
    error = trial(name).error
    assert error.cause == cause and named in str(error)


def test_reward_json_comes_before_reward_txt():
    assert trial("graded").reward == 0.75 and trial("graded").rewards == {"reward": 0.75, "style": 1}


def test_a_late_agents_grade_stands_and_its_error_is_told():
    assert trial("agent-slow").reward == 1.0 and trial("agent-slow").tolerated == "AgentTimeoutError"
    assert trial("solved").tolerated is None


def test_the_verifiers_own_files_are_at_hand():
    assert trial("solved").report == {"solved": {"resolved": True}} and trial("no-reward").report is None
    assert "grading" in trial("solved").verifier_output and trial("environment-failed").verifier_output == ""


def test_a_job_without_trials_is_a_failure_with_its_last_words(tmp_path):
    (tmp_path / "job.log").write_text("starting\nno such task\n")
    with pytest.raises(JobFailed, match="no such task"):
        read_job(tmp_path)
    with pytest.raises(JobFailed, match="its log is empty"):
        read_job(tmp_path / "nowhere")


@pytest.mark.parametrize(("change", "cause", "named"), [
    (lambda r: r.update(finished_at=None), "job_failed", "not finished"),
    (lambda r: r.update(verifier_result=None), "no_reward", "gave no reward"),
    (lambda r: r["verifier_result"].update(rewards={}), "no_reward", "gave no reward"),
    (lambda r: r["verifier_result"].update(rewards={"style": 1}), "no_reward", "gave style, and no `reward`"),
    (lambda r: r["verifier_result"].update(rewards={"reward": True}), "no_reward", "gave no reward"),
    (lambda r: r["verifier_result"].update(rewards={"reward": float("inf")}), "no_reward", "the reward is inf"),
    (lambda r: r.update(step_results=[{"exception_info": {"exception_type": "HealthcheckError"}}]), "agent_failed",
     "HealthcheckError"),
    (lambda r: r.update(exception_info={"exception_type": "SomethingNew"}), "agent_failed", "SomethingNew"),
])
def test_a_spoilt_result_is_not_trusted(tmp_path, change, cause, named):
    result = json.loads((trial("solved").folder / "result.json").read_text())
    change(result)
    (tmp_path / "result.json").write_text(json.dumps(result))
    error = read_trial(tmp_path).error
    assert error.cause == cause and named in str(error)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"task_name": "a"}', "no json",
                                  '{"task_name": "a", "trial_name": "b", "verifier_result": 5}'])
def test_what_is_no_result_at_all_is_a_failed_job(tmp_path, text):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(JobFailed, match="no trial of Harbor's"):
        read_trial(tmp_path)


def test_several_trials_are_read_each_by_itself(tmp_path):
    for name in ("solved", "unsolved", "no-reward"):
        source = next((JOBS / name).glob("*/"))
        shutil.copytree(source, tmp_path / source.name)
    rewards = {t.task.partition("/")[2]: t.reward for t in read_job(tmp_path)}
    assert rewards == {"solved": 1.0, "unsolved": 0.0, "no-reward": None}
    with pytest.raises(NoReward):
        [t.checked_reward() for t in read_job(tmp_path)]
