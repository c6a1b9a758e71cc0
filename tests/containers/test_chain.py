"""The documented commands with nothing stood in for: Docker, ROCK's admin and worker, Harbor, its verifier, the small model.

The agent's answers are the model's, or a script's where a test needs a certain reward; a step on those is off-policy.
"""

import numpy as np
import pytest
import tinker
from chain import HARBOR, MODEL

pytestmark = [pytest.mark.containers, pytest.mark.timeout(900)]
SCRIPTS = HARBOR / "examples" / "scripts"
TRAINING = ("--lora-rank", "8", "--learning-rate", "1e-3", "--seed", "7")


def check_training(fields: dict, turns: list[dict]) -> None:
    """Trainer and sampler saw the same weights and the same tokens, and the step was one."""
    metrics = fields["fwdbwd_metrics"]
    assert metrics["tokens_trained"] == sum(len(turn["sampled_tokens"]) for turn in turns) > 0
    assert metrics["logprob_gap_max"] < 1e-3, metrics
    assert fields["optim_metrics"]["grad_norm"] > 0 and fields["train_elapsed"] > 0


def scores(url: str, turns: list[dict], path: str | None = None) -> list[np.ndarray]:
    """Nats of each turn's sampled tokens, under the base model or the weights at `path`."""
    service = tinker.ServiceClient(base_url=url)
    client = service.create_sampling_client(model_path=path, base_model=MODEL)
    prompts = [tinker.ModelInput.from_ints([*turn["prompt_tokens"], *turn["sampled_tokens"]]) for turn in turns]
    try:
        return [np.array(client.compute_logprobs(prompt).result()[len(turn["prompt_tokens"]):])
                for prompt, turn in zip(prompts, turns, strict=True)]
    finally:
        # A client that is left open has a thread that beats, at the interpreter's end too, which then may abort.
        service.close("success").result(60)


def test_a_rollout_with_a_server_of_its_own(chain):
    run = chain.run("rollout", "--task-id", "median", "--seed", "1")
    assert run.code == 0, run.output + run.log[-4000:]
    summary = run.read("summary.json")
    assert summary["episode_done"] is True and 0 <= summary["reward"] <= 1 and 1 <= summary["turns_used"] <= 2
    assert summary["task_id"] == "median" and summary["first_action_tokens"] and "TINKER_SERVER_JOB" in run.log
    assert (run.results / "trajectory.txt").read_text().count("median") > 1


@pytest.mark.parametrize(("name", "reward"), [("solved", 1.0), ("unsolved", 0.0)])
def test_a_scripted_policy_solves_the_task_or_breaks_it(chain, server, name, reward):
    run = chain.run("rollout", "--base-url", server, "--scripted", str(SCRIPTS / f"median_{name}.json"))
    assert run.code == 0, run.log[-4000:]
    summary = run.read("summary.json")
    assert summary["reward"] == reward and summary["episode_done"] is True and summary["turns_used"] == 2
    (report,) = run.results.glob("harbor/rollout/*/verifier/report.json")
    assert ('"resolved": true' in report.read_text()) == (reward == 1.0)


@pytest.mark.parametrize(("mode", "more"), [("ppo", ("--save-state", "end")), ("ppo-kl", ("--kl-beta", "0.05"))])
def test_one_step_of_ppo(chain, server, mode, more):
    # No answer of the small model is worth 0.9, so there is always something to train on.
    run = chain.run(mode, "--base-url", server, *TRAINING, "--reward-baseline", "0.9", *more)
    assert run.code == 0, run.log[-4000:]
    result = run.read("result.json")
    assert result["advantage"] == pytest.approx(result["reward"] - 0.9) and result["skipped"] == []
    assert result["transitions_trained"] == len(result["turns"]) == result["turns_used"]
    check_training(result, result["turns"])
    assert result["kl_reference"] is None if mode == "ppo" else abs(result["kl_reference"]) < 1e-3
    before, after = (np.concatenate(scores(server, result["turns"], path))
                     for path in (None, result["published_sampling_client"]))
    assert np.abs(after - before).max() > 1e-2
    if mode == "ppo":
        assert after.sum() < before.sum(), "what was worth less than the baseline has become less likely"
        assert run.read("checkpoint.json")["path"].endswith("/weights/end")


def test_ppo_on_all_weights_and_one_transition(chain, server):
    run = chain.run("ppo", "--base-url", server, "--learning-rate", "1e-6", "--lora-rank", "0", "--max-train-transitions", "1",
                    "--reward-baseline", "0.9", "--seed", "7")
    assert run.code == 0, run.log[-4000:]
    result = run.read("result.json")
    check_training(result, result["turns"][:1])
    assert result["lora_rank"] == 0 and result["transitions_trained"] == 1


def test_one_step_of_grpo_on_the_models_own_answers(chain, server):
    run = chain.run("grpo", "--base-url", server, *TRAINING, "--num-steps", "1", "--group-size", "4",
                    "--rollout-concurrency", "2")
    assert run.code == 0, run.log[-4000:]
    step = run.read("step_000/step_result.json")
    rewards, advantages = np.array(step["group_returns"]), np.array(step["group_advantages"])
    assert step["rollouts_succeeded"] == 4 and rewards.std() > 0, f"the group has nothing to compare: {rewards}"
    np.testing.assert_allclose(advantages, rewards - rewards.mean(), atol=1e-9)
    rollouts = [run.read(f"step_000/rollout_{i:02d}.json") for i in range(4)]
    assert [rollout["return"] for rollout in rollouts] == step["group_returns"]
    check_training(step, [turn for rollout in rollouts for turn in rollout["turns"]])
    # The better answers have become likelier, weighted as they were in the step.
    gain = 0.0
    for rollout, advantage in zip(rollouts, advantages, strict=True):
        before, after = (np.concatenate(scores(server, rollout["turns"], path))
                         for path in (None, step["published_sampling_client"]))
        gain += advantage * (after - before).sum()
    assert gain > 0


def test_one_step_of_grpo_on_scripted_answers(chain, server):
    """Off-policy: nobody drew these answers. The trainer scores their tokens, and the step makes the solver's likelier."""
    run = chain.run("grpo", "--base-url", server, *TRAINING, "--scripted", str(SCRIPTS / "median_group.json"))
    assert run.code == 0, run.log[-4000:]
    step = run.read("step_000/step_result.json")
    assert step["group_returns"] == [1.0, 0.0] and step["group_advantages"] == [0.5, -0.5]
    solver, breaker = (run.read(f"step_000/rollout_{i:02d}.json")["turns"] for i in (0, 1))
    check_training(step, [*solver, *breaker])
    for turns, sign in ((solver, 1), (breaker, -1)):
        before, after = (sum(line.sum() for line in scores(server, turns, path))
                         for path in (None, step["published_sampling_client"]))
        assert sign * (after - before) > 0
