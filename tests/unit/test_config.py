"""Presets: what they become, what wins over what, and what the refusals say."""

import subprocess
import sys
from pathlib import Path

import pytest

from verl_tinker import config as config_module
from verl_tinker.api.flags import CLIENT_CONFIG, DYNAMIC_CONFIG, chosen
from verl_tinker.checks import check_served
from verl_tinker.config import ENVIRONMENT, find_preset, load_config
from verl_tinker.models import ModelMap
from verl_tinker.schema import ConfigError

ROOT = Path(__file__).parents[2]
PRESETS = sorted(str(f.relative_to(ROOT)) for f in (ROOT / "configs").rglob("*.yaml"))
CPU = "configs/quick_start/cpu.yaml"
ROLLOUT = "configs/quick_start/actor_rollout.yaml"


def load(path=CPU, *overrides, **environ):
    return load_config(path, overrides, environ)


def refusal(path=CPU, *overrides, **environ):
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, environ)
    return str(caught.value)


@pytest.mark.parametrize("path", PRESETS)
def test_a_printed_preset_loads_to_the_same(path, tmp_path):
    text = load(path).to_yaml()
    (tmp_path / "again.yaml").write_text(text)
    assert load(tmp_path / "again.yaml").to_yaml() == text


def test_what_verl_refuses_is_one_error():
    config = load(ROLLOUT, "actor_rollout_ref.actor.use_dynamic_bsz=false")
    with pytest.raises(ConfigError, match=f"^{ROLLOUT}: verl refuses actor_rollout_ref.actor: .*micro_batch_size"):
        config.check_verl()


def test_loading_a_preset_imports_neither_verl_nor_ray():
    script = "import sys\nfrom verl_tinker.config import load_config\nload_config(sys.argv[1])\n" \
             "assert not {'verl', 'ray', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script, CPU], check=True, cwd=ROOT, timeout=120)


def test_the_cpu_preset():
    config = load()
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert (config.device, config.server.host, config.server.port) == ("cpu", "127.0.0.1", 8000)
    assert dict(config.models) == {"HuggingFaceTB/SmolLM2-135M-Instruct": "bundled:smollm2"}
    assert (actor.strategy, actor.fsdp_config.model_dtype, rollout.dtype) == ("fsdp2", "fp32", "float32")
    assert set(actor.fsdp_config.mixed_precision.values()) == {"fp32"}
    assert config.context_length == config.token_budget == 2048
    assert (config.actor.mode, config.actor.lora_alpha, config.actor.max_lora_rank) == ("auto", 32, 128)
    assert config.has_rollout and not config.has_ref and config.allow_shutdown


def test_the_shapes_of_the_gpu_presets():
    shapes = {name: load(f"configs/quick_start/{name}.yaml") for name in ("actor", "actor_rollout", "actor_rollout_ref")}
    assert [c.has_rollout for c in shapes.values()] == [False, True, True]
    assert [c.has_ref for c in shapes.values()] == [False, False, True]
    assert {c.trainer.n_gpus_per_node for c in shapes.values()} == {8}
    assert shapes["actor"].models["Qwen/Qwen3-8B"] == "Qwen/Qwen3-8B"


def test_verls_defaults_fill_what_the_preset_leaves_out():
    rollout = load(ROLLOUT).actor_rollout_ref.rollout
    assert (rollout.mode, rollout.logprobs_mode, rollout.n_gpus_per_node) == ("async", "processed_logprobs", 8)
    assert "logprobs_mode" not in load(ROLLOUT, "server.auto_merge_verl_default_config=false").actor_rollout_ref.rollout


def test_environment_wins_over_the_preset_and_set_over_both():
    assert load(CPU, TINKER_SERVER_PORT="9000").server.port == 9000
    assert load(CPU, "server.port=9001", TINKER_SERVER_PORT="9000").server.port == 9001
    assert load(CPU, TINKER_SERVER_PORT="").server.port == 8000


def test_every_variable_reaches_its_key():
    values = {"PORT": "9", "N_GPUS_PER_NODE": "3", "MAX_RUNTIME": "1.5", "MAX_CONCURRENT_SAMPLES": "4", "HOST": "::1"}
    environ = {name: next((v for end, v in values.items() if name.endswith(end)), f"text-{name}") for name in ENVIRONMENT}
    config = load(CPU, **environ)
    for name, key in ENVIRONMENT.items():
        section, _, field = key.partition(".")
        assert str(getattr(getattr(config, section), field)) == environ[name], name


def test_the_model_path_is_the_nearest_that_is_given():
    assert load(ROLLOUT, "server.model_name=a/b").models["a/b"] == "a/b"
    assert load(ROLLOUT, "actor_rollout_ref.model.path=org/m").models["Qwen/Qwen3-8B"] == "org/m"
    assert load(ROLLOUT, "actor_rollout_ref.model.path=org/m", "server.model_path=org/n").models["Qwen/Qwen3-8B"] == "org/n"


