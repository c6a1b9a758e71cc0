"""`python -m verl_tinker.plan.document` writes docs/presets.md: what each preset takes, and what each key means.

Owns the page's words, and what was run where. Presets, keys and reasons are read from where they are used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from verl_tinker import honoured, sections, teachers
from verl_tinker.checks import check_served
from verl_tinker.config import ENVIRONMENT, Config, load_config
from verl_tinker.plan.memory import GIB
from verl_tinker.plan.report import Cluster, report
from verl_tinker.schema import ConfigError, describe

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "presets.md"

# What a strategy or an engine needs beside verl, and the module by which one sees whether it is there.
PACKAGES = {"veomni": ("veomni", "veomni"), "megatron": ("megatron-core", "megatron.core"), "sglang": ("sglang", "sglang")}

_LOGICAL = "never on a GPU; its code on CPU with logical GPUs (`tests/engine/test_stock_replica.py`)"
_RUN_HERE = "run without a GPU ([verification.md](verification.md))"
# What was run, and where. A preset that is not named was never run.
RUN = {
    "configs/quick_start/cpu.yaml": _RUN_HERE,
    "configs/distill/cpu.yaml": _RUN_HERE,
    "configs/quick_start/actor_rollout.yaml": _LOGICAL,
    "configs/quick_start/actor_rollout_ref.yaml": _LOGICAL,
    "configs/advance/long_context.yaml": "never on a GPU; sequences shared by two workers without one "
                                         "(`tests/engine/test_two_workers.py`)",
}

_HEAD = """# Presets

*Written by `python -m verl_tinker.plan.document`; do not edit by hand.*

A preset is laid over verl's own defaults, then come the environment and `--set key=value`, as in
`--set trainer.n_gpus_per_node=4 --set actor_rollout_ref.rollout.max_model_len=8192`. `--config` looks from the current
folder, then in this repository, then in the installed package. An unknown or ill-typed key is one error that names it.

    python -m verl_tinker.config --config FILE      # checks everything and prints the result, with all of verl's keys
    python -m verl_tinker.plan --config FILE        # GPUs of each role, where they lie, memory on each; no GPU needed

`plan` takes `--gpus-per-node`, `--gpu-memory-gb`, `--nodes`, `--lora-rank`, `--model-config [NAME=]FOLDER` for a model that
neither `configs/models` nor the hub describes, and `--json`. It ends with an error, and the key to change, when
something does not fit. Its memory is estimated from each model's config.json by the formulas of
`verl_tinker/plan/memory.py`, and was compared with no GPU.

## What each takes

Memory: GiB on each GPU at most, on GPUs of 80; for presets without a GPU, of each process. "Validated" means that the
preset was merged with the defaults of the pinned verl and that verl's own classes for actor, rollout, reference and teachers
accept it, which `tests/unit/test_presets.py` shows. "Not validated": they accept it too, but a package that the workers
would need is in neither of the environments that `install_verl.sh` makes. Unless it says so, a preset was never run.
"""


def page() -> str:
    """The whole text of docs/presets.md."""
    parts = [_HEAD, _table(["preset", "for", "GPUs", "GiB on each", "state"], [_row(file) for file in preset_files()]),
             _NOTES, *_sections(), _environment(), _verl()]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def preset_files() -> list[str]:
    """Every preset of the repository, by the path that `--config` takes."""
    return sorted(str(file.relative_to(ROOT)) for file in (ROOT / "configs").rglob("*.yaml"))


def packages(config: Config) -> list[str]:
    """Words of PACKAGES that the preset needs."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    words = [actor.strategy, *([rollout.name] if config.has_rollout else []), *(t.rollout.name for t in config.teachers)]
    return [word for word in dict.fromkeys(words) if word in PACKAGES]


def _row(path: str) -> list[str]:
    config = load_config(path, (), {})
    comment = re.match(r"((?:#.*\n)+)", (ROOT / path).read_text())[1]
    purpose = " ".join(line.lstrip("# ") for line in comment.splitlines()).split(". ")[0].rstrip(".")
    found = report(config, Cluster())
    on_cpu = config.device == "cpu"
    nodes = f"{found.cluster.nodes} node{'s' if found.cluster.nodes != 1 else ''}"
    gpus = "none" if on_cpu else f"{sum(role.size for role in found.roles)} ({nodes})"
    most: dict[str, float] = {}
    for part in found.parts:
        most[part.role] = max(part.total / GIB, most.get(part.role, 0.0))
    memory = ", ".join(f"{role} {size:.0f}" for role, size in most.items())
    return [f"`{path}`", purpose, gpus, memory, _state(path, config)]


