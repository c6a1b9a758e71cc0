"""`make demo`: starts the server, trains a small model with the cookbook's `shorter` recipe, draws the curve.

Owns the server that it starts and stops, and the folder runs/demo. Contains no training loop: the recipe is the
cookbook's own, launched by its own command line.

    .venv/bin/python client_examples/demo.py --steps 10
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import run

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
QUESTION = "<|im_start|>user\nWho are you?<|im_end|>\n<|im_start|>assistant\n"
FOLDER = run.ROOT / "runs" / "demo"
LENGTH, REWARD = "env/all/ac_tokens_per_turn", "env/all/reward/total"
START_LIMIT_S, STOP_LIMIT_S = 600, 90


class DemoError(RuntimeError):
    """Something that ends the demo; the text says where to look."""


class Progress:
    """One line that is rewritten on a terminal, and lines of their own where there is none."""

    def __init__(self):
        self.live, self.shown, self.began = sys.stdout.isatty(), "", time.monotonic()

    def show(self, text: str) -> None:
        if text != self.shown or self.live:
            stamp = f"{int(time.monotonic() - self.began) // 60}:{int(time.monotonic() - self.began) % 60:02d}"
            print(f"\r\033[K{stamp}  {text}" if self.live else f"{stamp}  {text}", end="" if self.live else "\n", flush=True)
        self.shown = text

    def end(self, text: str) -> None:
        self.show(text)
        if self.live:
            print()
        self.shown = ""


@contextmanager
def server(preset: str, progress: Progress) -> Iterator[str]:
    """A ready server on a free port; it has ended when the block is left, however that happens."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = FOLDER / "server.log"
    settings = ("--set", f"server.port={port}", "--set", f"server.checkpoint_dir={FOLDER / 'checkpoints'}")
    command = [sys.executable, "-m", "verl_tinker.start", "--config", preset, *settings]
    with open(log, "w") as output:
        # A session of its own: Ctrl-C reaches the demo alone, which then ends the server in good order.
        process = subprocess.Popen(command, cwd=run.ROOT, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{port}", log, progress)
        yield f"http://127.0.0.1:{port}"
    finally:
        progress.end("stopping the server")
        stop(process)


def wait_until_ready(process: subprocess.Popen, url: str, log: Path, progress: Progress) -> None:
    limit = time.monotonic() + START_LIMIT_S
    phase = "launching"
    while time.monotonic() < limit:
        if process.poll() is not None:
            raise DemoError(f"the server ended with status {process.returncode}: {last_line(log)} (all of it is in {log})")
        try:
            answer = httpx.get(f"{url}/api/v1/healthz", timeout=5).json()
            phase = answer.get("phase", phase)
            if answer.get("status") == "ok":
                progress.end(f"the server is ready at {url}")
                return
            if answer.get("status") == "failed":
                raise DemoError(f"the server could not start: {answer.get('reason')} (all of it is in {log})")
        except (httpx.HTTPError, ValueError):
            pass
        progress.show(f"starting the server: {phase}")
        time.sleep(1)
    raise DemoError(f"the server was not ready after {START_LIMIT_S} s, still {phase!r}; see {log}")


def stop(process: subprocess.Popen) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def train(url: str, steps: int, progress: Progress) -> list[dict]:
    """Run the recipe to its end and return its metrics, one record a step."""
    logs, output = FOLDER / "shorter", FOLDER / "recipe.log"
    with open(output, "w") as sink:
        process = run.launch("shorter", logs, url, FOLDER / "work", [f"max_steps={steps}"],
                             stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        while process.poll() is None:
            progress.show(describe(read_lines(logs / "metrics.jsonl"), steps))
            time.sleep(1)
    finally:
        stop(process)
    metrics = [row for row in read_lines(logs / "metrics.jsonl") if LENGTH in row]
    if process.returncode != 0 or not metrics:
        raise DemoError(f"the recipe ended with status {process.returncode}: {last_line(output)} (all of it is in {output})")
    progress.end(describe(metrics, steps))
    return metrics


def describe(metrics: list[dict], steps: int) -> str:
    done = [row for row in metrics if LENGTH in row]
    bar = "#" * round(20 * len(done) / steps)
    text = f"training [{bar:<20}] step {len(done)} of {steps}"
    return text + (f", {done[-1][LENGTH]:.1f} tokens per answer, reward {done[-1][REWARD]:+.2f}" if done else "")


def answer(url: str, sampler: str | None) -> str:
    """The greedy answer of the base model, or of a saved sampler, by the plain SDK."""
    import tinker
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "work" / MODEL)
    client = tinker.ServiceClient(base_url=url, api_key=os.environ.get("TINKER_API_KEY", "tml-local"))
    source = {"model_path": sampler} if sampler else {"base_model": MODEL}
    prompt = tinker.ModelInput.from_ints(tokenizer.encode(QUESTION))
    params = tinker.SamplingParams(max_tokens=60, temperature=0.0, stop=[tokenizer.eos_token_id])
    sampled = client.create_sampling_client(**source).result().sample(prompt, num_samples=1, sampling_params=params).result()
    return tokenizer.decode(sampled.sequences[0].tokens, skip_special_tokens=True).strip()


def draw(metrics: list[dict], file: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, lengths = pyplot.subplots(figsize=(7, 4), layout="constrained")
    rewards = lengths.twinx()
    steps = range(1, len(metrics) + 1)
    lengths.plot(steps, [row[LENGTH] for row in metrics], "o-", color="tab:blue")
    rewards.plot(steps, [row[REWARD] for row in metrics], "s--", color="tab:orange")
    lengths.set(title="Learning to answer shorter", xlabel="training step", ylim=(0, None))
    lengths.set_ylabel("tokens per answer", color="tab:blue")
    rewards.set_ylabel("reward", color="tab:orange")
    lengths.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(file, dpi=150)
    pyplot.close(figure)


def read_lines(file: Path) -> list[dict]:
    """The records written so far; the last line may still be in the making."""
    text = file.read_text() if file.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def last_line(file: Path) -> str:
    lines = [line for line in file.read_text().splitlines() if line.strip()]
    return lines[-1].strip() if lines else "no output"


def demo(preset: str, steps: int) -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    progress = Progress()
    with server(preset, progress) as url:
        run.prepare_folder(FOLDER / "work")
        before = answer(url, None)
        metrics = train(url, steps, progress)
        records = read_lines(FOLDER / "shorter" / "checkpoints.jsonl")
        after = answer(url, next(r["sampler_path"] for r in records if r["name"] == "final"))
    draw(metrics, FOLDER / "shorter.png")
    print(f"\nWho are you?\n  before: {before}\n  after:  {after}\n")
    print(f"Tokens per answer went from {metrics[0][LENGTH]:.1f} to {metrics[-1][LENGTH]:.1f} in {len(metrics)} steps.")
    print(f"The curve is in {(FOLDER / 'shorter.png').relative_to(run.ROOT)}")


def interrupt(*_) -> None:
    """End in good order, by Ctrl-C or SIGTERM; a second one must not cut the end short and leave a server behind."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--config", default="configs/quick_start/cpu.yaml", help="the server's preset")
    options = parser.parse_args()
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, interrupt)
    try:
        demo(options.config, options.steps)
    except DemoError as error:
        sys.exit(f"\n{error}")
    except KeyboardInterrupt:
        sys.exit("\nStopped.")


if __name__ == "__main__":
    main()
