"""`configure` writes the quick start's files once, and what contradicts itself is refused by file and field."""

import dataclasses
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from harbor_env.__main__ import main
from harbor_env.backend import check_free
from harbor_env.errors import SettingError
from harbor_env.settings import BACKEND_PORT, HarborSettings, RuntimeSettings, TaskFolder, load, read

ROOT = Path(__file__).resolve().parents[2]
MODEL = ["--model", "Qwen/Qwen3-4B-Instruct-2507", "--renderer", "qwen3_instruct"]


@pytest.fixture
def folder(tmp_path):
    task = tmp_path / "assets" / "harbor-tasks" / "sympy__sympy-19637"
    task.mkdir(parents=True)
    (task / "task.toml").write_text("")
    return TaskFolder(tmp_path)


def configure(folder, *more, model=MODEL):
    return main(["configure", "--task-root", str(folder.root), "--task-id", "sympy__sympy-19637", *model, *more])


def change(folder, name, path, value):
    file = folder.config(name)
    tree = yaml.safe_load(file.read_text())
    *sections, key = path.split(".")
    inner = tree
    for section in sections:
        inner = inner[section]
    inner[key] = value
    file.write_text(yaml.safe_dump(tree))


def test_the_quick_starts_defaults(folder):
    assert configure(folder, "--roll-root", "/nowhere", "--node-ip", "10.0.0.5", "--rollout-only") == 0
    harbor = yaml.safe_load(folder.config("harbor").read_text())
    assert {k: harbor["environment"][k] for k in ("base_url", "cluster", "image", "extra_headers")} == {
        "base_url": "http://127.0.0.1:18080", "cluster": "local", "image": "tinker-harbor:local", "extra_headers": {}}
    assert harbor["agent"] == {
        "name": "swe-agent", "max_input_tokens": 32768, "max_output_tokens": 8192, "per_instance_call_limit": 32,
        "temperature": 1.0, "completion_kwargs": {"max_tokens": 8192}, "max_observation_length": 12000,
        "last_n_observations": 8}
    assert harbor["task"]["path"] == str(folder.tasks / "sympy__sympy-19637")
    assert harbor["job"]["jobs_dir"] == "/data/logs/user-defined/jobs" and harbor["model_service"]["port"] == 28080
    settings = load(folder)
    assert vars(settings.budget) == {"input_tokens": 32768, "output_tokens": 8192, "context_tokens": 65536,
                                     "observation_chars": 12000, "observations_kept": 8, "turns": 32}
    assert settings.runtime.backend.port == 19210 and settings.runtime.rollout_only
    rock = settings.runtime.rock
    assert (rock.admin_port, rock.worker_port, rock.node_ip) == (18080, 22555, "10.0.0.5")


