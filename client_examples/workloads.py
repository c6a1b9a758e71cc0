"""The nine workloads of the original verl-tinker, as flags of the cookbook's own recipes, each with what it must show.

Owns the table: settings of the original, their small form for a machine without a GPU (`lite`), and the checks. Starts
nothing: run_single_test.py does. {model} and {renderer} stand for the model that is trained, {sft} for the state that the
stage `sft` left.
"""

from __future__ import annotations

from dataclasses import dataclass

from checks import Check, absent, begins, begins_above, between, falls, finite, trained
from run import MODEL, TEACHER, TINY_TEACHER, Recipe, soft_targets

QWEN_SMALL, QWEN = "Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"
# Log-probabilities of the same weights by trainer and sampler, in nats on average: float32 and bfloat16.
FLOAT32, BFLOAT16 = 1e-4, 0.05
_NAMES = ["model_name={model}", "renderer_name={renderer}"]
_RECIPE = [*_NAMES, "log_path={log_path}", "behavior_if_log_dir_exists=delete"]


@dataclass(frozen=True)
class Stage:
    """One process of the cookbook; `lite` is laid over the flags of `recipe`."""

    name: str
    recipe: Recipe
    lite: list[str]


@dataclass(frozen=True)
class Workload:
    """`model` is what is trained unless the caller says otherwise; `solutions`: its stages read gsm8k_sft.jsonl."""

    stages: tuple[Stage, ...]
    checks: list[Check]
    lite_checks: list[Check]
    model: str = QWEN
    solutions: bool = False

    def default_model(self, lite: bool) -> str:
        return MODEL if lite else self.model


def _sft(dataset: str, *flags: str, lite: list[str]) -> Stage:
    """Full fine-tuning, as rank 0 asks for. The small form renders plainly: Qwen's renderers copy the tokenizer for each
    row, a sixth of a second, and the 1,024 held-out rows of Tulu 3 are rendered even when nothing is evaluated.
    """
    return Stage("sft", Recipe("chat_sl.train", [
        *_RECIPE, f"dataset={dataset}", "lora_rank=0", "batch_size=16", "max_length=2048", "learning_rate=1e-5",
        "max_steps=100", "save_every=0", *flags]),
        ["renderer_name=role_colon", "batch_size=8", "max_length=256", "learning_rate=1e-4", "num_epochs=2", "max_steps=20",
         *lite])


def _gsm8k(name: str, *flags: str, lite: list[str]) -> Stage:
    """PPO with a penalty on the divergence from the base model, which the command line of math_rl has no flag for."""
    builder = "dataset_builder"
    return Stage(name, Recipe("rl.train:main", [
        *_NAMES, "log_path={log_path}", "recipe_name=rl_gsm8k",
        f"{builder}=tinker_cookbook.recipes.math_rl.math_env:Gsm8kDatasetBuilder",
        f"{builder}.model_name_for_tokenizer={{model}}", f"{builder}.renderer_name={{renderer}}",
        f"{builder}.batch_size=16", f"{builder}.group_size=16", "max_tokens=4096",
        "kl_penalty_coef=0.01", "kl_reference_config.base_model={model}",
        "loss_fn=ppo", 'loss_fn_config={"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}',
        "eval_every=0", "save_every=0", *flags]),
        [f"{builder}.batch_size=4", f"{builder}.group_size=4", "max_tokens=64", *lite])


def _rl_checks(stage: str, within: float) -> list[Check]:
    """The step trains on what was sampled from the very weights that it trains."""
    return [trained(stage), finite(stage, "env/all/reward/total"),
            begins(stage, "optim/kl_sample_train_v1", at=0, within=within)]


_SFT_CHECKS = [falls("sft", "train_mean_nll"), trained("sft")]
_PASS_RATE = "test/env/all/correct"


def _sft_rl_checks(within: float) -> list[Check]:
    """The first RL step is no longer the base model: it goes on from the state of the SFT."""
    rates = [between(stage, _PASS_RATE, -1e-9, 1 + 1e-9) for stage in ("warmup", "rl")]
    return [*_SFT_CHECKS, begins_above("warmup", "kl_policy_base", within), *_rl_checks("warmup", within),
            begins_above("rl", "kl_policy_base", within), *_rl_checks("rl", within), *rates]


_STUDENT = ("{model}", "{renderer}")
_SOFT_LOSS = "train/loss:sum"
_TEACHER_KL = "teacher_kl"
_FIRST, _SECOND = "teacher_kl/dataset_0", "teacher_kl/dataset_1"
_SDFT_CHECKS = [trained("sdft"), between("sdft", "sdft/mean_teacher_entropy", 0, 2.9958)]  # ln 20, for 20 candidates

