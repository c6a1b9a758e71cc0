"""`chat`, `bench`, the commands of this machine, and the vendor's own command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import BASE

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


def test_chat_says_one_thing_and_prints_the_answer(server, command, raw):
    assert command("chat", "-m", "Hello?").stdout == "I have weight 0.\n"
    assert command("chat", raw.weights, "--message", "Hello?").stdout == "I have weight 0.04.\n"
    command("chat", BASE, "--system", "Be short.", "--temperature", 0, "--seed", 3, "--max-tokens", 9, input="From a pipe.")
    request = server.engine.requests[-1]
    assert (request.params.temperature, request.params.seed, request.params.max_tokens) == (0, 3, 9)
    prompt = server.engine.tokenizer.decode(request.prompt)
    assert "system\nBe short." in prompt and "user\nFrom a pipe." in prompt


def test_chat_in_a_terminal_remembers_the_conversation(server, command, monkeypatch):
    monkeypatch.setattr("verl_tinker.cli.chat._is_terminal", lambda: True)
    server.engine.says = lambda prompt, weight: "Yes."
    assert command("chat", input="One.\nTwo.\n\nThree.\n").stdout.count("Yes.") == 2
    prompt = server.engine.tokenizer.decode(server.engine.requests[-1].prompt)
    assert prompt.index("One.") < prompt.index("Yes.") < prompt.index("Two.")


def test_chat_says_why_it_cannot(command):
    assert "cannot be sampled here" in command("chat", "gpt-4o", "-m", "x", status=1).stderr


def test_bench_measures_sampling_and_training(server, command):
    report = command.json("bench", "--samples", 4, "--steps", 2, "--batch", 2, "--max-tokens", 8, "--prompt-tokens", 8)
    assert report["model"] == BASE and report["sampling"]["samples"] == 4 and report["training"]["steps"] == 2
    assert report["sampling"]["tokens_per_s"] > 0 and report["training"]["seconds"]["p50"] > 0
    assert report["training"]["tokens_each"] == 2 * 16
    calls = [call for call in server.engine.calls if call[0] == "forward_backward"]
    # One before the clock starts.
    assert len(calls) == 3 and calls[0][2] == 2
    text = command("bench", "--samples", 2, "--steps", 0).stdout
    assert "sampling, 2 samples" in text and "training" not in text
    assert "trains fake/tied" in command("bench", "--model", "other", status=1).stderr


def test_commands_of_this_machine_are_those_of_their_modules(command_for, tmp_path):
    command = command_for()
    key = command("keys", "add", "alice", "--file", tmp_path / "keys.json").stdout.strip()
    assert key.startswith("tml-") and "alice" in (tmp_path / "keys.json").read_text()
    assert "--set KEY=VALUE" in command("start", "--help").stdout
    assert "--name" in command("checkpoints", "import", "--help").stdout
    assert "--gpus-per-node" in command("plan", "--help").stdout
    result = command("check", "--config", "configs/quick_start/cpu.yaml", "--set", "server.prot=1", status=1)
    assert "server.prot" in str(result.exception.code)


def test_help_names_every_command(command_for):
    text = command_for()("--help").stdout
    for name in ("start", "check", "plan", "status", "runs", "checkpoints", "chat", "bench", "doctor"):
        assert f"\n  {name} " in text
    text = command_for()("checkpoints", "--help").stdout
    assert all(f"\n  {name} " in text for name in ("ls", "rm", "export", "import"))


def test_the_vendors_command_line_works(server, raw, tmp_path):
    def tinker(*arguments):
        environ = {**os.environ, "TINKER_BASE_URL": server.url, "TINKER_API_KEY": "tml-test", "NO_PROXY": "127.0.0.1"}
        command = [str(Path(sys.executable).with_name("tinker")), "--format", "json", *arguments]
        done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout) if done.stdout.strip() else None

    assert raw.model in json.dumps(tinker("run", "list"))
    assert raw.model in json.dumps(tinker("run", "info", raw.model))
    assert raw.weights in json.dumps(tinker("checkpoint", "list"))
    assert raw.weights in json.dumps(tinker("checkpoint", "info", raw.weights))
    tinker("checkpoint", "download", raw.state, "--output", str(tmp_path))
    assert [file.name for file in tmp_path.rglob("state.json")]
    tinker("checkpoint", "delete", raw.weights, "--yes")
    assert raw.weights not in json.dumps(tinker("checkpoint", "list"))
