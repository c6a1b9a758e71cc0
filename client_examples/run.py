"""Launches unmodified cookbook recipes by their own command lines against a self-hosted server.

Owns the table of recipes and the flags that make each small enough for two cores. Contains no training loop.
README.md beside it says what each recipe reads and shows.

    python client_examples/run.py shorter --base-url http://127.0.0.1:8000 -- max_steps=3
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT_PYTHON = ROOT / ".client-venv" / "bin" / "python"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Names that some recipes have in their code. A small server offers its model under them by server.model_aliases.
NAMES_IN_CODE = ("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B")
_SMOLLM2 = [f"model_name={MODEL}", "renderer_name=qwen3_instruct"]
_LOGS = ["log_path={log_path}", "behavior_if_log_dir_exists=delete"]


@dataclass(frozen=True)
class Recipe:
    """A module below tinker_cookbook.recipes and its flags, in which {log_path} stands for the folder of its logs."""

    module: str
    flags: list[str]

    @property
    def deletes_logs(self) -> bool:
        """Others go on silently where the logs that they find end."""
        return any(flag.startswith("behavior_if_log_dir_exists=") for flag in self.flags)


RECIPES = {
    "chat_sl": Recipe("chat_sl.train", [
        *_SMOLLM2, *_LOGS, "dataset=arith_sft.jsonl", "batch_size=32", "max_length=128", "eval_every=0", "save_every=10",
        "train_on_what=last_assistant_message", "learning_rate=1e-3", "lr_schedule=constant", "max_steps=30"]),
    "math_rl": Recipe("math_rl.train", [
        *_SMOLLM2, *_LOGS, "groups_per_batch=12", "group_size=8", "max_tokens=5", "learning_rate=3e-4", "max_steps=20",
        "eval_every=0", "save_every=10"]),
    "shorter": Recipe("preference.shorter.train", [
        *_SMOLLM2, *_LOGS, "batch_size=4", "group_size=8", "max_tokens=48", "learning_rate=3e-4", "max_steps=10",
        "eval_every=0"]),
    "dpo": Recipe("preference.dpo.train", [
        *_SMOLLM2, *_LOGS, "dataset=hhh", "batch_size=8", "max_length=512", "max_steps=4"]),
    "distillation": Recipe("distillation.on_policy_distillation", [
        *_SMOLLM2, *_LOGS, f"teacher_model={MODEL}", "dataset=deepmath", "groups_per_batch=4",
        "group_size=2", "max_tokens=16", "max_steps=2"]),
    "sdft": Recipe("sdft.train", [
        *_SMOLLM2, *_LOGS, "groups_per_batch=2", "max_tokens=24", "max_steps=2", "eval_every=0"]),
    # Those below allow no other model than ones that the cookbook has in a table, or name one in their code. The server
    # must offer its small model under that name: see README.md beside this file.
    "rlhf": Recipe("preference.rlhf.rlhf_pipeline", [
        "base_model=Qwen/Qwen3.5-9B-Base", "batch_size=4", "rl_group_size=2", "rl_max_tokens=8", "max_steps=1", "eval_every=0",
        "short_name=t"]),
    "sl_loop": Recipe("sl_loop", ["log_path={log_path}", "batch_size=4", "max_steps=3"]),
    "rl_loop": Recipe("rl_loop", ["log_path={log_path}", "batch_size=4", "group_size=8", "max_tokens=64", "max_steps=2"]),
    "guess_number": Recipe("multiplayer_rl.guess_number.train", [
        *_LOGS, "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2", "eval_every=0"]),
    "twenty_questions": Recipe("multiplayer_rl.twenty_questions.train", [
        *_LOGS, "batch_size=2", "group_size=2", "max_tokens=8", "max_steps=2", "eval_every=0"]),
}


def command(name: str, log_path: Path, extra: list[str]) -> list[str]:
    """The recipe's own command line. chz refuses a flag that is given twice, so later ones replace earlier ones."""
    recipe = RECIPES[name]
    flags: dict[str, str] = {}
    for flag in [*recipe.flags, *extra]:
        key, _, value = flag.partition("=")
        flags[key] = value.replace("{log_path}", str(log_path.resolve()))
    return [str(CLIENT_PYTHON), "-m", f"tinker_cookbook.recipes.{recipe.module}", *(f"{k}={v}" for k, v in flags.items())]


def environment(base_url: str, log_path: Path) -> dict[str, str]:
    """The two variables that the SDK needs, the one that keeps Hugging Face from asking the network, and the folder of
    those recipes that have no flag for it.
    """
    key = os.environ.get("TINKER_API_KEY", "tml-local")
    return {**os.environ, "TINKER_BASE_URL": base_url, "TINKER_API_KEY": key, "HF_HUB_OFFLINE": "1",
            "TINKER_COOKBOOK_RUNS_DIR": str(log_path.resolve()), "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}


def prepare_folder(folder: Path, model_folder: Path | None = None) -> None:
    """Lay out the hub-shaped working folder with the client's own environment."""
    extra = ["--model-folder", str(model_folder)] if model_folder else []
    subprocess.run([str(CLIENT_PYTHON), str(ROOT / "client_examples" / "offline.py"), str(folder), *extra], check=True)


def launch(name: str, log_path: Path, base_url: str, folder: Path, extra: list[str] = (), **popen) -> subprocess.Popen:
    """Start a recipe inside the working folder; the caller waits for it."""
    settings = environment(base_url, log_path)
    return subprocess.Popen(command(name, log_path, list(extra)), cwd=folder, env=settings, **popen)


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
    if options.log_path is None and not RECIPES[options.recipe].deletes_logs:
        shutil.rmtree(log_path, ignore_errors=True)
    process = launch(options.recipe, log_path, options.base_url, options.folder, extra)
    try:
        sys.exit(process.wait())
    except KeyboardInterrupt:
        sys.exit(process.wait())


if __name__ == "__main__":
    main()
