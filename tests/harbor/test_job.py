"""The job file that Harbor gets, and the agents' code that it names."""

import ast
import importlib.util
import sys
from pathlib import Path

import pytest

import harbor_env
from harbor_env.job import AGENT_CLASSES, job_config
from harbor_env.rock_sandbox import RockSettings
from harbor_env.settings import AGENTS, AgentSettings, HarborSettings, JobSettings, TaskSettings

ROOT = Path(harbor_env.__file__).parent


def config(agent):
    settings = HarborSettings(RockSettings("http://rock", "image"), TaskSettings("t", "/t"), AgentSettings(name=agent))
    return job_config(settings, "job-1", "/inside", "http://172.17.0.1:28080/v1")


@pytest.mark.parametrize("agent", AGENTS)
def test_one_attempt_at_one_task_with_the_budget(agent):
    made = config(agent)
    assert made["n_attempts"] == made["n_concurrent_trials"] == 1 and made["retry"] == {"max_retries": 0}
    assert made["environment"]["extra_docker_compose"] == ["/inside/agents/compose.yaml"]
    assert (ROOT / "agents" / "compose.yaml").is_file()
    assert made["tasks"] == [{"path": "/inside/task"}] and made["jobs_dir"] == "/data/logs/user-defined/jobs"
    arguments = made["agents"][0]["kwargs"]
    assert arguments["api_base"] == "http://172.17.0.1:28080/v1" and arguments["completion_kwargs"] == {"max_tokens": 8192}
    assert (arguments["max_input_tokens"], arguments["max_output_tokens"]) == (32768, 8192)
    assert (arguments["max_observation_length"], arguments["last_n_observations"]) == (12000, 8)
    assert arguments["per_instance_call_limit"] == 32 and arguments["temperature"] == 1.0


@pytest.mark.parametrize("agent", AGENTS)
def test_a_baked_runtime_is_mounted_for_reading_and_the_small_agent_needs_none(agent):
    mounts = config(agent)["environment"].get("mounts")
    runtime = JobSettings().agent_runtime
    expected = [{"type": "bind", "source": runtime, "target": runtime, "read_only": True}]
    assert mounts == (None if agent == "bash-agent" else expected)


@pytest.mark.parametrize("agent", AGENTS)
def test_the_agents_class_is_where_the_job_says(agent):
    module, _, name = AGENT_CLASSES[agent].partition(":")
    tree = ast.parse((ROOT / "agents" / f"{module}.py").read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}


def test_an_agent_takes_its_limits_out_of_its_arguments():
    spec = importlib.util.spec_from_file_location("limits", ROOT / "agents" / "limits.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["limits"] = module
    spec.loader.exec_module(module)
    arguments = {**config("swe-agent")["agents"][0]["kwargs"], "extra_env": {"A": "b"}}
    limits = module.Limits.taken_from(arguments)
    assert arguments == {"extra_env": {"A": "b"}}, "what is Harbor's own stays"
    assert limits.max_output_tokens == 8192 and limits.completion_json == '{"max_tokens": 8192}'
    small = module.Limits("http://x", max_observation_length=10)
    assert small.cut("a" * 20 + "b" * 20) == "aaaaa\n(... 30 characters left out ...)\nbbbbb" and small.cut("short") == "short"


def imports(file):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield node.module


def test_who_may_import_what():
    """The client knows the server by its address and its command line, and Harbor by its files."""
    for file in ROOT.rglob("*.py"):
        names = {name.partition(".")[0] for name in imports(file)}
        assert not names & {"verl_tinker", "verl", "vllm", "ray"}, file
        if file.parent.name == "agents":
            assert not names & {"harbor_env", "tinker", "tinker_cookbook", "rock", "httpx"}, file
        else:
            assert "harbor" not in names, file


def test_what_runs_in_a_sandbox_needs_nothing_but_python():
    assert {name.partition(".")[0] for name in imports(ROOT / "exchange.py")} <= set(sys.stdlib_module_names)
