"""`bench`: how fast a running server samples and trains, measured from here with the official SDK.

Owns the load. Does not explain the numbers: docs/performance.md does, whose own tables are made by bench/ in the repository.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import click
import numpy as np
from rich.progress import track

from verl_tinker.cli.server import Server, json_option, key, out, print_json, server_option, table


@click.command()
@server_option
@json_option
@click.option("--model", help="The base model; by default the first that the server trains.")
@click.option("--samples", default=64, show_default=True, type=click.IntRange(0), help="Samples at once; 0 for none.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(0), help="Training steps; 0 for none.")
@click.option("--batch", default=8, show_default=True, type=click.IntRange(1), help="Sequences in a training step.")
@click.option("--prompt-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--max-tokens", default=64, show_default=True, type=click.IntRange(1))
@click.option("--rank", default=32, show_default=True, type=click.IntRange(1), help="Of the adapter that is trained.")
def bench(server: Server, as_json: bool, model: str | None, samples: int, steps: int, batch: int, **sizes: int) -> None:
    """Measure sampling and training. Trains an adapter of its own, which ends with the measurement."""
    # The SDK waits for a server for as long as it takes; the question whether one is there is asked first.
    names = [m["name"] for m in server.get("/api/v1/overview")["server"]["models"] if m["trainable"]]
    if not names or model not in (None, *names):
        raise click.ClickException(f"{server.url} trains {', '.join(names) or 'nothing'}, and not {model or 'any model'}")
    import tinker

    os.environ["TINKER_API_KEY"] = key() or "tml-local"
    client = tinker.ServiceClient(base_url=server.url)
    try:
        report = _measured(client, model or names[0], samples, steps, batch, quiet=as_json, **sizes)
    finally:
        client.close("success").result(30)
    if as_json:
        print_json(report)
    else:
        _print(report)


def _measured(client: Any, model: str, samples: int, steps: int, batch: int, quiet: bool, prompt_tokens: int,
              max_tokens: int, rank: int) -> dict:
    report: dict[str, Any] = {"model": model, "round_trip_s": _spread(_round_trips(client))}
    if samples:
        report["sampling"] = _sampling(client, model, samples, prompt_tokens, max_tokens, quiet)
    if steps:
        report["training"] = _training(client, model, steps, batch, prompt_tokens + max_tokens, rank, quiet)
    return report


def _round_trips(client: Any, times: int = 20) -> Iterator[float]:
    for _ in range(times):
        began = time.perf_counter()
        client.get_server_capabilities()
        yield time.perf_counter() - began


def _sampling(client: Any, model: str, samples: int, prompt_tokens: int, max_tokens: int, quiet: bool) -> dict:
    from tinker import types

    sampler = client.create_sampling_client(base_model=model)
    # No stop at all, so that all samples have one length, and prompts of their own, so that none is computed for another.
    params = types.SamplingParams(max_tokens=max_tokens, temperature=1.0, stop=[])
    prompts = [types.ModelInput.from_ints([10 + (i * 7 + j) % 200 for j in range(prompt_tokens)]) for i in range(samples)]
    sampler.sample(prompts[0], 1, params).result()
    began = time.perf_counter()
    futures = [sampler.sample(prompt, 1, params) for prompt in prompts]
    ends = []
    for future in _shown(futures, "sampling", quiet):
        future.result()
        ends.append(time.perf_counter() - began)
    return {"samples": samples, "tokens_each": max_tokens, "tokens_per_s": samples * max_tokens / ends[-1],
            "seconds": _spread(ends)}


def _training(client: Any, model: str, steps: int, batch: int, length: int, rank: int, quiet: bool) -> dict:
    from tinker import types

    training = client.create_lora_training_client(base_model=model, rank=rank)
    training = training.result() if hasattr(training, "result") else training
    tokens = [10 + j % 200 for j in range(length + 1)]
    datum = types.Datum(
        model_input=types.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": types.TensorData.from_numpy(np.asarray(tokens[1:], np.int64)),
                        "weights": types.TensorData.from_numpy(np.ones(length, np.float32))})

    def step() -> float:
        began = time.perf_counter()
        computed = training.forward_backward([datum] * batch, "cross_entropy")
        applied = training.optim_step(types.AdamParams(learning_rate=1e-4))
        computed.result(), applied.result()
        return time.perf_counter() - began

    step()
    seconds = [step() for _ in _shown(range(steps), "training", quiet)]
    return {"steps": steps, "tokens_each": batch * length, "tokens_per_s": batch * length * steps / sum(seconds),
            "seconds": _spread(seconds)}


def _shown(items: Iterable, text: str, quiet: bool) -> Iterable:
    return items if quiet else track(list(items), text, console=out, transient=True)


def _spread(seconds: Iterable[float]) -> dict[str, float]:
    values = list(seconds)
    return {f"p{p}": float(np.percentile(values, p)) for p in (50, 90, 99)}


def _print(report: dict) -> None:
    rows = [["round trip", *_row(report["round_trip_s"]), ""]]
    for kind, unit in (("sampling", "samples"), ("training", "steps")):
        if kind in report:
            part = report[kind]
            rows.append([f"{kind}, {part[unit]} {unit} of {part['tokens_each']} tokens", *_row(part["seconds"]),
                         f"{part['tokens_per_s']:.0f} tokens/s"])
    out.print(report["model"])
    table({"": "left", "p50": "right", "p90": "right", "p99": "right", " ": "right"}, rows)


def _row(spread: dict[str, float]) -> list[str]:
    return [f"{value:.3f} s" for value in spread.values()]
