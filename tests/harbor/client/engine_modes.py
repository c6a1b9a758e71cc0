"""All four modes with real weights: the server's own engine with the tiny model, whose answers train it.

The server runs already. Between it and the recorded rewards everything is as in client_run.py.
"""

import os

import pytest
from support_rock import Admin
from support_run import Folder

pytestmark = pytest.mark.timeout(900)
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
URL = os.environ.get("HARBOR_TEST_SERVER_URL", "")


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    server = Admin(tmp_path_factory.mktemp("admin")).start()
    yield server
    server.stop()


def play(admin, tmp_path, instruction, *arguments):
    folder = Folder(tmp_path, admin.url, instruction, model=MODEL)
    run = folder.run(*arguments, "--base-url", URL, "--seed", "7", timeout=600)
    assert run.code == 0, run.log[-6000:]
    return run


def check_training(metrics, tokens):
    """Trainer and sampler saw the same weights and the same tokens."""
    assert metrics["tokens_trained"] == tokens and metrics["logprob_gap_max"] < 1e-3, metrics


def test_rollout(admin, tmp_path):
    summary = play(admin, tmp_path, "solved", "rollout").read("summary.json")
    assert summary["reward"] == 1.0 and summary["turns_used"] == 2 and summary["first_action_tokens"]


@pytest.mark.parametrize("rank", [8, 0])
def test_ppo(admin, tmp_path, rank):
    run = play(admin, tmp_path, "solved", "ppo", "--lora-rank", str(rank), "--learning-rate", "1e-4", "--save-state", "end")
    result = run.read("result.json")
    check_training(result["fwdbwd_metrics"], sum(len(turn["sampled_tokens"]) for turn in result["turns"]))
    assert result["optim_metrics"] and result["published_sampling_client"] and result["transitions_trained"] == 2


def test_ppo_with_a_kl_penalty(admin, tmp_path):
    run = play(admin, tmp_path, "solved", "ppo-kl", "--lora-rank", "8", "--learning-rate", "1e-4", "--kl-beta", "0.05")
    result = run.read("result.json")
    check_training(result["fwdbwd_metrics"], sum(len(turn["sampled_tokens"]) for turn in result["turns"]))
    assert abs(result["kl_reference"]) < 1e-3, "a fresh adapter is the base model"


def test_grpo_over_two_steps(admin, tmp_path):
    """The second group is sampled from the weights that the first one made, and is on-policy for them."""
    run = play(admin, tmp_path, "solved unsolved", "grpo", "--lora-rank", "8", "--learning-rate", "1e-2", "--num-steps", "2")
    steps = run.read("result.json")["steps"]
    for number, step in enumerate(steps):
        assert step["group_returns"] == [1.0, 0.0] and step["group_advantages"] == [0.5, -0.5] and step["skipped"] is None
        turns = [turn for i in (0, 1) for turn in run.read(f"step_{number:03d}/rollout_{i:02d}.json")["turns"]]
        check_training(step["fwdbwd_metrics"], sum(len(turn["sampled_tokens"]) for turn in turns))
    assert steps[0]["published_sampling_client"] != steps[1]["published_sampling_client"]
    first, second = (run.read(f"step_{number:03d}/rollout_00.json")["turns"][0] for number in (0, 1))
    assert first["prompt_tokens"] == second["prompt_tokens"] and first["logprobs"] != second["logprobs"]
