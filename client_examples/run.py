"""Launches unmodified cookbook recipes by their own command lines against a self-hosted server.

Owns the table of recipes and the flags that make each small enough for two cores. Contains no training loop.

    python client_examples/run.py shorter --base-url http://127.0.0.1:8000 -- max_steps=3
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT_PYTHON = ROOT / ".client-venv" / "bin" / "python"
_MODEL = ["model_name=HuggingFaceTB/SmolLM2-135M-Instruct", "renderer_name=qwen3_instruct"]


@dataclass(frozen=True)
class Recipe:
    """A module below tinker_cookbook.recipes, and flags; flags given later win over earlier ones."""

    module: str
    flags: list[str]


RECIPES = {
    "chat_sl": Recipe("chat_sl.train", [
        "dataset=arith_sft.jsonl", "batch_size=32", "max_length=128", "train_on_what=last_assistant_message",
        "learning_rate=1e-3", "lr_schedule=constant", "max_steps=30", "save_every=10", "eval_every=0"]),
    "math_rl": Recipe("math_rl.train", [
        "groups_per_batch=12", "group_size=8", "max_tokens=5", "learning_rate=3e-4", "max_steps=20", "eval_every=0",
        "save_every=10", "loss_fn=importance_sampling"]),
    "shorter": Recipe("preference.shorter.train", [
        "batch_size=4", "group_size=8", "max_tokens=48", "learning_rate=3e-4", "max_steps=10", "eval_every=0"]),
    "dpo": Recipe("preference.dpo.train", ["dataset=hhh", "batch_size=8", "max_length=512", "max_steps=4"]),
}


def command(name: str, log_path: Path, extra: list[str]) -> list[str]:
    """The recipe's own command line. chz refuses a flag that is given twice, so later ones replace earlier ones."""
    recipe = RECIPES[name]
    flags: dict[str, str] = {}
    for flag in [*_MODEL, *recipe.flags, f"log_path={log_path.resolve()}", "behavior_if_log_dir_exists=delete", *extra]:
        key, _, value = flag.partition("=")
        flags[key] = value
    return [str(CLIENT_PYTHON), "-m", f"tinker_cookbook.recipes.{recipe.module}", *(f"{k}={v}" for k, v in flags.items())]


def environment(base_url: str) -> dict[str, str]:
    """The two variables that the SDK needs, and the one that keeps Hugging Face from asking the network."""
    key = os.environ.get("TINKER_API_KEY", "tml-local")
    return {**os.environ, "TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def prepare_folder(folder: Path, model_folder: Path | None = None) -> None:
    """Lay out the hub-shaped working folder with the client's own environment."""
    extra = ["--model-folder", str(model_folder)] if model_folder else []
    subprocess.run([str(CLIENT_PYTHON), str(ROOT / "client_examples" / "offline.py"), str(folder), *extra], check=True)


def launch(name: str, log_path: Path, base_url: str, folder: Path, extra: list[str] = (), **popen) -> subprocess.Popen:
    """Start a recipe inside the working folder; the caller waits for it."""
    return subprocess.Popen(command(name, log_path, list(extra)), cwd=folder, env=environment(base_url), **popen)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("recipe", choices=RECIPES)
    parser.add_argument("--base-url", default=os.environ.get("TINKER_BASE_URL", "http://127.0.0.1:8000"))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "work", help="hub-shaped working folder")
    parser.add_argument("--log-path", type=Path, default=None)
    parser.epilog = "After -- come the recipe's own flags."
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    arguments, extra = sys.argv[1:at], sys.argv[at + 1 :]
    options = parser.parse_args(arguments)
    if not CLIENT_PYTHON.exists():
        sys.exit("the client environment is missing; run client_examples/setup.sh")
    prepare_folder(options.folder)
    log_path = options.log_path or ROOT / "runs" / options.recipe
    process = launch(options.recipe, log_path, options.base_url, options.folder, extra)
    try:
        sys.exit(process.wait())
    except KeyboardInterrupt:
        sys.exit(process.wait())


if __name__ == "__main__":
    main()
