"""Speed as ratios: the server through the SDK against the same work without it, taking turns in one run.

Owns docs/performance.md. Does not judge: the targets stand in the page. Run it on an otherwise idle machine.

    python bench/performance.py
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import numpy as np
from sides import Peer
from workload import (
    CONCURRENCY,
    LENGTH,
    LOAD_HEADING,
    MODEL,
    NEW_TOKENS,
    RANK,
    ROOT,
    SEQUENCES,
    prompts,
    tiny_rows,
    train_rows,
)

os.environ.setdefault("TINKER_API_KEY", "tml-bench")

CALLS, ROUNDS = 100, 5


class Server:
    """A real server and one SDK training client on it."""

    def __init__(self, url: str):
        import tinker

        self.service = tinker.ServiceClient(base_url=url)
        self.training = self.service.create_lora_training_client(base_model=MODEL, rank=RANK, seed=1).result()

    def forward_backward(self, rows: np.ndarray) -> int:
        from tinker import types

        data = [types.Datum(model_input=types.ModelInput.from_ints(row[:-1].tolist()), loss_fn_inputs={
            "target_tokens": row[1:].astype(np.int64), "weights": np.ones(len(row) - 1, np.float32)}) for row in rows]
        self.training.forward_backward(data, "cross_entropy").result()
        return rows.size - len(rows)

    def optim_step(self) -> None:
        from tinker import types

        self.training.optim_step(types.AdamParams(learning_rate=1e-5)).result()

    def saved_sampler(self):
        return self.training.save_weights_and_get_sampling_client().result()

    def sample(self, sampler, count: int, new_tokens: int = NEW_TOKENS) -> int:
        from tinker import types

        params = types.SamplingParams(max_tokens=new_tokens, stop=[], seed=1)
        futures = [sampler.sample(types.ModelInput.from_ints(p), 1, params) for p in prompts(count)]
        return sum(len(f.result().sequences[0].tokens) for f in futures)


@contextmanager
def server(*overrides: str):
    from real_server import start_server, stop_server

    with tempfile.TemporaryDirectory() as folder:
        process, url = start_server(Path(folder), *overrides)
        try:
            client = Server(url)
            yield client
            client.service.close("success")
        finally:
            stop_server(process)


def timed(function) -> tuple[float, float]:
    began = time.perf_counter()
    result = function()
    return time.perf_counter() - began, result or 0


def overhead() -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of CALLS tiny calls through the SDK, and then on the worker group itself."""
    names = ("forward_backward", "optim_step")
    with server("server.model_path=bundled:tiny") as ours:
        calls = {"forward_backward": lambda: ours.forward_backward(tiny_rows()), "optim_step": ours.optim_step}
        mine = _each(names, lambda name: timed(calls[name])[0])
    # Two Ray clusters at once would slow the side with more processes.
    group = Peer("worker-group")
    theirs = _each(names, lambda name: group.measure(name)[0])
    group.close()
    return {name: (mine[name], theirs[name]) for name in names}


def _each(names: tuple[str, ...], measure) -> dict[str, list[float]]:
    """CALLS measurements of each name in turn, after five that do not count."""
    seconds = {name: [] for name in names}
    for _ in range(CALLS + 5):
        for name in names:
            seconds[name].append(measure(name))
    return {name: values[5:] for name, values in seconds.items()}


def rates(ours, theirs, rounds: int = ROUNDS) -> list[tuple[float, float]]:
    """Tokens a second of both sides, turn by turn."""
    pairs = []
    for _ in range(rounds):
        pairs.append(tuple(tokens / seconds for seconds, tokens in (timed(ours), theirs())))
        print(f"  {pairs[-1][0]:.0f} against {pairs[-1][1]:.0f}", flush=True)
    return pairs


def training() -> list[tuple[float, float]]:
    """Training rates in pairs. There is no sampler: both sides and it would not fit into 24 GB."""
    with server("actor_rollout_ref.rollout.name=null") as ours:
        plain = Peer("plain-training")
        rows = train_rows()
        ours.forward_backward(rows), plain.measure("training")
        print("training", flush=True)
        pairs = rates(lambda: ours.forward_backward(rows), lambda: plain.measure("training"))
        plain.close()
        return pairs


