"""What a group of samples of one prompt costs against one sample, written as a section of docs/performance.md.

Owns the section. Does not judge: the target stands in it. Run it on an otherwise idle machine.

    python bench/prefix.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

from sides import Peer
from workload import GROUP, PROMPT_LENGTHS, write_section

HEADING = "## A group of identical prompts"
ONE, TOGETHER, APART = "1 x 1", f"1 x {GROUP}", f"{GROUP} x 1"


def measured(rounds: int) -> dict[int, list[dict[str, tuple[float, float]]]]:
    """By length of prompt, for each round: seconds and cached tokens of one sample, and of a group in both ways."""
    peer, found = Peer("prompt-groups"), {length: [] for length in PROMPT_LENGTHS}
    for turn in range(rounds + 1):
        ways = [ONE, TOGETHER, APART]
        for length, turns in found.items():
            turns.append({way: peer.measure(f"{length}, {way}") for way in ways[turn % 3 :] + ways[: turn % 3]})
    peer.close()
    # The first round of each also pays for memory and threads.
    return {length: turns[1:] for length, turns in found.items()}


def section(found: dict[int, list[dict[str, tuple[float, float]]]], rounds: int) -> str:
    lines = [
        HEADING, "",
        f"Made by `python bench/prefix.py` on {os.cpu_count()} cores, {time.strftime('%Y-%m-%d')}: the sampler as in the server,",
        "in its own process, SmolLM2-135M in float32, one token a sample, a prompt that it has not seen each time. Ratios are",
        f"against one sample of such a prompt, medians of {rounds} turns in which the three take turns (target at 1,024 tokens:",
        "below 2). 1 would be a prompt computed once, 8 one computed for every sample.", "",
        f"| prompt | one sample | {GROUP} of one request | ratio | {GROUP} requests at once | ratio | from the cache, a further request |",
        "|---|---|---|---|---|---|---|"]
    for length, turns in found.items():
        one, together, apart = ([turn[way][0] for turn in turns] for way in (ONE, TOGETHER, APART))
        cached = median(turn[APART][1] for turn in turns) / (GROUP - 1)
        lines.append(
            f"| {length:,} tokens | {median(one):.2f} s | {median(together):.2f} s | {_ratio(together, one)} | "
            f"{median(apart):.2f} s | {_ratio(apart, one)} | {cached:.0f} tokens |")
    lines += ["", "Samples share the whole blocks of a prompt, which are of 32 tokens here: what follows the last of them, and all of a",
              "prompt of less than a block, is computed for every sample."]
    return "\n".join([*lines, ""])


def _ratio(group: list[float], one: list[float]) -> str:
    return f"{median(a / b for a, b in zip(group, one)):.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    text = section(measured(rounds), rounds)
    print(text)
    write_section(text)


if __name__ == "__main__":
    main()
