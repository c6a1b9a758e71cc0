"""`configure`: writes the four files of a $TASK folder from flags, and overwrites none.

Owns the quick start's defaults. Does not start anything.
"""

from __future__ import annotations

import argparse
import base64
import secrets
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from harbor_env.errors import SettingError
from harbor_env.settings import (
    ADMIN_PORT,
    AGENTS,
    BACKEND_PORT,
    WORKER_PORT,
    AgentSettings,
    ClientSettings,
    TaskFolder,
    budget_of,
)

ROOT = Path(__file__).resolve().parents[1]
NAMES = ("engine", "harbor", "runtime", "admin")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--task-root", help="the $TASK folder; by default the variable TASK")
    parser.add_argument("--task-id", required=True, help="a prepared task, as sympy__sympy-19637")
    parser.add_argument("--model", required=True, help="a public name, or the absolute path of a model folder")
    parser.add_argument("--outer-image", default="tinker-harbor:local", help="the image that prepare-sandbox made")
    parser.add_argument("--node-ip", default="127.0.0.1", help="this machine's address, for ROCK's services")
    parser.add_argument("--rollout-only", action="store_true", help="training modes are refused in this folder")
    parser.add_argument("--rock-base-url", help="an existing ROCK's admin; by default the local one")
    parser.add_argument("--rock-cluster", default="local")
    parser.add_argument("--admin-port", type=int, default=ADMIN_PORT)
    parser.add_argument("--model-download-type", choices=("HUGGINGFACE", "MODELSCOPE"), default="HUGGINGFACE")
    parser.add_argument("--roll-root", help="accepted and not used: the server is this repository's")
    parser.add_argument("--preset", help="the server's preset to start from; by default by this machine's device")
    parser.add_argument("--renderer", help="the cookbook's renderer, where its table does not know the model")
    parser.add_argument("--tokenizer", help="a hub name or folder; by default the model's")
    parser.add_argument("--agent", choices=AGENTS, default="swe-agent")
    parser.add_argument("--gpus", type=int, help="GPUs of this machine that the server uses; by default the preset's")
    parser.add_argument("--input-tokens", type=int, default=32768)
    parser.add_argument("--output-tokens", type=int, default=8192)
    parser.add_argument("--context-tokens", type=int, default=65536)
    parser.add_argument("--observation-chars", type=int, default=12000)
    parser.add_argument("--observations-kept", type=int, default=8)
    parser.add_argument("--turns", type=int, default=32)
    parser.add_argument("--temperature", type=float, default=1.0)


def main(options: argparse.Namespace) -> int:
    folder = TaskFolder.found(options.task_root)
    existing = [folder.config(name) for name in NAMES if folder.config(name).exists()]
    if existing:
        raise SettingError(f"{existing[0]} is there already and is not overwritten; edit it, or configure a new folder")
    task = folder.tasks / options.task_id
    if not (task / "task.toml").is_file():
        raise SettingError(
            f"{task} holds no task.toml; run `python -m harbor_env prepare-sandbox --task-id {options.task_id}` first")
    engine, agent = _engine(options), _agent(options)
    client = _client(options, engine["server"])
    budget_of(AgentSettings(**agent), ClientSettings(**client), options.context_tokens)
    files = {"engine": engine, "harbor": _harbor(options, task, agent),
             "runtime": _runtime(options, folder, client), "admin": _admin(options)}
    for name, content in files.items():
        folder.config(name).parent.mkdir(parents=True, exist_ok=True)
        with open(folder.config(name), "x") as file:
            yaml.safe_dump(content, file, sort_keys=False)
        print(f"wrote {folder.config(name)}")
    folder.config("admin").chmod(0o600)
    return 0


def _name(options: argparse.Namespace) -> str:
    """The model's public name; a folder's is made from its own."""
    path = Path(options.model)
    if path.is_absolute() and not (path / "config.json").is_file():
        raise SettingError(f"--model is {path}, which holds no config.json; give a model's folder or its public name")
    return f"local/{path.name}" if path.is_absolute() else options.model


def _client(options: argparse.Namespace, server: dict[str, Any]) -> dict[str, Any]:
    name = _name(options)
    tokenizer = options.tokenizer or _folder(str(server.get("model_path") or options.model))
    return {"model": name, "tokenizer": tokenizer, "renderer": options.renderer or _renderer_of(name),
            "max_tokens": options.output_tokens, "temperature": options.temperature}


