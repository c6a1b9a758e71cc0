"""Lays out a working folder in which cookbook recipes find models and data sets by their hub names, offline.

Owns the stand-in data: small sets made here in the columns of those that recipes load from the hub, and the cookbook's own
example chats. They show that a recipe runs, not what it would learn from the real data. Does not download anything.

    .client-venv/bin/python client_examples/offline.py FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import tinker_cookbook
from run import MODEL, NAMES_IN_CODE

_EXAMPLES = Path(tinker_cookbook.__file__).parent / "example_data" / "conversations.jsonl"
_HELD_OUT = 16
# Symbol, name, atomic number, group of the periodic table.
_ELEMENTS = [
    ("H", "hydrogen", 1, 1), ("He", "helium", 2, 18), ("Li", "lithium", 3, 1), ("Be", "beryllium", 4, 2),
    ("B", "boron", 5, 13), ("C", "carbon", 6, 14), ("N", "nitrogen", 7, 15), ("O", "oxygen", 8, 16),
    ("F", "fluorine", 9, 17), ("Ne", "neon", 10, 18), ("Na", "sodium", 11, 1), ("Mg", "magnesium", 12, 2),
    ("Al", "aluminium", 13, 13), ("Si", "silicon", 14, 14), ("P", "phosphorus", 15, 15), ("S", "sulfur", 16, 16),
    ("Cl", "chlorine", 17, 17), ("Ar", "argon", 18, 18), ("K", "potassium", 19, 1), ("Ca", "calcium", 20, 2),
    ("Fe", "iron", 26, 8), ("Ni", "nickel", 28, 10), ("Cu", "copper", 29, 11), ("Zn", "zinc", 30, 12),
    ("Ag", "silver", 47, 11), ("Sn", "tin", 50, 14), ("I", "iodine", 53, 17), ("Au", "gold", 79, 11),
]


def make_folder(folder: Path, model_folder: Path | None) -> Path:
    """Everything the launcher's recipes read; what is there already stays."""
    model_folder = (model_folder or bundled_model()).resolve()
    (folder / MODEL).parent.mkdir(parents=True, exist_ok=True)
    if not (folder / MODEL).exists():
        (folder / MODEL).symlink_to(model_folder)
    for name in NAMES_IN_CODE:
        if not (folder / name).exists():
            _with_think_marks(folder / name, model_folder)
    _once(folder / "arith_sft.jsonl", sums)
    _once(folder / "chats.jsonl", chats)
    _dataset(folder / "Anthropic" / "hh-rlhf", lambda: {
        "train": preference_pairs(seed=1), "test": preference_pairs(seed=2)[:_HELD_OUT]})
    _dataset(folder / "HuggingFaceH4" / "no_robots", lambda: {"train": chats()[:-_HELD_OUT], "test": chats()[-_HELD_OUT:]})
    _dataset(folder / "zwhe99" / "DeepMath-103K", lambda: {"train": equations()})
    _dataset(folder / "openai" / "gsm8k", lambda: {"train": word_problems(seed=1), "test": word_problems(seed=2)[:_HELD_OUT]},
             config="main")
    _dataset(folder / "hicai-zju" / "SciKnowEval", lambda: {"test": element_questions()})
    _dataset(folder / "allenai" / "tulu-3-sft-mixture", lambda: {"train": instructions()})
    _dataset(folder / "open-thoughts" / "OpenThoughts3-1.2M", lambda: {"train": traces()})
    return folder


def _with_think_marks(folder: Path, model_folder: Path) -> None:
    """The model's configuration, and its tokenizer with two marks that it does not use named <think> and </think>: the
    renderers of the Qwen names want each to be one token. Recipes read no weights.
    """
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer_config.json"):
        shutil.copyfile(model_folder / name, folder / name)
    text = (model_folder / "tokenizer.json").read_text()
    for old, new in (("<issue_comment>", "<think>"), ("<issue_closed>", "</think>")):
        text = text.replace(json.dumps(old), json.dumps(new))
    (folder / "tokenizer.json").write_text(text)


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


