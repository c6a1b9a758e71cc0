"""What each mode trains on and writes, with episodes made by hand and the real Tinker SDK against the tests' engine.

The engine: logprob(token) = weight - 1 - token / 1000; a step adds learning_rate * (sum of advantages + the sum before).
"""

import asyncio
import json

import pytest
import tinker
from server import TestServer

from harbor_env.episode import Episode
from harbor_env.errors import SettingError
from harbor_env.learner import Learner
from harbor_env.modes import Options, run_grpo, run_ppo, run_rollout
from harbor_env.record import Turn

BASE = "fake/tied"
CONTEXT = {"mode": "grpo", "task_id": "t"}


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    server = TestServer(tmp_path_factory.mktemp("server"))
    client = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    yield client
    client.close("success")
    server.stop()


def logprob(token, weight=0.0):
    return weight - 1 - token / 1000


def turn(index, prompt, sampled):
    answer = {"choices": [{"message": {"role": "assistant", "content": f"answer {index}"}}]}
    request = {"messages": [{"role": "user", "content": f"ask {index}"}]}
    return Turn(index, tuple(prompt), tuple(sampled), tuple(map(logprob, sampled)), "stop", request, answer)


def two_turns():
    return [turn(1, [1, 2], [30, 40]), turn(2, [1, 2, 30, 40, 5], [60])]


def playing(*outcomes):
    """Episodes with these rewards, or with these causes and no reward; each is played with the sampler it is given."""
    left, samplers, folders = list(outcomes), [], []

    async def play(name, sampler, folder):
        samplers.append(sampler)
        folders.append(folder)
        outcome = left.pop(0)
        scored = isinstance(outcome, float)
        return Episode(name, "t", two_turns(), outcome if scored else None, None if scored else outcome,
                       None if scored else f"{outcome} in words", 1.5)

    play.samplers, play.folders = samplers, folders
    return play


def learner(service, **more):
    return Learner(service, BASE, more.pop("rank", 8), more.pop("learning_rate", 0.01), seed=1)


def read(file):
    return json.loads(file.read_text())


def test_a_rollouts_summary(tmp_path):
    outcome = asyncio.run(run_rollout(playing(1.0), None, tmp_path))
    assert outcome.complete and outcome.skipped == []
    summary = read(tmp_path / "summary.json")
    assert {k: summary[k] for k in ("task_id", "reward", "episode_done", "turns_used", "time_seconds", "cause")} == {
        "task_id": "t", "reward": 1.0, "episode_done": True, "turns_used": 2, "time_seconds": 1.5, "cause": None}
    assert summary["first_action_tokens"] == [30, 40]
    text = (tmp_path / "trajectory.txt").read_text()
    assert "ask 1" in text and "answer 2" in text and "reward 1.0" in text


def test_a_reward_of_0_is_a_complete_rollout_and_no_reward_is_not(tmp_path):
    (tmp_path / "a").mkdir()
    assert asyncio.run(run_rollout(playing(0.0), None, tmp_path / "a")).complete
    assert read(tmp_path / "a" / "summary.json")["episode_done"] is True
    (tmp_path / "b").mkdir()
    assert not asyncio.run(run_rollout(playing("sandbox_died"), None, tmp_path / "b")).complete
    summary = read(tmp_path / "b" / "summary.json")
    assert summary["reward"] is None and summary["episode_done"] is False
    assert summary["cause"] == "sandbox_died" and summary["error"] == "sandbox_died in words"


def test_ppo_trains_on_the_episode_and_publishes(service, tmp_path, caplog):
    caplog.set_level("INFO")
    play = playing(1.0)
    outcome = asyncio.run(run_ppo(play, learner(service), tmp_path, Options(), {"mode": "ppo"}))
    result = read(tmp_path / "result.json")
    assert outcome.complete and outcome.skipped == result["skipped"] == []
    # Three sampled tokens of advantage 1: the loss is -sum(ratio * advantage), and the ratio is 1 on-policy.
    assert result["fwdbwd_metrics"]["loss:sum"] == pytest.approx(-3.0, abs=1e-5)
    assert result["fwdbwd_metrics"]["tokens_trained"] == 3 and result["fwdbwd_metrics"]["sequences"] == 1
    assert result["fwdbwd_metrics"]["logprob_gap_max"] < 1e-6
    assert result["optim_metrics"]["grad_norm"] == pytest.approx(3.0)
    assert result["published_sampling_client"].startswith("tinker://") and result["train_elapsed"] > 0
    assert result["transitions_trained"] == 2 and result["reward"] == 1.0 and (tmp_path / "trajectory.txt").exists()
    assert [t["sampled_tokens"] for t in result["turns"]] == [[30, 40], [60]]
    said = [record.getMessage().split(":")[0] for record in caplog.records]
    for message in ("Rollout done", "forward_backward done", "optim_step done", "Weights published to sampler"):
        assert message in said