def sampling() -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """Sampling rates in pairs, and seconds from a save to the first token."""
    with server() as ours:
        ours.forward_backward(tiny_rows())
        ours.optim_step()
        saves = [timed(lambda: ours.sample(ours.saved_sampler(), 1, new_tokens=1))[0] for _ in range(ROUNDS)]
        vllm = Peer("direct-vllm")
        base = ours.service.create_sampling_client(base_model=MODEL).result()
        found = {}
        for label, sampler in (("base", base), ("adapter", ours.saved_sampler())):
            for n in CONCURRENCY:
                key = f"{label}, {n}"
                print(f"sampling, {key}", flush=True)
                ours.sample(sampler, n, new_tokens=2), n == 1 and vllm.measure(key)
                found[key] = rates(lambda: ours.sample(sampler, n), lambda: vllm.measure(key))
        vllm.close()
    return found, saves


def page(calls: dict, trained: list, sampled: dict, saves: list[float]) -> str:
    lines = [
        "# Speed, as ratios", "",
        f"Made by `python bench/performance.py` on {os.cpu_count()} cores ({_processor()}), Python {platform.python_version()},",
        f"float32, {time.strftime('%Y-%m-%d')}. SmolLM2-135M, LoRA rank {RANK}, but for the first table, which uses the tiny model",
        "so that the server's own cost shows.", "",
        "For the rates both sides are up at once and take turns, one working while the other is idle: this machine's speed",
        f"drifts by half within minutes, so only neighbours compare. Rates are medians of {ROUNDS} turns, ratios medians of each",
        "turn's ratio.", "",
        "## A tiny call through SDK and HTTP, and on the worker group itself (milliseconds)", "",
        "| call | SDK p50 | SDK p99 | group p50 | group p99 | added at p50 |", "|---|---|---|---|---|---|"]
    for name, sides in calls.items():
        (a50, a99), (b50, b99) = (np.percentile(side, [50, 99]) * 1e3 for side in sides)
        lines.append(f"| {name} | {a50:.1f} | {a99:.1f} | {b50:.1f} | {b99:.1f} | {a50 - b50:.1f} |")
    lines += ["", f"## Sampling, tokens a second, {NEW_TOKENS} new tokens a request (target: ratio 0.95 at 64)", "",
              "The other side is vLLM's engine driven directly, with the same engine arguments, threads and LoRA products.", "",
              "| weights, requests at once | through the SDK | vLLM directly | ratio |", "|---|---|---|---|"]
    lines += [_row(key, pairs) for key, pairs in sampled.items()]
    lines += ["", "## Training, tokens a second, forward_backward (target: ratio 0.95)", "",
              "The other side is transformers + peft in one process, with the same threads and allocator settings. All sequences have one",
              "length, so that neither side pads, and the trainer's attention takes neighbours of one length together.", "",
              "| batch | through the SDK | transformers + peft | ratio |", "|---|---|---|---|",
              _row(f"{SEQUENCES} x {LENGTH}", trained), "",
              "## From save_weights_for_sampler to the first token", "",
              f"{median(saves):.2f} s (median of {ROUNDS}): export, load, the comparison of trainer and sampler, one token.", ""]
    return "\n".join(lines)


def _row(label: str, pairs: list[tuple[float, float]]) -> str:
    ours, theirs = zip(*pairs)
    return f"| {label} | {median(ours):.0f} | {median(theirs):.0f} | {median(a / b for a, b in pairs):.2f} |"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown"


def main() -> None:
    text = page(overhead(), training(), *sampling())
    file = ROOT / "docs" / "performance.md"
    _, heading, load = file.read_text().partition(LOAD_HEADING)
    file.write_text(text + (f"\n{heading}{load}" if heading else ""))
    print(text)


if __name__ == "__main__":
    main()
