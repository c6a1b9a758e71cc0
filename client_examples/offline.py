"""Lays out a working folder in which cookbook recipes find models and data sets by their hub names, offline.

Owns the stand-in data: generated sums, and preference pairs from the cookbook's own example chats. Does not
download anything.

    .client-venv/bin/python client_examples/offline.py FOLDER
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

import tinker_cookbook

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
_EXAMPLES = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"


def make_folder(folder: Path, model_folder: Path | None) -> Path:
    """Everything the launcher's recipes read; what is there already stays."""
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / MODEL
    link.parent.mkdir(parents=True, exist_ok=True)
    if not link.exists():
        link.symlink_to((model_folder or bundled_model()).resolve())
    _once(folder / "arith_sft.jsonl", sums)
    hh = folder / "Anthropic" / "hh-rlhf"
    if not hh.exists():
        _dataset(hh, {"train": preference_pairs(seed=1), "test": preference_pairs(seed=2)[:16]})
    return folder


def sums(count: int = 2000, seed: int = 0) -> list[dict]:
    """Additions in the layout of math_rl's arithmetic prompts, its worked example included."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        x, y = rng.randint(0, 100), rng.randint(0, 100)
        rows.append({"messages": [
            {"role": "user", "content": "What is 4 + 5?"},
            {"role": "assistant", "content": "9"},
            {"role": "user", "content": f"What is {x} + {y}?"},
            {"role": "assistant", "content": str(x + y)},
        ]})
    return rows


def preference_pairs(seed: int) -> list[dict]:
    """The first turn of each example chat: its own answer is chosen, another chat's is rejected."""
    chats = [json.loads(line)["messages"] for line in _EXAMPLES.read_text().splitlines() if line.strip()]
    turns = []
    for messages in chats:
        user = next((m["content"] for m in messages if m["role"] == "user"), None)
        answer = next((m["content"] for m in messages if m["role"] == "assistant"), None)
        if user and answer and not any(word in user + answer for word in ("Human:", "Assistant:")):
            turns.append((user.strip(), answer.strip()))
    shuffled = turns[:]
    random.Random(seed).shuffle(shuffled)
    return [
        {"chosen": f"\n\nHuman: {user}\n\nAssistant: {good}", "rejected": f"\n\nHuman: {user}\n\nAssistant: {bad}"}
        for (user, good), (_, bad) in zip(turns, shuffled) if good != bad
    ]


def _once(file: Path, make) -> None:
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in make()))


def _dataset(folder: Path, splits: dict[str, list[dict]]) -> None:
    """A folder that `datasets.load_dataset` reads by its hub name."""
    import pandas

    folder.mkdir(parents=True)
    lines = ["---", "configs:", "- config_name: default", "  data_files:"]
    for split, rows in splits.items():
        pandas.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
        lines += [f"  - split: {split}", f"    path: {split}.parquet"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))


def bundled_model() -> Path:
    """The folder that the server has prepared for its small model."""
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from verl_tinker.models import default_cache_dir

    folder = default_cache_dir() / "smollm2-135m-instruct-1"
    if not folder.is_dir():
        sys.exit(f"{folder} is not there; start the server once, it makes it: "
                 "python -m verl_tinker.start --config configs/quick_start/cpu.yaml")
    return folder


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model-folder", type=Path, default=None, help="the small model's tokenizer and configuration")
    options = parser.parse_args()
    print(make_folder(options.folder, options.model_folder))
