"""What the start command refuses before anything slow begins: one line that names the key."""

import socket

import pytest

from verl_tinker import start, wiring
from verl_tinker.config import load_config
from verl_tinker.core.access import Keys
from verl_tinker.models import ModelError
from verl_tinker.schema import ConfigError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """Give the line with which the command ends, started with these overrides or arguments."""

    def too_late(config):
        raise AssertionError("nothing was refused, and the engine would start now")

    monkeypatch.setattr(start, "_prepare_environment", too_late)
    monkeypatch.setattr(start, "print_config", lambda config, print_config=start.print_config: (print_config(config), too_late(config)))

    def run(*overrides: str, check: bool = False) -> str:
        overrides = (f"server.checkpoint_dir={tmp_path / 'checkpoints'}", *overrides)
        arguments = ["--config", "configs/quick_start/cpu.yaml", *(f"--set={o}" for o in overrides)]
        with pytest.raises(SystemExit) as end:
            start.main([*arguments, "--check"] if check else arguments)
        assert "\n" not in end.value.code
        return end.value.code

    return run


def test_a_port_in_use(refusal):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refusal(f"server.port={port}")
    assert f"server.port: cannot listen on 127.0.0.1 port {port}" in message


@pytest.mark.parametrize("check", [True, False])
def test_a_checkpoint_folder_that_cannot_be(refusal, tmp_path, check):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        message = refusal(f"server.checkpoint_dir={place}", check=check)
        assert f"server.checkpoint_dir: {place} cannot be written to" in message and "--set server.checkpoint_dir=" in message
    assert "server.checkpoint_dir is empty; give it a value" in refusal("server.checkpoint_dir=", check=check)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("check", [True, False])
def test_a_key_file_that_lets_nobody_in(refusal, tmp_path, check):
    file = tmp_path / "keys.json"
    message = refusal(f"server.api_keys_file={file}", check=check)
    assert f"server.api_keys_file: there is no {file}" in message and f"keys add NAME --file {file}" in message
    file.write_text("[]")
    message = refusal(f"server.api_keys_file={file}", check=check)
    assert f"server.api_keys_file: {file} is not a key file" in message and f"keys add NAME --file {file}" in message


@pytest.mark.parametrize("description", [
    "{}", '{"model_type": "nobody_knows"}', '{"model_type": "llama", "vocab_size": "many"}', '{"model_type": "vit"}'])
def test_a_model_that_transformers_does_not_know(tmp_path, description):
    (tmp_path / "config.json").write_text(description)
    config = load_config("configs/quick_start/cpu.yaml", [f"server.model_path={tmp_path}"])
    with pytest.raises(ModelError, match=f"server.model_path: transformers cannot read {tmp_path}/config.json .*; give the folder"):
        wiring.engine_settings(config, tmp_path)


def test_workers_share_a_sequence_only_where_they_can_share_the_heads(tmp_path):
    config = load_config("configs/quick_start/cpu.yaml", [
        "server.model_path=bundled:tiny", "trainer.n_gpus_per_node=4", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"])
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size is 4; the model has 2 attention heads in 1 key-value"):
        wiring.engine_settings(config, tmp_path)


def test_a_check_of_what_could_start_changes_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("verl_tinker.config.Config.check_verl", lambda config: None)
    Keys(tmp_path / "keys.json").add("alice")
    before = sorted(tmp_path.iterdir())
    start.main(["--config", "configs/quick_start/cpu.yaml", "--check", f"--set=server.api_keys_file={tmp_path / 'keys.json'}",
                f"--set=server.checkpoint_dir={tmp_path / 'a' / 'b'}"])
    assert f"checkpoint_dir: {tmp_path / 'a' / 'b'}" in capsys.readouterr().out
    assert sorted(tmp_path.iterdir()) == before