def test_the_servers_preset_is_one_that_the_server_takes(folder):
    configure(folder, "--input-tokens", "1000", "--output-tokens", "24", "--context-tokens", "2048",
              "--preset", str(ROOT / "configs/quick_start/cpu.yaml"))
    done = subprocess.run([sys.executable, "-m", "verl_tinker.start", "--config", str(folder.config("engine")), "--check"],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Qwen/Qwen3-4B-Instruct-2507" in done.stdout and load(folder).budget.context_tokens == 2048


def test_the_gpu_preset_is_one_that_the_server_takes(folder):
    configure(folder, "--preset", str(ROOT / "configs/quick_start/actor_rollout_ref.yaml"), "--gpus", "4")
    engine = yaml.safe_load(folder.config("engine").read_text())
    assert engine["actor_rollout_ref"]["rollout"]["max_model_len"] == 65536 and engine["trainer"]["n_gpus_per_node"] == 4
    assert engine["actor_rollout_ref"]["actor"]["ppo_max_token_len_per_gpu"] >= 65536
    done = subprocess.run([sys.executable, "-m", "verl_tinker.start", "--config", str(folder.config("engine")), "--check"],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_rock_of_ones_own_and_another_admin_port(folder):
    configure(folder, "--rock-base-url", "https://rock.example.com", "--rock-cluster", "my-cluster",
              "--outer-image", "registry.example.com/team/tinker-harbor:local", "--admin-port", "18081")
    settings = load(folder)
    assert settings.harbor.environment.base_url == "https://rock.example.com"
    assert settings.harbor.environment.cluster == "my-cluster" and settings.runtime.rock.admin_port == 18081
    change(folder, "harbor", "environment.extra_headers", {"X-Key": "secret"})
    assert load(folder).harbor.environment.extra_headers == {"X-Key": "secret"}


def test_the_admins_port_is_part_of_the_local_address(folder):
    configure(folder, "--admin-port", "18081")
    assert load(folder).harbor.environment.base_url == "http://127.0.0.1:18081"


def test_the_admins_file_is_rocks_own_with_a_key_of_its_own(folder):
    configure(folder)
    admin = yaml.safe_load(folder.config("admin").read_text())
    assert set(admin) == {"ray", "warmup", "aes_encrypt_key", "runtime", "scheduler", "http_pools"}
    assert all(pool["max_keepalive_connections"] == 0 for pool in admin["http_pools"].values())
    assert folder.config("admin").stat().st_mode & 0o077 == 0, "the key is nobody else's"


def test_nothing_is_overwritten(folder, capsys):
    configure(folder)
    before = {name: folder.config(name).read_text() for name in ("engine", "harbor", "runtime", "admin")}
    assert configure(folder) == 2 and "not overwritten" in capsys.readouterr().err
    assert {name: folder.config(name).read_text() for name in before} == before


@pytest.mark.parametrize(("more", "named"), [
    (["--input-tokens", "60000"], "input_tokens 60000 and output_tokens 8192 are together more than the context of 65536"),
    (["--turns", "0"], "turns is 0"),
    (["--rock-base-url", "rock.example.com"], "--rock-base-url is rock.example.com; it must begin with http"),
    (["--preset", "/nowhere.yaml"], "--preset is /nowhere.yaml"),
])
def test_contradictions_are_refused_before_anything_is_written(folder, capsys, more, named):
    assert configure(folder, *more) == 2
    assert named in capsys.readouterr().err and not (folder.root / "config").exists()


def test_a_task_that_was_not_prepared_is_refused(tmp_path, capsys):
    assert configure(TaskFolder(tmp_path)) == 2
    assert "prepare-sandbox --task-id sympy__sympy-19637" in capsys.readouterr().err


def test_a_model_folder_without_a_model_is_refused(folder, tmp_path, capsys):
    assert configure(folder, model=["--model", str(tmp_path)]) == 2
    assert "holds no config.json" in capsys.readouterr().err


def test_a_model_folder(folder, tmp_path):
    model = tmp_path / "my-model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert configure(folder, model=["--model", str(model), "--renderer", "qwen3_instruct"]) == 0
    client = load(folder).runtime.client
    assert client.model == "local/my-model" and client.tokenizer == str(model)
    assert yaml.safe_load(folder.config("engine").read_text())["server"]["model_path"] == str(model)


def test_a_small_model_as_the_page_says(folder):
    """The bundled model's tokenizer is found without a hub; its renderer must be given, for the cookbook's table lacks it."""
    budget = ["--context-tokens", "2048", "--input-tokens", "1500", "--output-tokens", "400", "--turns", "2",
              "--preset", str(ROOT / "configs/quick_start/cpu.yaml"), "--agent", "bash-agent"]
    model = ["--model", "HuggingFaceTB/SmolLM2-135M-Instruct", "--renderer", "qwen3_instruct"]
    assert configure(folder, *budget, model=model) == 0
    client = load(folder).runtime.client
    assert (Path(client.tokenizer) / "tokenizer.json").is_file()
    assert yaml.safe_load(folder.config("engine").read_text())["server"]["model_path"] == "bundled:smollm2"


def test_the_three_output_limits_must_agree(folder):
    configure(folder)
    load(folder, max_tokens=8192)
    with pytest.raises(SettingError, match=r"agent.max_output_tokens is 8192.*--max-tokens\) is 4096; set all three"):
        load(folder, max_tokens=4096)
    change(folder, "harbor", "agent.completion_kwargs.max_tokens", 4096)
    with pytest.raises(SettingError, match="agent.completion_kwargs.max_tokens is 4096"):
        load(folder)
    change(folder, "harbor", "agent.max_output_tokens", 4096)
    assert load(folder, max_tokens=4096).budget.output_tokens == 4096


def test_input_and_output_must_fit_the_servers_context(folder):
    configure(folder)
    change(folder, "engine", "actor_rollout_ref.rollout.max_model_len", 40000)
    with pytest.raises(SettingError, match="more than the context of 40000 tokens"):
        load(folder)
    change(folder, "engine", "actor_rollout_ref.rollout.max_model_len", None)
    with pytest.raises(SettingError, match="max_model_len is None"):
        load(folder)


@pytest.mark.parametrize(("name", "path", "value", "named"), [
    ("harbor", "environment.imag", "x", "config/harbor.yaml: unknown key environment.imag; the nearest is image"),
    ("harbor", "environment.cpus", "two", "environment.cpus is 'two'; it must be a number"),
    ("harbor", "environment.extra_headers", "X: y", "environment.extra_headers is 'X: y'; it must be a section"),
    ("harbor", "agent.name", "codex", "agent.name is 'codex'; it must be one of"),
    ("harbor", "agent", 5, "agent is 5; it must be a section"),
    ("runtime", "backend.port", True, "backend.port is True; it must be a whole number"),
    ("runtime", "rollout_only", "yes please", "rollout_only is 'yes please'; it must be true or false"),
])
def test_a_wrong_key_or_type_is_named(folder, name, path, value, named):
    configure(folder)
    change(folder, name, path, value)
    with pytest.raises(SettingError, match="(?s)" + named):
        load(folder)


def test_files_that_are_missing_or_no_yaml_are_named(folder):
    with pytest.raises(SettingError, match="harbor.yaml is missing; run"):
        load(folder)
    configure(folder)
    folder.config("harbor").write_text("a: [")
    with pytest.raises(SettingError, match="harbor.yaml cannot be read"):
        load(folder)
    folder.config("harbor").write_text("task: {}")
    with pytest.raises(SettingError, match="environment is missing"):
        read(folder.config("harbor"), HarborSettings)


def test_another_task_id_than_the_configured_one_is_refused(folder):
    configure(folder)
    with pytest.raises(SettingError, match="--task-id is other.*is for sympy__sympy-19637"):
        load(folder, task_id="other")


@pytest.mark.parametrize(("more", "named"), [
    (["ppo"], "configured with --rollout-only"),
    (["rollout", "--task-id", "x"], "--task-id is x"),
    (["rollout", "--max-tokens", "10"], "output limits differ"),
])
def test_run_refuses_before_it_starts_anything(folder, capsys, more, named):
    configure(folder, "--rollout-only")
    assert main(["run", more[0], "--task-root", str(folder.root), *more[1:]]) == 2
    assert named in capsys.readouterr().err and not (folder.root / "runs").exists()


@pytest.mark.parametrize(("more", "named"), [
    (["grpo", "--group-size", "1"], "--group-size is 1"), (["grpo", "--num-steps", "0"], "--num-steps is 0"),
    (["ppo", "--max-train-transitions", "0"], "--max-train-transitions is 0"),
    (["ppo-kl", "--kl-beta", "-1"], "--kl-beta is -1"),
])
def test_flags_out_of_their_bounds_are_named(folder, capsys, more, named):
    configure(folder)
    assert main(["run", more[0], "--task-root", str(folder.root), *more[1:]]) == 2
    assert named in capsys.readouterr().err


def test_training_at_another_temperature_is_refused(folder, capsys):
    configure(folder, "--temperature", "0.7")
    assert main(["run", "grpo", "--task-root", str(folder.root)]) == 2
    assert "client.temperature is 0.7" in capsys.readouterr().err


def test_a_task_folder_is_needed(monkeypatch, capsys):
    monkeypatch.delenv("TASK", raising=False)
    assert main(["run", "rollout"]) == 2 and "set TASK" in capsys.readouterr().err
    monkeypatch.setenv("TASK", "relative")
    assert main(["run", "rollout"]) == 2 and "absolute path" in capsys.readouterr().err


def test_a_taken_port_is_refused_by_its_file(folder, capsys):
    configure(folder)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(SettingError, match=f"port {port} for the server cannot be had"):
            check_free(port, "the server", "anything")
        change(folder, "runtime", "backend.port", port)
        assert main(["run", "rollout", "--task-root", str(folder.root)]) == 2
        assert "backend.port in config/runtime.yaml" in capsys.readouterr().err


def test_the_ports_are_the_quick_starts():
    assert BACKEND_PORT == 19210
    assert {f.name for f in dataclasses.fields(RuntimeSettings)} == {"backend", "client", "rock", "rollout_only"}