def test_the_published_weights_are_the_trained_ones(service, tmp_path):
    asyncio.run(run_ppo(playing(1.0), learner(service), tmp_path, Options(), {}))
    sampler = service.create_sampling_client(model_path=read(tmp_path / "result.json")["published_sampling_client"])
    scores = sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2, 3])).result()
    assert scores[1:] == pytest.approx([logprob(2, 0.03), logprob(3, 0.03)])


def test_ppo_on_one_transition(service, tmp_path):
    asyncio.run(run_ppo(playing(1.0), learner(service), tmp_path, Options(max_train_transitions=1), {}))
    result = read(tmp_path / "result.json")
    assert result["transitions_trained"] == 1 and result["fwdbwd_metrics"]["tokens_trained"] == 2


@pytest.mark.parametrize(("outcome", "baseline", "named"), [
    (0.0, 0.0, "nothing to train on"), (1.0, 1.0, "nothing to train on"), ("no_reward", 0.0, "no valid reward (no_reward)")])
def test_a_step_that_is_skipped_is_said(service, tmp_path, caplog, outcome, baseline, named):
    done = asyncio.run(run_ppo(playing(outcome), learner(service), tmp_path, Options(reward_baseline=baseline), {}))
    result = read(tmp_path / "result.json")
    assert named in done.skipped[0] and result["skipped"] == done.skipped
    assert result["fwdbwd_metrics"] is None and result["published_sampling_client"] is None
    assert done.complete == isinstance(outcome, float)
    assert any("skipping train step" in record.getMessage() for record in caplog.records)


def test_a_failed_episode_with_a_baseline_is_trained_against(service, tmp_path):
    asyncio.run(run_ppo(playing(0.0), learner(service), tmp_path, Options(reward_baseline=0.5), {}))
    result = read(tmp_path / "result.json")
    assert result["advantage"] == -0.5 and result["fwdbwd_metrics"]["loss:sum"] == pytest.approx(1.5, abs=1e-5)


def test_the_kl_penalty_is_against_the_base_model(service, tmp_path):
    """The first step moves the weight to 0.03; its episodes' log-probabilities then exceed the base's by that."""
    trained = learner(service)
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    asyncio.run(run_ppo(playing(1.0), trained, tmp_path / "a", Options(kl_beta=0.5), {}))
    assert read(tmp_path / "a" / "result.json")["kl_reference"] == pytest.approx(0.0, abs=1e-6)

    async def play(name, sampler, folder):
        sampled = [30, 40]
        # The policy moved on one token only, as a real one would move on each by another amount.
        said = turn(1, [1], [2])
        drawn = Turn(1, (1, 2), tuple(sampled), (logprob(30, 0.2), logprob(40)), "stop", said.request, said.answer)
        return Episode(name, "t", [drawn], 1.0)

    asyncio.run(run_ppo(play, trained, tmp_path / "b", Options(kl_beta=0.5), {}))
    result = read(tmp_path / "b" / "result.json")
    assert result["kl_reference"] == pytest.approx(0.1, abs=1e-6)
    # Advantages 1 + 0.5 * (0.1 - 0.2) and 1 + 0.5 * (0.1 - 0.0): their sum stays 2.
    assert result["optim_metrics"]["grad_norm"] == pytest.approx(2.0, abs=1e-5)


def test_grpo_trains_on_the_difference_within_a_group(service, tmp_path):
    play = playing(1.0, 0.0)
    outcome = asyncio.run(run_grpo(play, learner(service), tmp_path, Options(), CONTEXT))
    step = read(tmp_path / "step_000" / "step_result.json")
    assert outcome.complete and outcome.skipped == []
    assert step["group_returns"] == [1.0, 0.0] and step["group_advantages"] == [0.5, -0.5]
    assert step["rollouts_succeeded"] == 2 and step["rollouts_dropped"] == {} and step["skipped"] is None
    assert step["fwdbwd_metrics"]["loss:sum"] == pytest.approx(0.0, abs=1e-5)
    assert step["fwdbwd_metrics"]["tokens_trained"] == 6
    assert step["published_sampling_client"].startswith("tinker://") and step["time_seconds"] >= 0
    assert read(tmp_path / "result.json")["steps"] == [step] and read(tmp_path / "result.json")["task_id"] == "t"
    first, second = (read(tmp_path / "step_000" / f"rollout_{i:02d}.json") for i in (0, 1))
    assert (first["return"], first["advantage"], second["return"], second["advantage"]) == (1.0, 0.5, 0.0, -0.5)
    assert [t["sampled_tokens"] for t in first["turns"]] == [[30, 40], [60]]
    assert "answer 1" in (tmp_path / "step_000" / "rollout_01.txt").read_text()
    assert [f.parent.name for f in play.folders] == ["step_000", "step_000"]


