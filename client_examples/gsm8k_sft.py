"""Turns the training problems of GSM8K into chats that chat_sl reads: the worked solution, with its answer in a box.

Owns that file's layout: the user's turn is word for word what the RL recipe asks. Takes the set by its hub name, from the
working folder where a stand-in lies there.

    .client-venv/bin/python client_examples/gsm8k_sft.py FILE
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import load_dataset
from tinker_cookbook.recipes.math_rl.math_env import MathEnv, extract_gsm8k_final_answer


def chats(rows: Iterable[dict]) -> Iterator[dict]:
    for row in rows:
        # The set marks each calculation for a calculator as <<1+2=3>>.
        solution = re.sub(r"<<.*?>>", "", row["answer"].rpartition("####")[0]).strip()
        answer = f"{solution}\n\\boxed{{{extract_gsm8k_final_answer(row['answer'])}}}"
        yield {"messages": [{"role": "user", "content": row["question"] + MathEnv.question_suffix()},
                            {"role": "assistant", "content": answer}]}


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: gsm8k_sft.py FILE")
    lines = [json.dumps(chat) + "\n" for chat in chats(load_dataset("openai/gsm8k", name="main", split="train"))]
    Path(sys.argv[1]).write_text("".join(lines))