def chats() -> list[dict]:
    """The cookbook's own example chats."""
    return [json.loads(line) for line in _EXAMPLES.read_text().splitlines() if line.strip()]


def preference_pairs(seed: int) -> list[dict]:
    """The first turn of each example chat: its own answer is chosen, another chat's is rejected."""
    turns = []
    for messages in (chat["messages"] for chat in chats()):
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


def equations(count: int = 200, seed: int = 0) -> list[dict]:
    """Linear equations with whole solutions, in the columns of DeepMath."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, x, b = rng.randint(2, 9), rng.randint(0, 20), rng.randint(1, 30)
        rows.append({"question": f"Solve for x: {a}x + {b} = {a * x + b}.", "final_answer": str(x)})
    return rows


def word_problems(seed: int, count: int = 200) -> list[dict]:
    """Additions of small numbers told as stories, in the columns of GSM8K."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        name, thing = rng.choice(["Ann", "Ben", "Eve", "Tom"]), rng.choice(["apples", "books", "coins", "pens"])
        x, y = rng.randint(1, 2), rng.randint(1, 2)
        rows.append({"question": f"{name} has {x} {thing} and gets {y} more. How many {thing} does {name} have now?",
                     "answer": f"{x} + {y} = {x + y}\n#### {x + y}"})
    return rows


def element_questions(seed: int = 0) -> list[dict]:
    """Multiple choice on the chemical elements, in the columns of SciKnowEval."""
    rng = random.Random(seed)
    rows = []
    for symbol, name, number, group in _ELEMENTS:
        for question, right, column in (
            (f"Which element has the symbol {symbol}?", name, 1),
            (f"What is the atomic number of {name}?", number, 2),
            (f"To which group of the periodic table does {name} belong?", group, 3),
        ):
            others = sorted({str(element[column]) for element in _ELEMENTS} - {str(right)})
            texts = [str(right), *rng.sample(others, 3)]
            rng.shuffle(texts)
            rows.append({"question": question, "choices": {"label": list("ABCD"), "text": texts},
                         "answerKey": "ABCD"[texts.index(str(right))], "domain": "Chemistry",
                         "details": {"level": "L3"}, "type": "mcq-4-choices"})
    return rows


def instructions(count: int = 1536, seed: int = 0) -> list[dict]:
    """Questions of the three kinds above with their answers, in the columns of Tulu 3, whose recipes hold out 1,024 rows."""
    rng = random.Random(seed)
    known = [(row["question"], row["choices"]["text"]["ABCD".index(row["answerKey"])]) for row in element_questions()]
    known += [(row["question"], f"x = {row['final_answer']}") for row in equations()]
    known += [(row["question"], row["answer"].partition("\n")[0]) for row in word_problems(seed=1)]
    return [{"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}
            for question, answer in rng.choices(known, k=count)]


def traces(count: int = 256, seed: int = 0) -> list[dict]:
    """Sums of 24 numbers, added one by one before the answer, in the columns of OpenThoughts3; more than 256 tokens each."""
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        numbers = [rng.randint(1, 99) for _ in range(24)]
        partial = list(itertools.accumulate(numbers))
        steps = "\n".join(f"{a} + {n} = {b}" for a, n, b in zip(partial, numbers[1:], partial[1:]))
        rows.append({"conversations": [
            {"from": "human", "value": "Add " + ", ".join(map(str, numbers)) + "."},
            {"from": "gpt", "value": f"<think>\n{steps}\n</think>\n\nThe sum is {partial[-1]}."},
        ]})
    return rows


def _once(file: Path, make) -> None:
    if not file.exists():
        file.write_text("".join(json.dumps(row) + "\n" for row in make()))


def _dataset(folder: Path, make: Callable[[], dict[str, list[dict]]], config: str = "default") -> None:
    """A folder that `datasets.load_dataset` reads by its hub name; `make` gives the rows of each split."""
    import pandas

    if folder.exists():
        return
    folder.mkdir(parents=True)
    lines = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in make().items():
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