def _folder(source: str) -> str:
    """Where a bundled model's tokenizer lies; only the server's environment can make it."""
    if not source.startswith("bundled:"):
        return source
    code = "import sys; from verl_tinker.models import resolve_model; print(resolve_model(sys.argv[1]))"
    done = subprocess.run([ROOT / ".venv" / "bin" / "python", "-c", code, source], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SettingError(f"{source} cannot be prepared: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()


def _renderer_of(name: str) -> str:
    from tinker_cookbook.model_info import get_recommended_renderer_name

    try:
        return get_recommended_renderer_name(name)
    except Exception as error:  # The table raises types of its own for each organisation.
        raise SettingError(f"the cookbook recommends no renderer for {name}; give --renderer, as qwen3_instruct") from error


def _agent(options: argparse.Namespace) -> dict[str, Any]:
    return {"name": options.agent, "max_input_tokens": options.input_tokens, "max_output_tokens": options.output_tokens,
            "per_instance_call_limit": options.turns, "temperature": options.temperature,
            "completion_kwargs": {"max_tokens": options.output_tokens}, "max_observation_length": options.observation_chars,
            "last_n_observations": options.observations_kept}


def _engine(options: argparse.Namespace) -> dict[str, Any]:
    """A preset of the server with the model, the context and the GPUs of this folder."""
    usual = "actor_rollout_ref.yaml" if _has_gpu() else "cpu.yaml"
    file = Path(options.preset or ROOT / "configs" / "quick_start" / usual)
    if not file.is_file():
        raise SettingError(f"--preset is {file}, which is no file")
    preset, name = yaml.safe_load(file.read_text()), _name(options)
    if preset["server"]["model_name"] != name or name.startswith("local/"):
        preset["server"] |= {"model_name": name, "model_path": options.model, "model_aliases": {}}
    part = preset["actor_rollout_ref"]
    part["rollout"]["max_model_len"] = options.context_tokens
    packed = part["actor"].get("ppo_max_token_len_per_gpu") or 0
    part["actor"]["ppo_max_token_len_per_gpu"] = max(packed, options.context_tokens)
    if options.gpus is not None:
        preset["trainer"]["n_gpus_per_node"] = options.gpus
    return preset


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None and Path("/dev/nvidia0").exists()


def _harbor(options: argparse.Namespace, task: Path, agent: dict[str, Any]) -> dict[str, Any]:
    url = options.rock_base_url or f"http://127.0.0.1:{options.admin_port}"
    if not url.startswith(("http://", "https://")):
        raise SettingError(f"--rock-base-url is {url}; it must begin with http:// or https://")
    return {
        "environment": {"base_url": url, "cluster": options.rock_cluster, "image": options.outer_image, "extra_headers": {},
                        "memory": "8g", "cpus": 2, "startup_timeout": 600, "auto_clear_seconds": 1800},
        "task": {"id": options.task_id, "path": str(task)},
        "agent": agent,
        "model_service": {"port": 28080},
        "job": {"jobs_dir": "/data/logs/user-defined/jobs", "timeout_sec": 7200},
    }


def _runtime(options: argparse.Namespace, folder: TaskFolder, client: dict[str, Any]) -> dict[str, Any]:
    python = folder.root / "runtime-venv" / "bin" / "python"
    return {
        "backend": {"host": "127.0.0.1", "port": BACKEND_PORT, "checkpoint_dir": str(folder.root / "checkpoints"),
                    "python": str(python if python.exists() else ROOT / ".venv" / "bin" / "python"),
                    "download_type": options.model_download_type},
        "client": client,
        "rock": {"admin_port": options.admin_port, "worker_port": WORKER_PORT, "node_ip": options.node_ip,
                 "venv": str(folder.root / "rock-venv")},
        "rollout_only": options.rollout_only,
    }


def _admin(options: argparse.Namespace) -> dict[str, Any]:
    """ROCK's own file. Its pools must not keep connections, or calls five seconds apart meet a closed one."""
    pool = {"max_connections": 50, "max_keepalive_connections": 0}
    return {
        "ray": {"address": "127.0.0.1:6390", "runtime_env": {}, "namespace": "rock-sandbox-local"},
        "warmup": {"images": []},
        "aes_encrypt_key": base64.b64encode(secrets.token_bytes(32)).decode(),
        "runtime": {"operator_type": "ray"},
        "scheduler": {"enabled": False},
        "http_pools": {name: {"timeout": seconds, **pool}
                       for name, seconds in (("probe", 5.0), ("rpc", 180.0), ("proxy", None))},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    try:
        sys.exit(main(parser.parse_args()))
    except SettingError as error:
        sys.exit(f"error: {error}")