def test_text_stays_text_and_numbers_are_numbers():
    config = load(CPU, "server.model_name=123", "actor_rollout_ref.actor.optim.lr=1e-5", "server.allow_shutdown=false")
    assert config.server.model_name == "123"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-5
    assert config.allow_shutdown is False


def test_aliases_hold_names_with_dots_and_suffixes():
    models = load(CPU, "server.model_aliases={Qwen/Qwen3.6-35B-A3B:peft:262144: bundled:tiny}").models
    assert isinstance(models, ModelMap) and models["Qwen/Qwen3.6-35B-A3B:peft:262144"] == "bundled:tiny"


def test_flags_of_clients_are_chosen_by_the_preset(tmp_path):
    override = "server.client_flags={sample_use_retrieve_futures: true, refresh_interval_sec: 60}"
    client, dynamic = chosen(load(CPU, override, "server.client_flags.fwdbwd_max_chunk_len=100").server.client_flags)
    changed = {"sample_use_retrieve_futures": True, "fwdbwd_max_chunk_len": 100}
    assert client == {**CLIENT_CONFIG, **changed} and dynamic == {**DYNAMIC_CONFIG, "refresh_interval_sec": 60}
    (tmp_path / "again.yaml").write_text(load(CPU, override).to_yaml())
    assert load(tmp_path / "again.yaml").server.client_flags == {"sample_use_retrieve_futures": True, "refresh_interval_sec": 60}


def test_a_model_folder_whose_config_is_no_object(tmp_path):
    for text in ("[]", "{", "3"):
        (tmp_path / "config.json").write_text(text)
        assert "whose config.json is no JSON object" in refusal(CPU, f"server.model_path={tmp_path}")


def test_shutdown_is_allowed_by_default_only_where_nobody_else_can_reach():
    public = ("server.host=0.0.0.0", "server.allow_without_keys=true")
    assert not load(CPU, *public).allow_shutdown
    assert load(CPU, *public, "server.allow_shutdown=true").allow_shutdown
    assert not load(CPU, "server.api_keys_file=keys.json").allow_shutdown


def test_a_public_address_needs_keys_or_a_word():
    with pytest.raises(ConfigError, match="server.host is 0.0.0.0.*server.api_keys_file.*server.allow_without_keys"):
        load(CPU, "server.host=0.0.0.0")
    assert load(CPU, "server.host=0.0.0.0", "server.api_keys_file=keys.json").server.host == "0.0.0.0"


@pytest.mark.parametrize("strategy, section", [("fsdp2", "fsdp_config"), ("megatron", "megatron"), ("veomni", "veomni")])
def test_offload_reaches_the_engine_that_trains(tmp_path, strategy, section):
    text = "server: {model_name: a/b, enable_offload: true}\ndevice: cuda\n" \
           f"actor_rollout_ref: {{actor: {{strategy: {strategy}, use_dynamic_bsz: true}}}}\n"
    (tmp_path / "p.yaml").write_text(text)
    engine = load(tmp_path / "p.yaml").actor_rollout_ref.actor[section]
    assert engine.param_offload and engine.optimizer_offload


@pytest.mark.parametrize("override, text", [
    ("actor_rollout_ref.actor.strategy=fsdp",
     "actor_rollout_ref.actor.strategy is fsdp; runs and adapters of this server are built on fsdp2"),
    ("actor_rollout_ref.rollout.name=sglang", "actor_rollout_ref.rollout.name is sglang; this server samples with vllm"),
])
def test_what_verl_knows_and_this_server_has_not_is_refused_at_the_start(override, text):
    config = load(ROLLOUT, override)
    with pytest.raises(ConfigError) as caught:
        check_served(config)
    assert text in str(caught.value) and "not start it" in str(caught.value)


