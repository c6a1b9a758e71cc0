"""The quick start's commands from end to end without containers: real SDKs, rocklets, model service and server process; the
tests' engine behind the server, and a stand-in where Harbor would be.
"""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest
from support_rock import Admin
from support_run import ROOT, Folder, wait_for

from harbor_env.files import write_json

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def admin(tmp_path_factory):
    server = Admin(tmp_path_factory.mktemp("admin")).start()
    yield server
    server.stop()


@pytest.fixture
def folder_of(admin, tmp_path):
    """Makes the test's folder; afterwards nothing of it may run."""
    made = []

    def make(instruction="solved", **changes):
        made.append(Folder(tmp_path, admin.url, instruction, **changes))
        return made[-1]

    yield make
    assert admin.alive() == [] and not list(tmp_path.glob("state/sandboxes/*"))
    for folder in made:
        for port in (folder.service_port, folder.server_port):
            with socket.socket() as probe:
                assert probe.connect_ex(("127.0.0.1", port)) != 0, "a process of the run still answers"


def summary_of(folder):
    (file,) = folder.root.glob("runs/*/results/*/summary.json")
    return json.loads(file.read_text())


def test_a_rollout_that_solves_the_task(folder_of):
    run = folder_of().run("rollout", "--task-id", "t1")
    assert run.code == 0, run.output + run.log
    assert "Exit code: 0" in run.output and f"Client log: {run.directory}/client.log" in run.output
    assert f"Results dir: {run.results}" in run.log
    status, summary = run.exit_status, run.read("summary.json")
    assert status["exit_code"] == 0 and status["skipped_steps"] == [] and status["mode"] == "rollout"
    assert summary["task_id"] == "t1" and summary["reward"] == 1.0 and summary["episode_done"] is True
    assert summary["turns_used"] == 2 and summary["time_seconds"] > 0 and len(summary["first_action_tokens"]) == 8
    (line,) = [line for line in run.log.splitlines() if "TINKER_SERVER_JOB" in line]
    assert os.path.isfile(json.loads(line.partition("TINKER_SERVER_JOB ")[2])["log_dir"] + "/server.log")
    assert "Traceback" not in run.log


@pytest.mark.full
def test_an_episode_without_a_score_is_no_complete_rollout(folder_of):
    run = folder_of("no-reward").run("rollout")
    summary = run.read("summary.json")
    assert run.code == run.exit_status["exit_code"] == 1
    assert summary["reward"] is None and summary["episode_done"] is False and summary["cause"] == "no_reward"


FAULTS = {
    "no-reward": ("no_reward", "RewardFileNotFoundError"),
    "agent-crashed": ("agent_failed", "sweagent exited with status 1"),
    "loops": ("turn_budget_exceeded", "turn 5; turns is 4"), "rambles": ("input_budget_exceeded", "input_tokens is 2000"),
    "breaks": ("job_failed", "no such option: -c"), "sleeps": ("agent_silent", "after 1 answers")}


@pytest.mark.full
def test_grpo_learns_from_what_was_scored_and_names_the_rest(folder_of):
    words = ["solved", *FAULTS, "unsolved"]
    folder = folder_of(" ".join(words), runtime={"client": {"silence_seconds": 4}})
    run = folder.run("grpo", "--learning-rate", "1e-3", "--num-steps", "1", "--group-size", str(len(words)),
                     "--rollout-concurrency", "1", timeout=550)
    assert run.code == 0, run.log
    (step,) = run.read("result.json")["steps"]
    assert step == run.read("step_000/step_result.json")
    assert step["group_returns"] == [1.0, 0.0] and step["group_advantages"] == [0.5, -0.5]
    assert step["rollouts_succeeded"] == 2
    assert step["rollouts_dropped"] == {cause: 1 for cause, _ in FAULTS.values()}
    assert step["fwdbwd_metrics"]["tokens_trained"] == 32 and step["optim_metrics"] and step["published_sampling_client"]
    for i, word in enumerate(words):
        rollout = run.read(f"step_000/rollout_{i:02d}.json")
        assert (run.results / "step_000" / f"rollout_{i:02d}.txt").is_file()
        if word in FAULTS:
            cause, named = FAULTS[word]
            assert rollout["return"] is None and rollout["cause"] == cause and named in rollout["error"], word
        else:
            assert rollout["return"] == float(word == "solved") and len(rollout["turns"]) == 2
    assert f"rollout {len(words)} of {len(words)} done" in run.log


@pytest.mark.full
def test_a_job_that_takes_too_long_is_named_and_ended(folder_of):
    run = folder_of("sleeps", timeout_sec=3).run("rollout")
    summary = run.read("summary.json")
    assert run.code == 1 and summary["cause"] == "job_failed" and summary["turns_used"] == 1


def test_ppo_with_one_transition_and_a_saved_state(folder_of):
    run = folder_of("solved").run("ppo", "--learning-rate", "1e-3", "--lora-rank", "0", "--max-train-transitions", "1",
                                          "--save-state", "quick-start-final")
    assert run.code == 0, run.log
    result = run.read("result.json")
    assert result["reward"] == 1.0 and result["transitions_trained"] == 1 and result["lora_rank"] == 0
    assert result["fwdbwd_metrics"]["tokens_trained"] == 8 and result["optim_metrics"] and result["train_elapsed"] > 0
    assert result["published_sampling_client"].startswith("tinker://") and (run.results / "trajectory.txt").is_file()
    assert run.read("checkpoint.json")["path"].endswith("/weights/quick-start-final")
    for message in ("Rollout done", "forward_backward done", "optim_step done", "Weights published to sampler"):
        assert message in run.log