WORKLOADS = {
    "sft_tulu3": Workload((_sft("tulu3", "eval_every=25", lite=["eval_every=0"]),),
                          [*_SFT_CHECKS, falls("sft", "test/nll")], _SFT_CHECKS),
    "sft_norobot": Workload((_sft("no_robots", "eval_every=25", lite=["eval_every=10"]),),
                            *[[*_SFT_CHECKS, falls("sft", "test/nll")]] * 2),
    "sft_norobot_no_rollout": Workload((_sft("no_robots", "eval_every=0", lite=[]),),
                                       *[[*_SFT_CHECKS, absent("sft", "test/nll")]] * 2),
    "topk_distillation": Workload((Stage("distillation", Recipe("distillation.train_off_policy:main", [
        *_NAMES, "log_path={log_path}", "recipe_name=topk_distillation", "n_teacher_targets=20", "learning_rate=2e-5",
        *soft_targets(*_STUDENT, "Qwen/Qwen3-30B-A3B", batch_size=4, max_length=2048, buffer_size=2000, max_prompts=10_000),
        "save_every=0", "max_steps=200"]),
        [*soft_targets(*_STUDENT, TINY_TEACHER, batch_size=2, max_length=256, buffer_size=64, max_prompts=64),
         "learning_rate=1e-3", "max_steps=20"]),), *[[falls("distillation", _SOFT_LOSS)]] * 2, model=QWEN_SMALL),
    "sdft_single_task": Workload((Stage("sdft", Recipe("sdft.train", [
        *_RECIPE, "dataset=sciknoweval", "sciknoweval_domain=Chemistry", "groups_per_batch=4", "lora_rank=128",
        "learning_rate=2e-5", "topk=20", "teacher_sync_every=1", "eval_every=0", "save_every=0", "max_steps=100"]),
        ["groups_per_batch=2", "max_tokens=24", "lora_rank=32", "max_steps=3"]),), *[_SDFT_CHECKS] * 2),
    "rl_gsm8k": Workload((_gsm8k("rl", "learning_rate=1e-5", "max_steps=100", lite=["learning_rate=1e-4", "max_steps=3"]),),
                         [*_rl_checks("rl", BFLOAT16), begins("rl", "kl_policy_base", at=0, within=BFLOAT16)],
                         [*_rl_checks("rl", FLOAT32), begins("rl", "kl_policy_base", at=0, within=FLOAT32)]),
    "sft_rl_gsm8k": Workload((
        Stage("sft", Recipe("chat_sl.train", [
            *_RECIPE, "dataset=gsm8k_sft.jsonl", "batch_size=64", "max_length=1024", "learning_rate=2e-5", "eval_every=0",
            "save_every=0", "max_steps=50"]), ["batch_size=8", "max_length=256", "learning_rate=1e-3", "max_steps=12"]),
        _gsm8k("warmup", "load_checkpoint_path={sft}", "dataset_builder.convo_prefix=None", "learning_rate=1e-6",
               "eval_every=1", "max_steps=1", lite=["max_tokens=32"]),
        _gsm8k("rl", "load_checkpoint_path={warmup}", "dataset_builder.convo_prefix=None", "learning_rate=1e-6",
               "eval_every=50", "max_steps=100",
               lite=["max_tokens=32", "learning_rate=1e-4", "max_steps=2"])),
        _sft_rl_checks(BFLOAT16), _sft_rl_checks(FLOAT32), solutions=True),
    "opd_deepmath": Workload((Stage("opd", Recipe("distillation.on_policy_distillation", [
        *_RECIPE, "teacher_model=Qwen/Qwen3-30B-A3B", "dataset=deepmath", "groups_per_batch=16", "group_size=2",
        "learning_rate=2e-6", "loss_fn=dro", 'loss_fn_config={"beta": 0.05}', "compute_post_kl=True", "save_every=0",
        "max_steps=100"]),
        [f"teacher_model={TEACHER}", "groups_per_batch=4", "group_size=1", "max_tokens=16", "max_steps=3"]),),
        [trained("opd"), finite("opd", "kl_pre_post_v1"), begins_above("opd", _TEACHER_KL, 0)],
        [trained("opd"), finite("opd", "kl_pre_post_v1"), begins("opd", _TEACHER_KL, at=0, within=FLOAT32)],
        model=QWEN_SMALL),
    "opd_multi_teacher": Workload((Stage("opd", Recipe("distillation.on_policy_multi_teacher", [
        *_RECIPE, "deepmath_teacher_model=Qwen/Qwen3-32B", "tulu3_teacher_model=Qwen/Qwen3-235B-A22B",
        "deepmath_groups_per_batch=16", "tulu3_groups_per_batch=16", "group_size=2", "learning_rate=2e-6", "loss_fn=cispo",
        'loss_fn_config={"clip_low_threshold": 0.0, "clip_high_threshold": 4.0}', "save_every=0", "max_steps=100"]),
        [f"deepmath_teacher_model={TEACHER}", f"tulu3_teacher_model={TINY_TEACHER}", "deepmath_groups_per_batch=2",
         "tulu3_groups_per_batch=2", "group_size=1", "max_tokens=16", "max_steps=2"]),),
        [trained("opd"), begins_above("opd", _FIRST, 0), begins_above("opd", _SECOND, 0)],
        [trained("opd"), begins("opd", _FIRST, at=0, within=FLOAT32), begins_above("opd", _SECOND, 0.1)]),
}