@pytest.mark.parametrize(("outcomes", "named"), [
    ((1.0, 1.0), "all rewards are 1.0, so there is nothing to train on"), ((0.0, 0.0), "all rewards are 0.0"),
    ((1.0, "agent_silent"), "1 of 2 rollouts have a valid reward"), (("agent_silent", "no_reward"), "0 of 2"),
])
def test_a_group_without_a_difference_is_skipped_and_said(service, tmp_path, caplog, outcomes, named):
    outcome = asyncio.run(run_grpo(playing(*outcomes), learner(service), tmp_path, Options(), CONTEXT))
    step = read(tmp_path / "step_000" / "step_result.json")
    assert named in step["skipped"] and named in outcome.skipped[0]
    assert step["fwdbwd_metrics"] is None and step["optim_metrics"] is None and step["published_sampling_client"] is None
    assert outcome.complete == any(isinstance(o, float) for o in outcomes)
    assert any("skipping step 0" in record.getMessage() for record in caplog.records)


def test_an_invalid_episode_is_dropped_and_counted_and_never_a_0(service, tmp_path):
    play = playing(1.0, "sandbox_died", 0.0, "no_reward")
    asyncio.run(run_grpo(play, learner(service), tmp_path, Options(group_size=4), CONTEXT))
    step = read(tmp_path / "step_000" / "step_result.json")
    assert step["group_returns"] == [1.0, 0.0] and step["group_advantages"] == [0.5, -0.5]
    assert step["rollouts_succeeded"] == 2 and step["rollouts_dropped"] == {"sandbox_died": 1, "no_reward": 1}
    files = [read(tmp_path / "step_000" / f"rollout_{i:02d}.json") for i in range(4)]
    assert [f["advantage"] for f in files] == [0.5, None, -0.5, None] and files[1]["cause"] == "sandbox_died"


def test_each_step_plays_with_the_weights_of_the_one_before(service, tmp_path):
    play = playing(1.0, 0.0, 0.5, 0.5, 0.0, 1.0)
    outcome = asyncio.run(run_grpo(play, learner(service), tmp_path, Options(num_steps=3), CONTEXT))
    first, second, third = play.samplers[0], play.samplers[2], play.samplers[4]
    assert play.samplers[1] is first and second is not first and third is second, "a skipped step publishes nothing"
    result = read(tmp_path / "result.json")
    assert [s["step"] for s in result["steps"]] == [0, 1, 2]
    assert outcome.skipped == result["skipped"] and len(outcome.skipped) == 1


def test_episodes_run_side_by_side_up_to_the_limit(service, tmp_path):
    running = most = 0

    async def play(name, sampler, folder):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return Episode(name, "t", two_turns(), float(name.endswith("00")))

    asyncio.run(run_grpo(play, learner(service), tmp_path, Options(group_size=4, rollout_concurrency=2), CONTEXT))
    assert most == 2


def test_the_saved_state_can_be_trained_on(service, tmp_path):
    asyncio.run(run_grpo(playing(1.0, 0.0), learner(service), tmp_path, Options(save_state="quick-start-final"), CONTEXT))
    saved = read(tmp_path / "checkpoint.json")
    assert saved["name"] == "quick-start-final" and saved["path"].endswith("/weights/quick-start-final")
    assert service.create_training_client_from_state_with_optimizer(saved["path"]).result().get_info().model_id


def test_all_weights_can_be_trained(tmp_path):
    """They have the workers to themselves, so this server has no other run."""
    (tmp_path / "results").mkdir()
    server = TestServer(tmp_path / "server")
    alone = tinker.ServiceClient(base_url=server.url, api_key="tml-test")
    try:
        outcome = asyncio.run(run_ppo(playing(1.0), learner(alone, rank=0), tmp_path / "results", Options(), {}))
        assert outcome.skipped == [] and read(tmp_path / "results" / "result.json")["optim_metrics"]
    finally:
        alone.close("success")
        server.stop()


@pytest.mark.parametrize(("more", "named"), [
    ({"rank": -1}, "--lora-rank is -1"), ({"learning_rate": 0.0}, "--learning-rate is 0")])
def test_flags_of_the_learner_are_checked(service, more, named):
    with pytest.raises(SettingError, match=named):
        learner(service, **more)