@pytest.mark.full
def test_ppo_with_a_kl_penalty(folder_of):
    run = folder_of("solved").run("ppo-kl", "--kl-beta", "0.05")
    result = run.read("result.json")
    assert run.code == 0 and result["mode"] == "ppo-kl" and result["kl_beta"] == 0.05 and isinstance(
        result["kl_reference"], float)
    assert result["fwdbwd_metrics"]["tokens_trained"] == 16


@pytest.mark.full
def test_a_skipped_step_is_in_the_exit_summary(folder_of):
    run = folder_of("unsolved").run("grpo")
    assert run.code == 0 and "all rewards are 0.0" in run.exit_status["skipped_steps"][0]
    assert "skipped: step 0: all rewards are 0.0" in run.output and "skipping step 0" in run.log


@pytest.mark.full
def test_ctrl_c_ends_sandbox_and_server_in_order(folder_of, admin):
    folder = folder_of("sleeps")
    process = folder.start("rollout")
    wait_for(lambda: admin.alive())
    wait_for(lambda: list(folder.root.glob("work/*/pid")))
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 130 and "Exit code: 130" in output


@pytest.mark.full
def test_a_server_that_dies_in_mid_turn_ends_the_episode_by_name(folder_of):
    folder = folder_of("sleeps", server_more="--delay 20")
    process = folder.start("rollout")
    wait_for(lambda: "LLM_REQUEST_START" in folder.model_log())
    asked = subprocess.run(["pgrep", "-f", f"fake_server.py --folder {folder.root}"], capture_output=True, text=True)
    os.kill(int(asked.stdout.split()[0]), signal.SIGKILL)
    process.communicate(timeout=300)
    summary = summary_of(folder)
    assert process.returncode == 1 and summary["cause"] == "sampling_failed"
    assert "the server ended with status -9" in summary["error"]


@pytest.mark.full
def test_a_sandbox_that_dies_in_mid_episode_is_named(folder_of, admin):
    folder = folder_of("sleeps")
    process = folder.start("rollout")
    wait_for(lambda: "LLM_RESPONSE_START" in folder.model_log())
    (name,) = admin.alive()
    os.kill(admin.state()["sandboxes"][name]["pid"], signal.SIGKILL)
    process.communicate(timeout=300)
    assert process.returncode == 1 and summary_of(folder)["cause"] == "sandbox_died"
    for file in folder.root.glob("work/*/pid"):  # In a container these would have ended with it.
        os.killpg(int(file.read_text()), signal.SIGKILL)
    subprocess.run(["kill", "-9", *(file.read_text()
                   for file in folder.root.glob("work/*/model-service/data/cli/model/pid.txt"))])


@pytest.mark.full
@pytest.mark.parametrize(("change", "cause"), [
    ({"environment": {"image": "missing:1"}}, "sandbox_not_started"),
    ({"environment": {"base_url": "http://127.0.0.1:9"}}, "rock_unreachable"),
    ({"model_service": {"rock": "/no/such/rock"}}, "model_service_failed"),
])
def test_parts_that_are_missing_end_the_episode_by_name(folder_of, change, cause):
    run = folder_of("solved", harbor=change).run("rollout")
    assert run.code == 1 and run.read("summary.json")["cause"] == cause


@pytest.mark.full
def test_a_server_that_does_not_start_is_one_error(folder_of):
    run = folder_of("solved", server_more="--no-such-flag").run("rollout")
    assert run.code == 2 and run.exit_status["exit_code"] == 2
    assert "the server ended with status 2" in run.log and "unrecognized arguments" in run.output


@pytest.mark.full
def test_a_server_that_runs_already_is_used_and_left(folder_of, tmp_path):
    folder = folder_of("solved")
    port = folder.server_port
    server = subprocess.Popen([folder.root / "programs" / "server",
                              f"server.port={port}", f"server.checkpoint_dir={tmp_path / 'c'}"])
    try:
        import httpx

        def ready():
            try:
                return httpx.get(f"http://127.0.0.1:{port}/api/v1/healthz", trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready)
        run = folder.run("grpo", "--base-url", f"http://127.0.0.1:{port}")
        assert run.code == 0 and "TINKER_SERVER_JOB" not in run.log and server.poll() is None
    finally:
        server.terminate()
        server.wait(30)


def test_the_seeds_script_names_work(folder_of):
    folder = folder_of("solved")
    for script in ("prepare_sandbox.py", "configure.py"):
        done = subprocess.run([sys.executable, ROOT / "harbor_env" / script, "--help"],
                              cwd="/", capture_output=True, text=True)
        assert done.returncode == 0 and "--task-id" in done.stdout
    done = subprocess.run(["bash", ROOT / "harbor_env" / "serve.sh", "worker"], cwd="/", capture_output=True, text=True,
                          env={**os.environ, "TASK": str(folder.root), "PY": sys.executable})
    assert done.returncode == 2 and "holds no rocklet" in done.stderr
    done = subprocess.run([sys.executable, ROOT / "harbor_env" / "configure.py", "--task-root", str(folder.root),
                           "--task-id", "t1", "--model", "a/b", "--renderer", "qwen3"], cwd="/", capture_output=True,
                          text=True)
    assert done.returncode == 1 and "is not overwritten" in done.stderr


def test_a_file_of_results_is_whole_or_absent(tmp_path):
    write_json(tmp_path / "a" / "b.json", {"x": 1})
    assert [f.name for f in (tmp_path / "a").iterdir()] == ["b.json"]
