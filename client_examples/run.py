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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CLIENT_PYTHON = ROOT / ".client-venv" / "bin" / "python"
MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
# Names that some recipes have in their code. A small server offers its model under them by server.model_aliases.
NAMES_IN_CODE = ("Qwen/Qwen3.5-9B-Base", "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-4B")
# Names under which configs/distill/cpu.yaml offers its two frozen models.
TEACHER, TINY_TEACHER = "teachers/SmolLM2-135M-Instruct", "teachers/tiny"
_SMOLLM2 = [f"model_name={MODEL}", "renderer_name=qwen3_instruct"]
_LOGS = ["log_path={log_path}", "behavior_if_log_dir_exists=delete"]


@dataclass(frozen=True)
class Recipe:
    """A module below tinker_cookbook.recipes, or `module:function` of the cookbook's library, and its flags.

    In a flag {log_path} stands for the folder of its logs, and further names in braces for what `launch` is given for them.
    """

    module: str
    flags: list[str]

    @property
    def program(self) -> list[str]:
        """What Python is started with: the recipe's module, or the launcher of library functions."""
        if ":" in self.module:
            return [str(ROOT / "client_examples" / "library.py"), f"tinker_cookbook.{self.module}"]
        return ["-m", f"tinker_cookbook.recipes.{self.module}"]

    @property
    def deletes_logs(self) -> bool:
        """Others go on silently where the logs that they find end."""
        return any(flag.startswith("behavior_if_log_dir_exists=") for flag in self.flags)


def soft_targets(model: str, renderer: str, teacher: str, *, batch_size: int, max_length: int, buffer_size: int,
                 max_prompts: int) -> list[str]:
    """Flags of train_off_policy that have `teacher` score OpenThoughts3, read by the builder of off_policy_reasoning."""
    builder, common = "dataset_configs.0.dataset_builder", "dataset_configs.0.dataset_builder.common_config"
    return [f"{builder}=tinker_cookbook.recipes.distillation.off_policy_reasoning:OpenThoughts3Builder",
            f"{builder}.buffer_size={buffer_size}", f"{builder}.max_prompts={max_prompts}",
            f"{common}.model_name_for_tokenizer={model}", f"{common}.renderer_name={renderer}",
            f"{common}.max_length={max_length}", f"{common}.batch_size={batch_size}", f"batch_size={batch_size}",
            f"dataset_configs.0.teacher_config.base_model={teacher}"]


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
    "off_policy_reasoning": Recipe("distillation.off_policy_reasoning", [
        *_SMOLLM2, *_LOGS, "batch_size=4", "max_length=256", "buffer_size=32", "max_prompts=64", "eval_every=0",
        "max_steps=4"]),
    # The two below ask for the frozen teachers of configs/distill/cpu.yaml.
    "multi_teacher": Recipe("distillation.on_policy_multi_teacher", [
        *_SMOLLM2, *_LOGS, f"deepmath_teacher_model={TEACHER}", f"tulu3_teacher_model={TINY_TEACHER}",
        "deepmath_groups_per_batch=2", "tulu3_groups_per_batch=2", "group_size=2", "max_tokens=16", "max_steps=2"]),
    "off_policy_topk": Recipe("distillation.train_off_policy:main", [
        "log_path={log_path}", f"model_name={MODEL}", "renderer_name=qwen3_instruct", "recipe_name=off_policy_topk",
        *soft_targets(MODEL, "qwen3_instruct", TEACHER, batch_size=2, max_length=128, buffer_size=32, max_prompts=64),
        "learning_rate=1e-4", "save_every=0", "max_steps=2"]),
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


def command(recipe: Recipe, log_path: Path, extra: Sequence[str] = (), names: Mapping[str, str] | None = None) -> list[str]:
    """The recipe's own command line. chz refuses a flag that is given twice, so later ones replace earlier ones."""
    flags: dict[str, str] = {}
    for flag in [*recipe.flags, *extra]:
        key, _, value = flag.partition("=")
        for name, meaning in {**(names or {}), "log_path": str(log_path.resolve())}.items():
            value = value.replace(f"{{{name}}}", meaning)
        flags[key] = value
    return [str(CLIENT_PYTHON), *recipe.program, *(f"{k}={v}" for k, v in flags.items())]


def environment(base_url: str, log_path: Path, offline: bool = True) -> dict[str, str]:
    """The two variables that the SDK needs, the folder of those recipes that have no flag for it and, `offline`, the one
    that keeps Hugging Face from asking the network.
    """
    key = os.environ.get("TINKER_API_KEY", "tml-local")
    settings = {**os.environ, "TINKER_BASE_URL": base_url, "TINKER_API_KEY": key,
                "TINKER_COOKBOOK_RUNS_DIR": str(log_path.resolve()), "TOKENIZERS_PARALLELISM": "false",
                "OMP_NUM_THREADS": "1"}
    return {**settings, "HF_HUB_OFFLINE": "1"} if offline else settings


def prepare_folder(folder: Path, model_folder: Path | None = None) -> None:
    """Lay out the hub-shaped working folder with the client's own environment."""
    extra = ["--model-folder", str(model_folder)] if model_folder else []
    subprocess.run([str(CLIENT_PYTHON), str(ROOT / "client_examples" / "offline.py"), str(folder), *extra], check=True)


def launch(recipe: str | Recipe, log_path: Path, base_url: str, folder: Path, extra: Sequence[str] = (), *,
           names: Mapping[str, str] | None = None, offline: bool = True, **popen) -> subprocess.Popen:
    """Start a recipe inside the working folder; the caller waits for it."""
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    settings = environment(base_url, log_path, offline)
    return subprocess.Popen(command(chosen, log_path, extra, names), cwd=folder, env=settings, **popen)


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