@pytest.mark.parametrize("override, text", [
    ("server.prot=1", "unknown key server.prot; the nearest is server.port"),
    ("devise=cpu", "unknown key devise; the nearest is device"),
    ("server.port=x", "server.port is 'x'; it must be a whole number"),
    ("server.port=99999", "server.port is 99999; it must be at most 65535"),
    ("server.keep_versions=0", "server.keep_versions is 0; it must be at least 1"),
    ("server.allow_shutdown=maybe", "server.allow_shutdown is 'maybe'; it must be auto or true or false"),
    ("server.model_aliases.a=3", "it must be a section of keys, each with text"),
    ("server=null", "server is null; it must be a section of keys"),
    ("actor.mode=half", "actor.mode is 'half'; it must be auto or lora or full"),
    ("actor_rollout_ref.rollout.max_num_seq=3", "the nearest is actor_rollout_ref.rollout.max_num_seqs"),
    ("actor_rollout_ref.max_num_seqs=3", "the nearest is actor_rollout_ref.rollout.max_num_seqs"),
    ("actor_rollout_ref.rollout.max_num_seqs=many", "max_num_seqs is 'many'; it must be a whole number"),
    ("actor_rollout_ref.rollout.enable_sleep_mode=3", "enable_sleep_mode is 3; it must be true or false"),
    ("actor_rollout_ref.rollout.max_model_len=true", "max_model_len is true; it must be a whole number or null"),
    ("actor_rollout_ref.actor.fsdp_config.model_dtyp=fp32", "actor_rollout_ref.actor.fsdp_config.model_dtype"),
    ("actor_rollout_ref.actor.optim.betas=3", "betas is 3; it must be a list"),
    ("actor_rollout_ref.actor.strategy=fsdp3", "it must be one of fsdp, fsdp2, veomni, megatron"),
    ("actor_rollout_ref.actor.strategy=fsdp", "without a GPU it must be fsdp2"),
    ("actor_rollout_ref.rollout.max_model_len=4096", "what was sampled could not be trained on"),
    ("actor_rollout_ref.rollout.tensor_model_parallel_size=3", "does not divide the 1 workers"),
    ("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
     "actor_rollout_ref.actor.ulysses_sequence_parallel_size is 2, which does not divide the 1 workers"),
    ("actor_rollout_ref.rollout.dtype=${nowhere}", "nowhere"),
    ("actor_rollout_ref.rollout.max_model_len=-3", "actor_rollout_ref.rollout.max_model_len is -3; it must be at least 1"),
    ("actor.lora_alpha=.nan", "actor.lora_alpha is nan; it must be a positive, finite number"),
    ("server.session_timeout_s=0", "server.session_timeout_s is 0; it must be a positive, finite number"),
    ("server.model_name=", "server.model_name is empty; give it a value"),
    ("server.api_keys_file= ", "server.api_keys_file is empty; give it a value"),
    ("server.client_flags=3", "server.client_flags is 3; it must be a section of keys"),
    ("server.client_flags.sample_no_retry=true", "sample_no_retry is not a flag that clients know; there are pjwt_auth_enabled, "),
    ("server.client_flags.sample_no_retries=1", "server.client_flags.sample_no_retries is 1; it must be true or false"),
    ("server.client_flags.fwdbwd_max_chunk_len=true", "fwdbwd_max_chunk_len is True; it must be a whole number from 1 on"),
    ("server.client_flags.fwdbwd_max_chunk_len=0", "fwdbwd_max_chunk_len is 0; it must be a whole number from 1 on"),
    ("server.client_flags.fwdbwd_max_chunk_len=16385", "fwdbwd_max_chunk_len is 16385; it must be at most 16384"),
    ("server.client_flags.credential_default_source=x", "it must be api_key or credential_cmd"),
    ("server.client_flags.pjwt_auth_enabled=true", "pjwt_auth_enabled must be false: this server has no route for it"),
    ("server.model_path=/nowhere", "is to come from /nowhere, where no config.json is"),
    ("nonsense", "write key=value"),
])
def test_what_cannot_be_is_one_error_that_names_the_key(override, text):
    message = refusal(CPU, override)
    assert text in message and "\n" not in message


def test_an_error_says_where_the_value_came_from(tmp_path):
    assert refusal(CPU, TINKER_SERVER_PORT="x").startswith("TINKER_SERVER_PORT: server.port")
    assert refusal(CPU, "server.prot=1").startswith("--set server.prot=1: unknown key")
    (tmp_path / "mine.yaml").write_text("server: {model_name: a/b, prot: 1}")
    assert refusal(tmp_path / "mine.yaml").startswith(f"{tmp_path}/mine.yaml: unknown key server.prot")


@pytest.mark.parametrize("text, reason", [
    ("server: [", "cannot be read"), ("- 1", "must be sections of keys"), ("device: cpu", "server.model_name is missing")])
def test_files_that_are_no_presets(tmp_path, text, reason):
    (tmp_path / "bad.yaml").write_text(text)
    assert reason in refusal(tmp_path / "bad.yaml")


def test_presets_are_found_from_anywhere_and_the_current_folder_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_preset(CPU) == ROOT / CPU
    (tmp_path / CPU).parent.mkdir(parents=True)
    (tmp_path / CPU).write_text("server: {model_name: mine/mine}\ndevice: cpu\n")
    assert find_preset(CPU) == tmp_path / CPU
    assert CPU in refusal("configs/none.yaml")


@pytest.mark.parametrize("gpu, expected", [(False, CPU), (True, ROLLOUT)])
def test_without_a_preset_the_machine_decides(monkeypatch, gpu, expected):
    monkeypatch.setattr(config_module, "_has_gpu", lambda: gpu)
    assert load(None).source == expected


def test_the_originals_check_command_prints_errors_only(tmp_path):
    command = [sys.executable, "-m", "verl_tinker.config_utils", "--config", CPU, "--set", "server.prot=1"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr == "--set server.prot=1: unknown key server.prot; the nearest is server.port\n"