def _state(path: str, config: Config) -> str:
    missing = [PACKAGES[word][0] for word in packages(config) if not _is_pinned(PACKAGES[word][0])]
    found = [f"not validated: no environment of ours has {' and '.join(missing)}" if missing else "validated"]
    try:
        check_served(config)
    except ConfigError as error:
        found.append(f"**this server cannot start it yet** (`{str(error).split()[0].rstrip(':')}`)")
    return "; ".join(found + ([RUN[path]] if path in RUN else []))


def _is_pinned(package: str) -> bool:
    files = (ROOT / "requirements").glob("*.txt")
    return any(re.search(rf"^{re.escape(package)}==", file.read_text(), re.MULTILINE) for file in files)


_NOTES = """
Trainer and sampler of one preset are on the same GPUs and take turns, unless it says otherwise, so their figures do not
add up. With adapters the trainer's figure counts `server.max_training_runs` runs of rank 32, which is the SDK's default.

## Our own keys

Each key has this one place; the presets' comments say what they choose and why. `actor_rollout_ref` and `global_profiler`
are verl's own sections.
"""


def _sections() -> list[str]:
    named = {"server": sections.ServerConfig, "actor": sections.ActorConfig, "trainer": sections.TrainerConfig,
             "cpu": sections.CpuConfig, "distillation": sections.DistillationConfig,
             "distillation.teacher_models.NAME": sections.TeacherEntry}
    found = ["`device`: auto, cpu or cuda; auto takes cuda where torch sees a GPU."]
    for name, cls in named.items():
        intro = " ".join((cls.__doc__ or "").split())
        rows = [[f"`{f.name}`", describe(str(f.type)), _default(f), f.metadata["text"]] for f in dataclasses.fields(cls)]
        found.append(f"### {name}\n\n{intro}\n\n" + _table(["key", "type", "default", "meaning"], rows))
    return found


def _default(field: dataclasses.Field) -> str:
    if field.default is not dataclasses.MISSING:
        return "" if field.default is None else json.dumps(field.default).strip('"')
    if field.default_factory is dataclasses.MISSING:
        return "must be given"
    return "{}" if field.default_factory is dict else ""


def _environment() -> str:
    rows = [[f"`{name}`", f"`{key}`"] for name, key in ENVIRONMENT.items()]
    rows += [[f"`{name}`", f"`distillation.teacher_models.NAME.{key}`, where there is one teacher"]
             for name, key in teachers.ENVIRONMENT.items()]
    return "## Environment\n\n" + _table(["variable", "stands for"], rows)


def _verl() -> str:
    def rows(reasons: dict[str, str]) -> list[list[str]]:
        grouped: dict[str, list[str]] = {}
        for key, reason in reasons.items():
            grouped.setdefault(reason, []).append(f"`{key}`")
        return [[", ".join(keys), reason] for reason, keys in grouped.items()]

    refused = {key: reason for key, (_, reason) in honoured.REFUSED.items()}
    return "\n".join([
        "## verl's keys that do nothing here\n", "Below `actor_rollout_ref`. A preset that sets one to another value than "
        "verl's is told so by a warning.\n", _table(["keys", "why"], rows(honoured.UNUSED)),
        "\nOf a teacher's `inference` the same keys as of `rollout`, and also:\n",
        _table(["keys", "why"], rows(honoured.UNUSED_OF_TEACHERS)),
        "\nWithout a GPU also these, and whatever else of `rollout` is not max_model_len, dtype, max_num_seqs, "
        "max_num_batched_tokens, enforce_eager, enable_prefix_caching, enable_chunked_prefill, seed or the number of "
        "processes:\n",
        _table(["keys", "why"], rows(honoured.UNUSED_ON_CPU)),
        "\n## verl's keys that are refused\n", "A server does not start with another value than verl's own.\n",
        _table(["keys", "why"], rows(refused)),
        "\nAlso refused at the start, and nowhere else: strategies other than FSDP2, and engines "
        "other than vLLM; without a GPU `distillation.strict_pack` for a teacher with several replicas. "
        "Of `global_profiler`, tools other than torch and `profile_continuous_steps` are refused always."])


def _table(head: list[str], rows: list[list[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m verl_tinker.plan.document", description=__doc__.splitlines()[0])
    parser.parse_args(arguments)
    PAGE.write_text(page())
    print(f"wrote {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
